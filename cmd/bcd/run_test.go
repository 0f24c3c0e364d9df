package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/better-compute/join-operator/agent"
	"github.com/better-compute/join-operator/agent/agenttest"
	"github.com/better-compute/join-operator/agent/state"
	"github.com/better-compute/join-operator/api/wire"
)

// untilLine is a writer that calls stop when a line has been written that holds
// what is waited for.
type untilLine struct {
	mu   sync.Mutex
	buf  bytes.Buffer
	want string
	stop func()
}

func (u *untilLine) Write(p []byte) (int, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.buf.Write(p)
	if strings.Contains(u.buf.String(), u.want) {
		u.stop()
	}
	return len(p), nil
}

// runUntil runs bcd as a service manager does, and sends the signal once a line
// on the standard output holds want.
func (sh *shell) runUntil(want string, args ...string) (code int, stdout, stderr string) {
	sh.t.Helper()
	ctx, cancel := context.WithTimeout(sh.t.Context(), 20*time.Second)
	defer cancel()
	out := &untilLine{want: want, stop: cancel}
	var errs bytes.Buffer
	code = run(ctx, append([]string{"run", "--state-dir", sh.dir, "--bundle", sh.bundle, "--token-file", sh.token, "--output", "json"}, args...), streams{strings.NewReader(""), out, &errs})
	return code, out.buf.String(), errs.String()
}

func events(t *testing.T, stdout string) []runEvent {
	t.Helper()
	var list []runEvent
	for line := range strings.Lines(stdout) {
		var e runEvent
		if err := json.Unmarshal([]byte(line), &e); err != nil || e.Time.IsZero() {
			t.Fatalf("%s: %v", line, err)
		}
		list = append(list, e)
	}
	return list
}

func names(list []runEvent) string {
	var s []string
	for _, e := range list {
		s = append(s, e.Event)
	}
	return strings.Join(s, " ")
}

// TestRunJoinsHandsOverReloadsAndEndsCleanly, and after that needs neither token
// nor bundle.
func TestRunJoinsHandsOverReloadsAndEndsCleanly(t *testing.T) {
	sh := newShell(t)
	dir := t.TempDir()
	cert, copied := filepath.Join(dir, "tls.crt"), filepath.Join(dir, "copied")
	args := []string{"--cert-out", cert, "--reload-command", "cp " + cert + " " + copied}
	code, stdout, stderr := sh.runUntil("renewal-planned", args...)
	list := events(t, stdout)
	if got := names(list); code != exitOK || got != "admitted confirmed reloaded renewal-planned stopped" {
		t.Fatalf("exit code %d, events %s: %s", code, got, stderr)
	}
	if e := list[0]; e.Way != agent.ByJoin || e.Node == nil || e.Generation != 1 {
		t.Errorf("admitted %+v", e)
	}
	if e := list[3]; *e.ForSeconds < 3600 || e.At == nil {
		t.Errorf("planned %+v", e)
	}
	if a, b := must(os.ReadFile(cert)), must(os.ReadFile(copied)); !bytes.Equal(a, b) {
		t.Error("the reload command did not see what was written")
	}
	for _, path := range []string{sh.token, sh.bundle, copied} {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	code, stdout, stderr = sh.runUntil("renewal-planned", args...)
	if got := names(events(t, stdout)); code != exitOK || got != "renewal-planned stopped" {
		t.Errorf("again: exit code %d, events %s: %s", code, got, stderr)
	}
	if _, err := os.Stat(copied); !errors.Is(err, fs.ErrNotExist) {
		t.Error("the reload command ran twice for one certificate")
	}
}

// due gives the next certificates a life that is more than half over.
func (sh *shell) due() { sh.s.Lifetime = 2 * time.Minute }

// TestRunOnceRenewsWhatIsDue and says by exit code and status how it went.
func TestRunOnceRenewsWhatIsDue(t *testing.T) {
	sh := newShell(t)
	sh.due()
	if code, _, stderr := sh.join(); code != exitOK {
		t.Fatal(stderr)
	}
	sh.s.Lifetime = 168 * time.Hour
	for name, c := range map[string]struct {
		problem wire.Code
		code    int
	}{
		"refused":     {wire.AccessDenied, exitRefused},
		"limited":     {wire.RateLimited, exitUnavailable},
		"unavailable": {wire.Unavailable, exitUnavailable},
	} {
		sh.s.OnRenew(func(w http.ResponseWriter, _ *agenttest.Renewal) { agenttest.WriteProblem(w, c.problem, 0) })
		code, stdout, _ := sh.run("", "run", "--once", "--state-dir", sh.dir, "--output", "json")
		list := events(t, stdout)
		if last := list[len(list)-1]; code != c.code || last.Outcome != outcome(c.code) || last.Reason == "" {
			t.Errorf("%s: exit code %d: %s", name, code, stdout)
		}
		code, stdout, _ = sh.run("", "status", "--state-dir", sh.dir, "--output", "json")
		var st status
		if err := json.Unmarshal([]byte(stdout), &st); err != nil || code != exitOK || st.LastProblem == "" || !st.Renewal.Unanswered || st.Renewal.NextTryAt == nil || st.Renewal.Generation != 1 {
			t.Errorf("%s: exit code %d, status %s", name, code, stdout)
		}
		if code, stdout, _ := sh.run("", "status", "--state-dir", sh.dir); code != exitOK || !strings.Contains(stdout, "a request is not answered yet") {
			t.Errorf("%s: status %s", name, stdout)
		}
	}
	sh.s.OnRenew(nil)
	code, stdout, _ := sh.run("", "run", "--once", "--state-dir", sh.dir, "--output", "json")
	if list := events(t, stdout); code != exitOK || list[0].Way != agent.ByRenewal || list[0].Generation != 2 {
		t.Errorf("exit code %d: %s", code, stdout)
	}
	code, stdout, _ = sh.run("", "status", "--state-dir", sh.dir, "--output", "json")
	var st status
	if err := json.Unmarshal([]byte(stdout), &st); err != nil || code != exitOK || st.LastProblem != "" || st.Renewal.Unanswered || st.Renewal.NextTryAt != nil || st.Renewal.Generation != 2 || !st.Renewal.At.After(time.Now()) {
		t.Errorf("exit code %d, status %s", code, stdout)
	}
	if all, abandoned := sh.s.Issued(); all != 2 || abandoned > 0 || sh.s.Conflicts() > 0 {
		t.Errorf("%d certificates, %d abandoned", all, abandoned)
	}
}

// TestRefusedRenewalSaysWhatAnOperatorSees in text and in JSON.
func TestRefusedRenewalSaysWhatAnOperatorSees(t *testing.T) {
	id := &state.Identity{NodeID: "n-abc", Tenant: "acme", Serial: "0f", CertificateSHA256: "aa"}
	refused := agent.Waiting{Reason: &agent.ProblemError{Status: 403, Code: wire.AccessDenied}, For: time.Minute, Identity: id}
	var out, errs bytes.Buffer
	text := runTeller{s: streams{nil, &out, &errs}}
	text.tell(refused)
	text.tell(refused)
	for _, want := range []string{"kubectl describe fleetnode n-abc --namespace acme", "bcd reset --yes", "Conflicted", "asking again in 1m0s"} {
		if !strings.Contains(errs.String(), want) {
			t.Errorf("no %q in %s", want, errs.String())
		}
	}
	if n := strings.Count(errs.String(), "kubectl describe"); n != 1 {
		t.Errorf("explained %d times", n)
	}
	if e := eventOf(refused); e.Outcome != "refused" || !strings.Contains(e.Advice, "fleetnode n-abc") || e.Node.NodeID != "n-abc" {
		t.Errorf("event %+v", e)
	}
	if e := eventOf(agent.Waiting{Reason: &agent.LocalError{Err: agent.ErrNoProver}, Identity: id}); !strings.Contains(e.Advice, "cannot prove") || e.Outcome != "failed" {
		t.Errorf("event %+v", e)
	}
	if e := eventOf(agent.Waiting{Reason: context.DeadlineExceeded, Identity: id}); e.Advice != "" || e.Outcome != "unavailable" {
		t.Errorf("event %+v", e)
	}
	e := eventOf(agent.ClockWrong{Ahead: -26 * time.Hour, ServiceTime: agenttest.Start})
	if !strings.Contains(e.Advice, "26h0m0s behind") || !strings.Contains(e.Advice, "2026-03-01T12:00:00Z") || *e.AheadSeconds != -26*3600 {
		t.Errorf("event %+v", e)
	}
}

// TestReloadCommandLine refuses what would not do what was meant.
func TestReloadCommandLine(t *testing.T) {
	sh := newShell(t)
	for _, args := range [][]string{
		{"--reload-command", "sh -c 'systemctl reload x'"},
		{"--reload-command", "reload $CERT"},
		{"--reload-command", "a && b"},
		{"--reload-shell"},
		{"--reload-timeout", "0s"},
		{"--output", "yaml"},
	} {
		if code, _, stderr := sh.run("", append([]string{"run", "--once", "--state-dir", sh.dir, "--bundle", sh.bundle, "--token-file", sh.token}, args...)...); code != exitUsage {
			t.Errorf("%q: exit code %d: %s", args, code, stderr)
		}
	}
	if len(sh.s.Joins()) > 0 {
		t.Error("asked in spite of it")
	}
}

// TestReloadCommandSeesTheFilesAndNoToken, and may use a shell.
func TestReloadCommandSeesTheFilesAndNoToken(t *testing.T) {
	sh := newShell(t)
	out := filepath.Join(t.TempDir(), "env")
	t.Setenv("JOIN_TEST_TOKEN", strings.TrimSpace(string(must(os.ReadFile(sh.token)))))
	code, _, stderr := sh.run("", "run", "--once", "--state-dir", sh.dir, "--bundle", sh.bundle, "--token-env", "JOIN_TEST_TOKEN",
		"--reload-shell", "--reload-command", "env > "+out+" && test -r \"$BCD_CERT_FILE\" -a -r \"$BCD_KEY_FILE\" -a -r \"$BCD_CA_FILE\"")
	env := string(must(os.ReadFile(out)))
	if code != exitOK || !strings.Contains(env, "BCD_NODE_ID=n-") || strings.Contains(env, "bcjt_") {
		t.Errorf("exit code %d: %s%s", code, stderr, env)
	}
	if code, stdout, _ := sh.run("", "status", "--state-dir", sh.dir, "--output", "json"); code != exitOK || !strings.Contains(stdout, `"reload"`) || strings.Contains(stdout, `"problem"`) {
		t.Errorf("exit code %d: %s", code, stdout)
	}
}

// TestReloadCommandThatFailsOrHangsIsSaidAndHurtsNothing.
func TestReloadCommandThatFailsOrHangsIsSaidAndHurtsNothing(t *testing.T) {
	for name, c := range map[string]struct{ command, problem string }{
		"fails":          {"exit 3", "exit status 3"},
		"hangs":          {"sleep 60 & sleep 60", "not done after 200ms"},
		"is not there":   {"exec /nowhere/at-all", "exit status"},
		"starts a child": {"sleep 2 &", ""},
	} {
		t.Run(name, func(t *testing.T) {
			sh := newShell(t)
			timeout := "10s"
			if name == "hangs" {
				timeout = "200ms"
			}
			began := time.Now()
			code, stdout, stderr := sh.run("", "run", "--once", "--state-dir", sh.dir, "--bundle", sh.bundle, "--token-file", sh.token,
				"--output", "json", "--reload-shell", "--reload-timeout", timeout, "--reload-command", c.command)
			if took := time.Since(began); code != exitOK || took > 15*time.Second {
				t.Fatalf("exit code %d after %v: %s", code, took, stderr)
			}
			for _, e := range events(t, stdout) {
				if e.Event == "reloaded" && (!strings.Contains(e.Reason, c.problem) || (e.Reason == "") != (c.problem == "")) {
					t.Errorf("reason %q", e.Reason)
				}
			}
			code, stdout, _ = sh.run("", "status", "--state-dir", sh.dir)
			if code != exitOK || strings.Contains(stdout, "Reload command") != (c.problem != "") {
				t.Errorf("status %s", stdout)
			}
		})
	}
}

// TestResetForgetsTheNodeAndKeepsTheBundle, and only when it may.
func TestResetForgetsTheNodeAndKeepsTheBundle(t *testing.T) {
	sh := newShell(t)
	if code, stdout, _ := sh.run("", "reset", "--state-dir", sh.dir); code != exitOK || !strings.Contains(stdout, "nothing to forget") {
		t.Errorf("before: exit code %d: %s", code, stdout)
	}
	if code, _, stderr := sh.join(); code != exitOK {
		t.Fatal(stderr)
	}
	node := func() string {
		_, stdout, _ := sh.run("", "status", "--state-dir", sh.dir, "--output", "json")
		var st status
		if err := json.Unmarshal([]byte(stdout), &st); err != nil || st.Node == nil {
			return ""
		}
		return st.Node.NodeID
	}
	old := node()
	if code, _, stderr := sh.run("", "reset", "--state-dir", sh.dir); code != exitUsage || !strings.Contains(stderr, old) || !strings.Contains(stderr, "--yes") || node() != old {
		t.Errorf("without --yes: exit code %d: %s", code, stderr)
	}
	d, err := state.Open(sh.dir)
	if err != nil {
		t.Fatal(err)
	}
	if code, _, stderr := sh.run("", "reset", "--yes", "--state-dir", sh.dir); code != exitLocked || !strings.Contains(stderr, "stop it first") || node() != old {
		t.Errorf("while bcd runs: exit code %d: %s", code, stderr)
	}
	_ = d.Close()
	code, stdout, _ := sh.run("", "reset", "--yes", "--state-dir", sh.dir)
	if code != exitOK || !strings.Contains(stdout, "kubectl delete fleetnode "+old+" --namespace acme") {
		t.Errorf("exit code %d: %s", code, stdout)
	}
	if code, _, _ := sh.run("", "status", "--state-dir", sh.dir); code != exitNotJoined {
		t.Errorf("status afterwards: exit code %d", code)
	}
	// The bundle is pinned still.
	if code, _, stderr := sh.run("", "join", "--once", "--state-dir", sh.dir, "--token-file", sh.token); code != exitOK || node() == old || node() == "" {
		t.Errorf("joined again as %q, was %q: %s", node(), old, stderr)
	}
	code, stdout, _ = sh.run("", "reset", "--yes", "--bundle", "--output", "json", "--state-dir", sh.dir)
	var r resetResult
	if err := json.Unmarshal([]byte(stdout), &r); err != nil || code != exitOK || r.Outcome != "reset" || r.Node == nil {
		t.Errorf("exit code %d: %s", code, stdout)
	}
	if code, _, _ := sh.run("", "join", "--once", "--state-dir", sh.dir, "--token-file", sh.token); code != exitUsage {
		t.Errorf("joined without a bundle: exit code %d", code)
	}
	if sh.s.Nodes() != 2 {
		t.Errorf("%d nodes", sh.s.Nodes())
	}
}

// TestDamagedStateCanBeReset, whatever is broken.
func TestDamagedStateCanBeReset(t *testing.T) {
	for _, file := range []string{"request.pem", "progress.json", "current/identity.json", "current/key.pem"} {
		sh := newShell(t)
		if code, _, stderr := sh.join(); code != exitOK {
			t.Fatal(stderr)
		}
		if err := os.WriteFile(filepath.Join(sh.dir, file), []byte("half"), 0o600); err != nil {
			t.Fatal(err)
		}
		if code, _, stderr := sh.run("", "reset", "--yes", "--state-dir", sh.dir); code != exitOK {
			t.Errorf("%s: exit code %d: %s", file, code, stderr)
		}
		if code, _, stderr := sh.join(); code != exitOK || sh.s.Nodes() != 2 {
			t.Errorf("%s: join afterwards: exit code %d, %d nodes: %s", file, code, sh.s.Nodes(), stderr)
		}
	}
}
