package main

import (
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestTheCommandLine(t *testing.T) {
	file := filepath.Join(t.TempDir(), "url")
	if err := os.WriteFile(file, []byte("postgres://db\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		args []string
		want string // in the error
		url  string
	}{
		"a URL":           {args: []string{"--database-url", "postgres://x"}, url: "postgres://x"},
		"a URL in a file": {args: []string{"--database-url-file", file}, url: "postgres://db"},
		"no URL":          {want: "either --database-url or --database-url-file"},
		"two URLs":        {args: []string{"--database-url", "x", "--database-url-file", file}, want: "either"},
		"no such file":    {args: []string{"--database-url-file", file + "x"}, want: "read the database's URL"},
		"an argument":     {args: []string{"--database-url", "x", "start"}, want: `unexpected argument "start"`},
		"an unknown flag": {args: []string{"--database-uri", "x"}, want: "database-uri"},
	} {
		t.Run(name, func(t *testing.T) {
			o, err := parse(c.args)
			if c.want == "" && (err != nil || o.databaseURL != c.url) {
				t.Errorf("got %q, %v", o.databaseURL, err)
			}
			if c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("got %v, want …%s…", err, c.want)
			}
		})
	}
	if _, err := parse([]string{"-h"}); !errors.Is(err, flag.ErrHelp) {
		t.Errorf("-h: %v", err)
	}
}
