package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// docsCommands are the bcd command lines of docs/bcd.md: those with a prompt, and
// what systemd starts.
func docsCommands(t *testing.T, page string) (commands [][]string) {
	t.Helper()
	for line := range strings.Lines(page) {
		text, ok := strings.CutPrefix(line, "$ bcd ")
		if !ok {
			text, ok = strings.CutPrefix(line, "ExecStart=/usr/local/bin/bcd ")
		}
		if !ok {
			continue
		}
		var args []string
		for _, m := range regexp.MustCompile(`"([^"]*)"|(\S+)`).FindAllStringSubmatch(strings.TrimSpace(text), -1) {
			args = append(args, m[1]+m[2])
		}
		commands = append(commands, args)
	}
	return commands
}

// TestCommandsOfTheDocsRun in the order of the page, with files elsewhere and
// nothing that waits.
func TestCommandsOfTheDocsRun(t *testing.T) {
	page := string(must(os.ReadFile("../../docs/bcd.md")))
	sh := newShell(t)
	dir := t.TempDir()
	ran := map[string]int{}
	for _, args := range docsCommands(t, page) {
		text := strings.Join(args, " ")
		for i, a := range args {
			switch {
			case strings.HasSuffix(a, "bundle.json"):
				args[i] = sh.bundle
			case strings.HasSuffix(a, "token"):
				args[i] = sh.token
			case strings.HasPrefix(a, "/etc/node/"):
				args[i] = filepath.Join(dir, filepath.Base(a))
			case strings.HasPrefix(a, "systemctl "):
				args[i] = "true"
			}
		}
		args = append(args, "--state-dir", sh.dir)
		if (args[0] == "join" || args[0] == "run") && !slices.Contains(args, "--once") {
			args = append(args, "--once")
		}
		if code, _, stderr := sh.run("", args...); code != exitOK {
			t.Errorf("%s: exit code %d: %s", text, code, stderr)
		}
		ran[args[0]]++
	}
	for command, least := range map[string]int{"join": 1, "run": 3, "status": 2, "reset": 1} {
		if ran[command] < least {
			t.Errorf("%d commands bcd %s were found", ran[command], command)
		}
	}
}

// TestDocsListEveryFlagAndExitCode that there is.
func TestDocsListEveryFlagAndExitCode(t *testing.T) {
	page := string(must(os.ReadFile("../../docs/bcd.md")))
	flag := regexp.MustCompile(`(?m)^ +(?:-\w, )?(--[a-z-]+)`)
	for _, command := range []string{"join", "run", "status", "reset"} {
		_, _, help := newShell(t).run("", command, "--help")
		found := flag.FindAllStringSubmatch(help, -1)
		if len(found) < 3 {
			t.Fatalf("the help of %s: %s", command, help)
		}
		for _, m := range found {
			if m[1] != "--help" && !strings.Contains(page, "`"+m[1]) {
				t.Errorf("%s of bcd %s is not in the docs", m[1], command)
			}
		}
	}
	for code := range exitInterrupted + 1 {
		if name := outcome(code); (name != "failed" || code == exitFailed) && !strings.Contains(page, "`"+name+"`") {
			t.Errorf("exit code %d (%s) is not in the docs", code, name)
		}
	}
}

// TestDocsUnitIsOneThatSystemdTakes where there is a systemd to ask.
func TestDocsUnitIsOneThatSystemdTakes(t *testing.T) {
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("no systemd-analyze here")
	}
	page := string(must(os.ReadFile("../../docs/bcd.md")))
	_, rest, ok := strings.Cut(page, "```ini\n")
	unit, _, ok2 := strings.Cut(rest, "```")
	if !ok || !ok2 {
		t.Fatal("no unit in the docs")
	}
	path := filepath.Join(t.TempDir(), "bcd.service")
	// Verification wants the program to be there.
	unit = strings.ReplaceAll(unit, "/usr/local/bin/bcd", must2(exec.LookPath("true")))
	if err := os.WriteFile(path, []byte(unit), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), analyze, "verify", path).CombinedOutput(); err != nil || strings.Contains(string(out), "bcd.service") {
		t.Errorf("%v: %s", err, out)
	}
}

func must2(s string, err error) string {
	if err != nil {
		panic(err)
	}
	return s
}
