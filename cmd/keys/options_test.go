package main

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/better-compute/join-operator/joinsvc/keys"
)

func TestTheCommandLine(t *testing.T) {
	file := filepath.Join(t.TempDir(), "url")
	if err := os.WriteFile(file, []byte("postgres://x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	o, err := parse([]string{
		"--database-url-file", file, "--trust-domain", "dev.join.test", "--tls-ca-file", "ca.crt", "--endpoint", "https://a", "--endpoint", "https://b",
		"--overlap", "1h", "--force", "signing", "--force", "bundle",
	})
	if err != nil {
		t.Fatal(err)
	}
	if o.databaseURL != "postgres://x" || !slices.Equal(o.endpoints, []string{"https://a", "https://b"}) || o.overlap != time.Hour ||
		!slices.Equal(o.force, []keys.Kind{keys.Signing, keys.Bundle}) || o.keysNamespace != "join-keys" || o.trustNamespace != "join-trust" {
		t.Errorf("read as %+v", o)
	}
	if _, err := parse([]string{"--database-url", "x", "--trust-domain", "d", "--keys-only"}); err != nil {
		t.Errorf("keys only: %v", err)
	}
	for name, args := range map[string][]string{
		"nothing":         nil,
		"no endpoint":     {"--database-url", "x", "--trust-domain", "d", "--tls-ca-file", "f"},
		"no CA":           {"--database-url", "x", "--trust-domain", "d", "--endpoint", "https://a"},
		"no trust domain": {"--database-url", "x", "--tls-ca-file", "f", "--endpoint", "https://a"},
		"two databases":   {"--database-url", "x", "--database-url-file", file, "--trust-domain", "d", "--keys-only"},
		"an argument":     {"--database-url", "x", "--trust-domain", "d", "--keys-only", "now"},
		"no duration":     {"--database-url", "x", "--trust-domain", "d", "--keys-only", "--overlap", "soon"},
	} {
		if _, err := parse(args); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
