package main

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/join-operator/agent/agenttest"
	"github.com/better-compute/join-operator/agent/state"
	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/attestors/jointoken"
)

// shell runs bcd as a shell would, but in this process.
type shell struct {
	t      *testing.T
	s      *agenttest.Service
	dir    string
	bundle string
	token  string
}

func newShell(t *testing.T) *shell {
	t.Helper()
	s := agenttest.New(t)
	// bcd lives in real time, so the service must too.
	s.Clock.Advance(time.Since(agenttest.Start))
	dir := t.TempDir()
	sh := &shell{t, s, filepath.Join(dir, "state"), filepath.Join(dir, "bundle.json"), filepath.Join(dir, "token")}
	for path, data := range map[string][]byte{sh.bundle: s.Bundle(), sh.token: []byte(jointoken.Generate().Text() + "\n")} {
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return sh
}

func (sh *shell) run(stdin string, args ...string) (code int, stdout, stderr string) {
	sh.t.Helper()
	ctx, cancel := context.WithTimeout(sh.t.Context(), 20*time.Second)
	defer cancel()
	var out, errs bytes.Buffer
	code = run(ctx, args, streams{strings.NewReader(stdin), &out, &errs})
	return code, out.String(), errs.String()
}

func (sh *shell) join(args ...string) (code int, stdout, stderr string) {
	sh.t.Helper()
	return sh.run("", append([]string{"join", "--state-dir", sh.dir, "--bundle", sh.bundle, "--token-file", sh.token, "--once"}, args...)...)
}

// TestJoinAndStatusSayTheSameInJSON is what a script sees of the plain way.
func TestJoinAndStatusSayTheSameInJSON(t *testing.T) {
	sh := newShell(t)
	if code, _, _ := sh.run("", "status", "--state-dir", sh.dir); code != exitNotJoined {
		t.Errorf("status before: exit code %d", code)
	}
	out := filepath.Join(t.TempDir(), "tls.crt")
	code, stdout, stderr := sh.join("--output", "json", "--cert-out", out)
	if code != exitOK {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	var j joinResult
	if err := json.Unmarshal([]byte(stdout), &j); err != nil || j.Outcome != "joined" || !*j.Confirmed || *j.AlreadyJoined || j.Files.Cert != out {
		t.Fatalf("error %v: %s", err, stdout)
	}
	code, stdout, _ = sh.run("", "status", "--state-dir", sh.dir, "--output", "json")
	var st status
	if err := json.Unmarshal([]byte(stdout), &st); err != nil || code != exitOK {
		t.Fatalf("exit code %d, error %v: %s", code, err, stdout)
	}
	if st.State != "joined" || st.Node.SPIFFEID != j.Node.SPIFFEID || !st.Confirmed || st.Bundle.Generation != 1 || len(st.PublicKeySHA256) != 64 {
		t.Errorf("status %s", stdout)
	}
	if !strings.Contains(stderr, st.PublicKeySHA256) {
		t.Error("join did not show the fingerprint that status shows")
	}
	// Again, without a token or a bundle: it is joined already.
	if code, stdout, _ := sh.run("", "join", "--state-dir", sh.dir, "--output", "json"); code != exitOK || !strings.Contains(stdout, `"alreadyJoined": true`) {
		t.Errorf("again: exit code %d: %s", code, stdout)
	}
	if code, stdout, _ := sh.run("", "status", "--state-dir", sh.dir); code != exitOK || !strings.Contains(stdout, j.Node.SPIFFEID) {
		t.Errorf("status for a person: exit code %d: %s", code, stdout)
	}
}

// TestExitCodesTellOutcomesApart has one exchange for each.
func TestExitCodesTellOutcomesApart(t *testing.T) {
	for name, c := range map[string]struct {
		answer  func(s *agenttest.Service, w http.ResponseWriter, j *agenttest.Join)
		code    int
		outcome string
	}{
		"pending": {func(s *agenttest.Service, w http.ResponseWriter, j *agenttest.Join) {
			a := s.Answer(j, wire.OutcomePending)
			a.JoinRequest, a.Tenant, a.RetryAfterSeconds = "jr-x", "acme", 15
			s.Write(w, a)
		}, exitPending, "pending"},
		"refused": {func(_ *agenttest.Service, w http.ResponseWriter, _ *agenttest.Join) {
			agenttest.WriteProblem(w, wire.AccessDenied, 0)
		}, exitRefused, "refused"},
		"unavailable": {func(_ *agenttest.Service, w http.ResponseWriter, _ *agenttest.Join) {
			agenttest.WriteProblem(w, wire.Unavailable, time.Second)
		}, exitUnavailable, "unavailable"},
		"limited": {func(_ *agenttest.Service, w http.ResponseWriter, _ *agenttest.Join) {
			agenttest.WriteProblem(w, wire.RateLimited, time.Second)
		}, exitUnavailable, "unavailable"},
		"untrusted": {func(_ *agenttest.Service, w http.ResponseWriter, _ *agenttest.Join) { agenttest.WriteJWS(w, "a.b.c") }, exitUntrusted, "untrusted"},
	} {
		t.Run(name, func(t *testing.T) {
			sh := newShell(t)
			sh.s.OnJoin(func(w http.ResponseWriter, j *agenttest.Join) { c.answer(sh.s, w, j) })
			code, stdout, stderr := sh.join("--output", "json")
			var r joinResult
			if err := json.Unmarshal([]byte(stdout), &r); err != nil || code != c.code || r.Outcome != c.outcome {
				t.Errorf("exit code %d, error %v: %s%s", code, err, stdout, stderr)
			}
			if name != "pending" {
				return
			}
			const hint = "kubectl approve joinrequest jr-x --namespace acme"
			if !strings.Contains(stderr, hint) {
				t.Errorf("no %q in %s", hint, stderr)
			}
			if code, stdout, _ := sh.run("", "status", "--state-dir", sh.dir); code != exitPending || !strings.Contains(stdout, hint) {
				t.Errorf("status: exit code %d: %s", code, stdout)
			}
		})
	}
}

// TestLocalTroubleHasItsOwnExitCodes never gets as far as asking.
func TestLocalTroubleHasItsOwnExitCodes(t *testing.T) {
	sh := newShell(t)
	good := strings.TrimSpace(string(must(os.ReadFile(sh.token))))
	for name, c := range map[string]struct {
		args []string
		in   string
		code int
	}{
		"no command":              {nil, "", exitUsage},
		"unknown command":         {[]string{"joyn"}, "", exitUsage},
		"unknown flag":            {[]string{"join", "--bogus"}, "", exitUsage},
		"an argument":             {[]string{"join", good}, "", exitUsage},
		"no token":                {[]string{"join", "--state-dir", sh.dir, "--bundle", sh.bundle}, "", exitUsage},
		"no bundle":               {[]string{"join", "--state-dir", sh.dir, "--token-file", sh.token}, "", exitUsage},
		"missing bundle":          {[]string{"join", "--state-dir", sh.dir, "--bundle", "/nowhere", "--token-file", sh.token}, "", exitUsage},
		"a bundle that is none":   {[]string{"join", "--state-dir", sh.dir, "--bundle", sh.token, "--token-file", sh.token}, "", exitUsage},
		"missing token file":      {[]string{"join", "--state-dir", sh.dir, "--bundle", sh.bundle, "--token-file", "/nowhere"}, "", exitUsage},
		"unset variable":          {[]string{"join", "--state-dir", sh.dir, "--bundle", sh.bundle, "--token-env", "JOIN_TEST_UNSET"}, "", exitUsage},
		"two tokens":              {[]string{"join", "--state-dir", sh.dir, "--bundle", sh.bundle, "--token-env", "HOME", "--token-file", sh.token}, "", exitUsage},
		"a broken token":          {[]string{"join", "--state-dir", sh.dir, "--bundle", sh.bundle, "--token-file", "-"}, good[:50], exitUsage},
		"bad role":                {[]string{"join", "--role", "king"}, "", exitUsage},
		"bad key type":            {[]string{"join", "--key-type", "dsa"}, "", exitUsage},
		"bad claim":               {[]string{"join", "--claim", "colour=red"}, "", exitUsage},
		"bad output":              {[]string{"join", "--output", "yaml"}, "", exitUsage},
		"status with bad output":  {[]string{"status", "--output", "yaml"}, "", exitUsage},
		"a state dir in a file":   {[]string{"join", "--state-dir", sh.token + "/x", "--bundle", sh.bundle, "--token-file", sh.token}, "", exitFailed},
		"help is not a mistake":   {[]string{"join", "--help"}, "", exitOK},
		"help of all is not, too": {[]string{"--help"}, "", exitOK},
	} {
		t.Run(name, func(t *testing.T) {
			code, _, stderr := sh.run(c.in, c.args...)
			if code != c.code {
				t.Errorf("exit code %d, want %d: %s", code, c.code, stderr)
			}
			if strings.Contains(stderr, good[20:40]) && name != "an argument" {
				t.Errorf("the token is in %s", stderr)
			}
		})
	}
	if len(sh.s.Joins()) > 0 {
		t.Error("asked in spite of it")
	}
}

// TestTokenComesByEveryWay ends in the same sealed token.
func TestTokenComesByEveryWay(t *testing.T) {
	sh := newShell(t)
	token := strings.TrimSpace(string(must(os.ReadFile(sh.token))))
	t.Setenv("JOIN_TEST_TOKEN", token)
	for _, args := range [][]string{{"--token-env", "JOIN_TEST_TOKEN"}, {"--token-file", "-"}, {"--token", token}} {
		sh.dir = filepath.Join(t.TempDir(), "s")
		code, _, stderr := sh.run(token+"\n", append([]string{"join", "--once", "--state-dir", sh.dir, "--bundle", sh.bundle}, args...)...)
		joins := sh.s.Joins()
		if code != exitOK || joins[len(joins)-1].Sealed.Token != token {
			t.Errorf("%s: exit code %d: %s", args[0], code, stderr)
		}
		if warned := strings.Contains(stderr, "warning"); warned != (args[0] == "--token") {
			t.Errorf("%s: warned %t", args[0], warned)
		}
	}
}

// TestStateTroubleSaysWhatToDo locks and damages the directory.
func TestStateTroubleSaysWhatToDo(t *testing.T) {
	sh := newShell(t)
	d, err := state.Open(sh.dir)
	if err != nil {
		t.Fatal(err)
	}
	if code, stdout, _ := sh.join("--output", "json"); code != exitLocked || !strings.Contains(stdout, `"locked"`) {
		t.Errorf("locked: exit code %d: %s", code, stdout)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(sh.dir, "request.pem")
	if err := os.WriteFile(file, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, f := range []func() (int, string, string){
		func() (int, string, string) { return sh.join() },
		func() (int, string, string) { return sh.run("", "status", "--state-dir", sh.dir) },
	} {
		if code, _, stderr := f(); code != exitDamaged || !strings.Contains(stderr, file) || !strings.Contains(stderr, "backup") {
			t.Errorf("damaged: exit code %d: %s", code, stderr)
		}
	}
}

// TestExpiredIdentityIsToldApart has a certificate that runs out at once.
func TestExpiredIdentityIsToldApart(t *testing.T) {
	sh := newShell(t)
	sh.s.OnJoin(func(w http.ResponseWriter, j *agenttest.Join) {
		sh.s.Write(w, sh.s.AdmitAs(j, j.CSR.PublicKey, agenttest.Leaf{NotAfter: time.Now().Add(2 * time.Second).Truncate(time.Second)}))
	})
	if code, _, stderr := sh.join(); code != exitOK {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	deadline := time.Now().Add(10 * time.Second)
	for {
		code, _, _ := sh.run("", "status", "--state-dir", sh.dir)
		if code == exitExpired {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("exit code %d long after the end", code)
		}
		time.Sleep(50 * time.Millisecond)
	}
	if code, _, _ := sh.join(); code != exitExpired {
		t.Errorf("join: exit code %d", code)
	}
}

// TestInterruptEndsAWait stops a machine that backs off.
func TestInterruptEndsAWait(t *testing.T) {
	sh := newShell(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	sh.s.OnJoin(func(w http.ResponseWriter, _ *agenttest.Join) {
		agenttest.WriteProblem(w, wire.Unavailable, time.Hour)
		cancel()
	})
	var out, errs bytes.Buffer
	code := run(ctx, []string{"join", "--state-dir", sh.dir, "--bundle", sh.bundle, "--token-file", sh.token}, streams{strings.NewReader(""), &out, &errs})
	if code != exitInterrupted {
		t.Errorf("exit code %d: %s", code, errs.String())
	}
}

func must(b []byte, err error) []byte {
	if err != nil {
		panic(err)
	}
	return b
}
