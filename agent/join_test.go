package agent_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/better-compute/join-operator/agent"
	"github.com/better-compute/join-operator/agent/agenttest"
	"github.com/better-compute/join-operator/agent/state"
	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/attestors"
	"github.com/better-compute/join-operator/attestors/jointoken"
)

// bench is one machine before one service.
type bench struct {
	*agenttest.Service
	t      *testing.T
	path   string
	dir    *state.Dir
	clock  *agenttest.Clock
	token  string
	events []agent.Event
	// observe is told of events too.
	observe func(agent.Event)
	log     bytes.Buffer
	config  agent.Config
}

func newBench(t *testing.T) *bench {
	t.Helper()
	s := agenttest.New(t)
	b := &bench{Service: s, t: t, path: filepath.Join(t.TempDir(), "state"), clock: s.Clock, token: jointoken.Generate().Text()}
	b.open()
	t.Cleanup(func() { _ = b.dir.Close() })
	return b
}

func (b *bench) open(options ...state.Option) {
	b.t.Helper()
	var err error
	if b.dir, err = state.Open(b.path, options...); err != nil {
		b.t.Fatal(err)
	}
}

// restart is the machine's process ending and another beginning.
func (b *bench) restart() {
	b.t.Helper()
	if err := b.dir.Close(); err != nil {
		b.t.Fatal(err)
	}
	b.open()
}

func (b *bench) machine() *agent.Machine {
	b.t.Helper()
	c := b.config
	c.State, c.FirstBundle = b.dir, b.Bundle()
	c.Logger = slog.New(slog.NewTextHandler(&b.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	if c.Clock == nil {
		c.Clock = b.clock
	}
	c.Observe = func(e agent.Event) {
		b.events = append(b.events, e)
		if b.observe != nil {
			b.observe(e)
		}
	}
	m, err := agent.New(c)
	if err != nil {
		b.t.Fatal(err)
	}
	return m
}

func (b *bench) options() agent.JoinOptions {
	b.t.Helper()
	p, err := jointoken.NewProducer(b.token)
	if err != nil {
		b.t.Fatal(err)
	}
	return agent.JoinOptions{Producer: p, Role: wire.RoleNode}
}

func (b *bench) once() (*agent.Joined, error) {
	b.t.Helper()
	o := b.options()
	o.Once = true
	return b.machine().Join(b.t.Context(), o)
}

func (b *bench) mustJoin() *agent.Joined {
	b.t.Helper()
	// Simulated time runs as fast as it can: a join that never comes must end.
	ctx, cancel := context.WithTimeout(b.t.Context(), 30*time.Second)
	defer cancel()
	j, err := b.machine().Join(ctx, b.options())
	if err != nil {
		b.t.Fatalf("join: %v\n%s", err, b.log.String())
	}
	return j
}

// TestR19_JoinsWithOneKeyAndStoresEverything is the plain way.
func TestR19_JoinsWithOneKeyAndStoresEverything(t *testing.T) {
	b := newBench(t)
	out := state.Outputs{Key: filepath.Join(t.TempDir(), "deep/er/key"), Cert: filepath.Join(t.TempDir(), "cert"), CA: filepath.Join(t.TempDir(), "ca")}
	o := b.options()
	o.Outputs = out
	j, err := b.machine().Join(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if !j.Confirmed || j.Before || !j.IssuerPinned {
		t.Errorf("joined %+v, want confirmed, new, with a pinned issuer", j)
	}
	if n := b.Confirmed(j.Identity.CertificateSHA256); n != 1 {
		t.Errorf("confirmed %d times, want once", n)
	}
	got := b.Joins()
	if len(got) != 1 || got[0].Sealed.Token != b.token {
		t.Fatalf("the service saw %d joins", len(got))
	}
	if bytes.Contains(got[0].Body, []byte(b.token)) || bytes.Contains(b.log.Bytes(), []byte(b.token)) {
		t.Error("the token is in the open")
	}
	for path, perm := range map[string]os.FileMode{out.Key: 0o600, out.Cert: 0o644, out.CA: 0o644, b.path: 0o700 | os.ModeDir, filepath.Join(b.path, "request.pem"): 0o600} {
		info, err := os.Stat(path)
		if err != nil || info.Mode() != perm {
			t.Errorf("%s: mode %v, error %v, want %v", path, info.Mode(), err, perm)
		}
	}
	b.restart()
	again := b.mustJoin()
	if !again.Before || !again.Confirmed || again.Identity.CertificateSHA256 != j.Identity.CertificateSHA256 {
		t.Errorf("after a restart: %+v", again)
	}
	if n := len(b.Joins()); n != 1 {
		t.Errorf("a machine that has joined asked again: %d joins", n)
	}
}

// TestR19_WaitsAsLongAsASignedAnswerSays joins after three polls.
func TestR19_WaitsAsLongAsASignedAnswerSays(t *testing.T) {
	b := newBench(t)
	polls := 0
	b.OnJoin(func(w http.ResponseWriter, j *agenttest.Join) {
		if polls++; polls > 3 {
			b.Write(w, b.Admit(j))
			return
		}
		a := b.Answer(j, wire.OutcomePending)
		a.JoinRequest, a.RetryAfterSeconds = "jr-abcdefgh", 40
		b.Write(w, a)
	})
	j := b.mustJoin()
	if j.Identity.Tenant != "acme" {
		t.Errorf("identity %+v", j.Identity)
	}
	sleeps := b.clock.Sleeps()
	if len(sleeps) != 3 {
		t.Fatalf("slept %v, want three waits", sleeps)
	}
	for _, s := range sleeps {
		if s < 40*time.Second || s > 45*time.Second {
			t.Errorf("waited %v, want 40 s and a tenth at most", s)
		}
	}
	seen := b.Joins()
	for _, s := range seen[1:] {
		if !bytes.Equal(s.Join.CSR, seen[0].Join.CSR) {
			t.Error("a poll came with another request")
		}
	}
	asked := 0
	for _, e := range b.events {
		if a, ok := e.(agent.AwaitingDecision); ok && a.JoinRequest == "jr-abcdefgh" {
			asked++
		}
	}
	if asked != 1 {
		t.Errorf("a person was told %d times, want once", asked)
	}
}

// challenger answers challenges with what it was asked.
type challenger struct{ produced [][]byte }

func (*challenger) ID() string { return "tpm" }
func (c *challenger) Produce(_ context.Context, r attestors.ProduceRequest) (attestors.Produced, error) {
	c.produced = append(c.produced, r.Challenge)
	return attestors.Produced{Payload: append([]byte("re:"), r.Challenge...)}, nil
}

// TestR19_PassesAChallengeToTheProducerOfTheSameID runs two rounds, and one that
// is another attestor's.
func TestR19_PassesAChallengeToTheProducerOfTheSameID(t *testing.T) {
	for _, attestor := range []string{"tpm", "join-token", ""} {
		t.Run(attestor, func(t *testing.T) {
			b := newBench(t)
			b.OnJoin(func(w http.ResponseWriter, j *agenttest.Join) {
				if string(j.State) == "sealed" && string(j.Sealed.Evidence) == "re:activate" {
					b.Write(w, b.Admit(j))
					return
				}
				a := b.Answer(j, wire.OutcomeChallenge)
				a.Attestor, a.Challenge, a.State = attestor, wire.EncodeBase64([]byte("activate")), wire.EncodeBase64([]byte("sealed"))
				b.Write(w, a)
			})
			c := &challenger{}
			j, err := b.machine().Join(t.Context(), agent.JoinOptions{Producer: c, Role: wire.RoleNode, Once: true})
			if attestor == "tpm" {
				if err != nil || len(c.produced) != 2 || j.Identity.Attestor != "tpm" {
					t.Fatalf("joined %v, error %v, after %d rounds", j, err, len(c.produced))
				}
				return
			}
			if !agent.IsUntrusted(err) || len(c.produced) != 1 {
				t.Errorf("error %v after %d rounds, want an untrusted answer after one", err, len(c.produced))
			}
		})
	}
}

// TestChallengesWithoutEndAreLeft stops a service that only ever challenges.
func TestChallengesWithoutEndAreLeft(t *testing.T) {
	b := newBench(t)
	b.OnJoin(func(w http.ResponseWriter, j *agenttest.Join) {
		a := b.Answer(j, wire.OutcomeChallenge)
		a.Attestor, a.State = "tpm", wire.EncodeBase64([]byte("s"))
		b.Write(w, a)
	})
	c := &challenger{}
	_, err := b.machine().Join(t.Context(), agent.JoinOptions{Producer: c, Role: wire.RoleNode, Once: true})
	if !agent.IsUntrusted(err) || len(c.produced) != 8 {
		t.Errorf("error %v after %d rounds", err, len(c.produced))
	}
}

// TestNoUnsignedAnswerIsFinal goes through every problem there is, and then in.
func TestNoUnsignedAnswerIsFinal(t *testing.T) {
	b := newBench(t)
	codes := []wire.Code{wire.AccessDenied, wire.Unsupported, wire.InvalidInput, wire.StaleBundle, wire.NotFound, wire.MethodNotAllowed, wire.TooLarge, wire.Internal}
	polls := 0
	b.OnJoin(func(w http.ResponseWriter, j *agenttest.Join) {
		if polls++; polls > len(codes) {
			b.Write(w, b.Admit(j))
			return
		}
		agenttest.WriteProblem(w, codes[polls-1], 0)
	})
	b.mustJoin()
	if polls != len(codes)+1 {
		t.Errorf("asked %d times", polls)
	}
	for _, j := range b.Joins() {
		if !bytes.Equal(j.Join.CSR, b.Joins()[0].Join.CSR) {
			t.Error("another request was made after a refusal")
		}
	}
}

// TestBackOffIsFullJitterThatDoublesToAnHour looks at the limit of each wait.
func TestBackOffIsFullJitterThatDoublesToAnHour(t *testing.T) {
	b := newBench(t)
	var limits []time.Duration
	b.config.Random = func(limit time.Duration) time.Duration {
		limits = append(limits, limit)
		return limit / 2
	}
	b.OnJoin(func(w http.ResponseWriter, j *agenttest.Join) {
		if len(b.clock.Sleeps()) < 12 {
			agenttest.WriteProblem(w, wire.AccessDenied, 0)
			return
		}
		b.Write(w, b.Admit(j))
	})
	b.mustJoin()
	limits = limits[1 : len(limits)-1] // Around them: the first endpoint, and when to renew.
	want := 15 * time.Second
	for i, got := range limits {
		if got != want {
			t.Fatalf("wait %d is below %v, want %v", i, got, want)
		}
		if b.clock.Sleeps()[i] != got/2 {
			t.Errorf("wait %d is %v of %v", i, b.clock.Sleeps()[i], got)
		}
		want = min(2*want, time.Hour)
	}
	if len(limits) != 12 || limits[11] != time.Hour {
		t.Errorf("limits %v", limits)
	}
}

// TestRetryAfterIsObeyed never comes back earlier, and not a year later either.
func TestRetryAfterIsObeyed(t *testing.T) {
	for _, c := range []struct {
		header   string
		min, max time.Duration
	}{
		{"120", 120 * time.Second, 136 * time.Second},
		{agenttest.Start.Add(5 * time.Minute).Format(http.TimeFormat), 5 * time.Minute, 5*time.Minute + 16*time.Second},
		{"31536000", time.Hour, time.Hour + 16*time.Second},
		{"99999999999999999999", 0, 16 * time.Second},
		{"-5", 0, 16 * time.Second},
		{"soon", 0, 16 * time.Second},
	} {
		t.Run(c.header, func(t *testing.T) {
			b := newBench(t)
			b.OnJoin(func(w http.ResponseWriter, j *agenttest.Join) {
				if len(b.clock.Sleeps()) > 0 {
					b.Write(w, b.Admit(j))
					return
				}
				w.Header().Set("Retry-After", c.header)
				agenttest.WriteProblem(w, wire.Unavailable, 0)
			})
			b.mustJoin()
			if s := b.clock.Sleeps(); len(s) != 1 || s[0] < c.min || s[0] > c.max {
				t.Errorf("slept %v, want one wait in [%v, %v]", s, c.min, c.max)
			}
		})
	}
}

// TestWaitLimitEndsAWait returns what the last exchange brought.
func TestWaitLimitEndsAWait(t *testing.T) {
	b := newBench(t)
	b.OnJoin(func(w http.ResponseWriter, j *agenttest.Join) {
		a := b.Answer(j, wire.OutcomePending)
		a.JoinRequest, a.Tenant, a.RetryAfterSeconds = "jr-1", "acme", 15
		b.Write(w, a)
	})
	o := b.options()
	o.WaitLimit = time.Minute
	_, err := b.machine().Join(t.Context(), o)
	p, ok := errors.AsType[*agent.PendingError](err)
	if !ok || p.JoinRequest != "jr-1" || p.Tenant != "acme" {
		t.Fatalf("error %v", err)
	}
	if waited := b.clock.Now().Sub(agenttest.Start); waited > time.Minute || waited < 40*time.Second {
		t.Errorf("waited %v", waited)
	}
	progress, err := b.dir.Progress()
	if err != nil || progress.Pending == nil || progress.Pending.JoinRequest != "jr-1" {
		t.Errorf("progress %+v, error %v", progress, err)
	}
}

// TestWrongClockIsSaidAndDoesNotStopAJoin has a machine lag behind and run ahead.
func TestWrongClockIsSaidAndDoesNotStopAJoin(t *testing.T) {
	for _, ahead := range []time.Duration{-26 * time.Hour, -6 * time.Minute, 6 * time.Minute, 2 * time.Minute} {
		t.Run(ahead.String(), func(t *testing.T) {
			b := newBench(t)
			b.config.Clock = agenttest.NewClock()
			b.config.Clock.(*agenttest.Clock).Advance(ahead)
			b.mustJoin()
			said := 0
			for _, e := range b.events {
				if w, ok := e.(agent.ClockWrong); ok && w.Ahead == ahead {
					said++
				}
			}
			if want := map[bool]int{true: 1, false: 0}[ahead.Abs() > 5*time.Minute]; said != want {
				t.Errorf("said %d times, want %d", said, want)
			}
			p, err := b.dir.Progress()
			if err != nil || p.ClockOffsetSeconds != int64(ahead/time.Second) {
				t.Errorf("progress %+v, error %v", p, err)
			}
		})
	}
}

// TestFailedConfirmationIsTriedAgainAndNeverFatal confirms after a restart.
func TestFailedConfirmationIsTriedAgainAndNeverFatal(t *testing.T) {
	b := newBench(t)
	tries := 0
	b.OnConfirm(func(w http.ResponseWriter, _ *http.Request) {
		tries++
		agenttest.WriteProblem(w, wire.Unavailable, time.Second)
	})
	j := b.mustJoin()
	if j.Confirmed || tries != 4 {
		t.Errorf("confirmed %t after %d tries", j.Confirmed, tries)
	}
	b.OnConfirm(nil)
	b.restart()
	if j := b.mustJoin(); !j.Confirmed || !j.Before {
		t.Errorf("after a restart: %+v", j)
	}
	if len(b.Joins()) != 1 {
		t.Error("joined again for the sake of a confirmation")
	}
}

// TestFailsOverToTheNextEndpoint has endpoints that are down, lie, or are slow.
func TestFailsOverToTheNextEndpoint(t *testing.T) {
	b := newBench(t)
	b.config.RequestTimeout = time.Second
	slow := b.Serve(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// Only a body that was read lets the server notice that the client left.
		_, _ = io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	}), b.TLSCA)
	liar := b.Serve(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { agenttest.WriteJWS(w, "e30.e30.AA") }), b.TLSCA)
	stranger := b.Serve(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { t.Error("a stranger was sent a request") }), agenttest.NewAuthority(t, "other"))
	b.EditBundle(func(x *wire.Bundle) {
		x.Endpoints = []string{"https://127.0.0.1:1", liar.URL, slow.URL + "/", stranger.URL, b.Server.URL + "/"}
	})
	b.config.Random = func(time.Duration) time.Duration { return 0 }
	if _, err := b.once(); err != nil {
		t.Fatalf("%v\n%s", err, b.log.String())
	}
}

// TestRefusalEndsATurnOverEndpoints keeps one refusal from counting as many.
func TestRefusalEndsATurnOverEndpoints(t *testing.T) {
	b := newBench(t)
	b.EditBundle(func(x *wire.Bundle) { x.Endpoints = []string{b.Server.URL, b.Server.URL, b.Server.URL} })
	b.OnJoin(func(w http.ResponseWriter, _ *agenttest.Join) { agenttest.WriteProblem(w, wire.AccessDenied, 0) })
	if _, err := b.once(); !agent.IsRefused(err) {
		t.Errorf("error %v", err)
	}
	if n := len(b.Joins()); n != 1 {
		t.Errorf("asked %d times", n)
	}
}
