package agent_test

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/better-compute/join-operator/agent"
	"github.com/better-compute/join-operator/agent/agenttest"
	"github.com/better-compute/join-operator/agent/state"
	"github.com/better-compute/join-operator/api/wire"
)

const lifetime = 168 * time.Hour

// live runs a machine until an event is the one that is waited for.
func (b *bench) live(o agent.RunOptions, until func(agent.Event) bool) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), 30*time.Second)
	defer cancel()
	done := false
	b.observe = func(e agent.Event) {
		if !done && until(e) {
			done = true
			cancel()
		}
	}
	err := b.machine().Run(ctx, o)
	b.observe = nil
	if !done || !errors.Is(err, context.Canceled) {
		b.t.Fatalf("the machine ended with %v, and what was waited for came: %t\n%s", err, done, b.log.String())
	}
}

func (b *bench) runOptions() agent.RunOptions { return agent.RunOptions{Join: b.options()} }

// confirmed counts confirmations up to n.
func confirmed(n int) func(agent.Event) bool {
	return func(e agent.Event) bool {
		if _, ok := e.(agent.Confirmed); ok {
			n--
		}
		return n <= 0
	}
}

// admitted waits for a certificate that came by a way.
func admitted(by agent.Way) func(agent.Event) bool {
	return func(e agent.Event) bool {
		a, ok := e.(agent.Admitted)
		return ok && a.Way == by
	}
}

// waits counts failed exchanges up to n.
func waits(n int) func(agent.Event) bool {
	return func(e agent.Event) bool {
		if _, ok := e.(agent.Waiting); ok {
			n--
		}
		return n <= 0
	}
}

// wantSound checks that the service never saw a clone, and that it issued so many
// certificates, of which so many were left unused.
func (b *bench) wantSound(issued, abandoned int) {
	b.t.Helper()
	if n := b.Conflicts(); n > 0 {
		b.t.Errorf("taken for a clone %d times\n%s", n, b.log.String())
	}
	if all, left := b.Issued(); all != issued || left != abandoned {
		b.t.Errorf("%d certificates, %d of them abandoned, want %d and %d", all, left, issued, abandoned)
	}
}

// wantOneRequest checks that all renewals came with one and the same request.
func (b *bench) wantOneRequest() {
	b.t.Helper()
	for _, r := range b.Renewals() {
		if !bytes.Equal(r.Renew.CSR, b.Renewals()[0].Renew.CSR) {
			b.t.Fatal("a second request was made while the first was not answered")
		}
	}
}

func (b *bench) identity() *state.Identity {
	b.t.Helper()
	id, err := b.dir.Identity()
	if err != nil {
		b.t.Fatal(err)
	}
	return id
}

// TestR25_RenewsForEverWithANewKeyEachTime lives through five renewals.
func TestR25_RenewsForEverWithANewKeyEachTime(t *testing.T) {
	b := newBench(t)
	o := b.runOptions()
	out := outputsIn(filepath.Join(t.TempDir(), "out"))
	o.Join.Outputs = out
	var asked []time.Time
	b.OnRenew(func(w http.ResponseWriter, r *agenttest.Renewal) {
		asked = append(asked, b.clock.Now())
		b.AnswerRenewal(w, r)
	})
	b.live(o, confirmed(6))
	b.wantSound(6, 0)
	checkWhole(t, b.path, out, b.Service)
	last := agenttest.Start
	keys, points := map[string]bool{}, map[time.Duration]bool{}
	for i, at := range asked {
		part := at.Sub(last)
		if part < lifetime/2-10*time.Minute || part > lifetime*3/4+10*time.Minute {
			t.Errorf("renewal %d after %v", i+1, part)
		}
		last = at
		points[part.Round(time.Minute)] = true
		keys[string(b.Renewals()[i].CSR.RawSubjectPublicKeyInfo)] = true
	}
	if len(asked) != 5 || len(keys) != 5 || len(points) < 4 {
		t.Errorf("%d renewals with %d keys at %d different parts of the lifetime", len(asked), len(keys), len(points))
	}
	if id := b.identity(); id.Generation != 6 || id.NodeID != b.identity().NodeID {
		t.Errorf("generation %d", id.Generation)
	}
	entries, err := os.ReadDir(filepath.Join(b.path, "identities"))
	if err != nil || len(entries) != 2 {
		t.Errorf("%d identities are kept, want the one in force and the one before (%v)", len(entries), err)
	}
}

// TestR25_RestartsDoNotChooseTheRenewalAgain restarts often enough that the least
// of so many choices would be early.
func TestR25_RestartsDoNotChooseTheRenewalAgain(t *testing.T) {
	b := newBench(t)
	var planned time.Time
	for range 20 {
		b.live(b.runOptions(), func(e agent.Event) bool {
			p, ok := e.(agent.RenewalPlanned)
			if ok && !planned.IsZero() && !p.At.Equal(planned) {
				t.Errorf("the renewal moved from %v to %v", planned, p.At)
			}
			if ok {
				planned = p.At
			}
			return ok
		})
		b.restart()
	}
	b.live(b.runOptions(), admitted(agent.ByRenewal))
	if late := b.clock.Now().Sub(planned); late < 0 || late > time.Second {
		t.Errorf("renewed %v after the time that was chosen", late)
	}
}

// TestR25_CertificateThatRanOutIsReplacedByAJoinWithIt has a machine off for
// longer than its certificate ran, and for longer than anybody accepts.
func TestR25_CertificateThatRanOutIsReplacedByAJoinWithIt(t *testing.T) {
	b := newBench(t)
	b.live(b.runOptions(), confirmed(1))
	before := b.identity()
	b.clock.Advance(80 * 24 * time.Hour)
	b.restart()
	back := b.clock.Now()
	o := b.runOptions()
	o.Join.Producer = nil // The token is long gone.
	b.live(o, confirmed(1))
	id := b.identity()
	if id.NodeID != before.NodeID || id.Tenant != before.Tenant || id.Attestor != "x509pop" || id.Key == before.Key {
		t.Errorf("came back as %+v, was %+v", id, before)
	}
	if waited := b.clock.Now().Sub(back); waited > 5*time.Minute {
		t.Errorf("back after %v", waited)
	}
	if len(b.Renewals()) > 0 {
		t.Error("a certificate that ran out was shown for renewal")
	}
	b.wantSound(2, 0)
	b.clock.Advance(lifetime + 91*24*time.Hour)
	b.restart()
	b.live(o, waits(6))
	b.wantSound(2, 0)
}

// TestR25_LostAnswerIsAskedForAgainWithTheSameRequest loses answers to renewals
// and to joins with a certificate, also across restarts.
func TestR25_LostAnswerIsAskedForAgainWithTheSameRequest(t *testing.T) {
	for _, restart := range []bool{false, true} {
		b := newBench(t)
		b.live(b.runOptions(), confirmed(1))
		lost := 0
		b.OnRenew(func(w http.ResponseWriter, r *agenttest.Renewal) {
			_, code, _ := b.Renew(r)
			if code != "" {
				t.Errorf("refused: %s", code)
			}
			if lost++; lost <= 3 {
				panic(http.ErrAbortHandler)
			}
			b.AnswerRenewal(w, r)
		})
		for restart && lost < 3 {
			b.live(b.runOptions(), waits(1))
			b.restart()
		}
		b.live(b.runOptions(), confirmed(1))
		b.wantOneRequest()
		b.wantSound(2, 0)
	}
}

// TestR25_AnswerThatWasLostForLongerThanItRanIsStillTheWayOn has a machine cut off
// between the service's commit and the answer, and off until that ran out.
func TestR25_AnswerThatWasLostForLongerThanItRanIsStillTheWayOn(t *testing.T) {
	b := newBench(t)
	b.live(b.runOptions(), confirmed(1))
	b.OnRenew(func(_ http.ResponseWriter, r *agenttest.Renewal) {
		_, _, _ = b.Renew(r)
		panic(http.ErrAbortHandler)
	})
	b.live(b.runOptions(), waits(1))
	b.OnRenew(nil)
	b.clock.Advance(30 * 24 * time.Hour)
	b.restart()
	b.live(b.runOptions(), confirmed(2))
	if id := b.identity(); !b.clock.Now().Before(id.NotAfter) || id.Generation != 3 {
		t.Errorf("identity %+v", id)
	}
	b.wantSound(3, 0)
}

// TestR25_NoUnsignedAnswerIsFinal goes through every problem, and then renews.
func TestR25_NoUnsignedAnswerIsFinal(t *testing.T) {
	b := newBench(t)
	codes := []wire.Code{wire.AccessDenied, wire.Unsupported, wire.InvalidInput, wire.StaleBundle, wire.NotFound, wire.MethodNotAllowed, wire.TooLarge, wire.RateLimited, wire.Unavailable, wire.Internal}
	tries := 0
	b.OnRenew(func(w http.ResponseWriter, r *agenttest.Renewal) {
		if tries++; tries <= len(codes) {
			agenttest.WriteProblem(w, codes[tries-1], 0)
			return
		}
		b.AnswerRenewal(w, r)
	})
	b.live(b.runOptions(), confirmed(2))
	if tries != len(codes)+1 {
		t.Errorf("asked %d times", tries)
	}
	b.wantOneRequest()
	b.wantSound(2, 0)
}

// TestR25_RefusedForGoodGoesOnAskingAndSaysForWhom is refused until the
// certificate ran out, and then as well.
func TestR25_RefusedForGoodGoesOnAskingAndSaysForWhom(t *testing.T) {
	b := newBench(t)
	b.live(b.runOptions(), confirmed(1))
	b.OnRenew(func(w http.ResponseWriter, _ *agenttest.Renewal) { agenttest.WriteProblem(w, wire.AccessDenied, 0) })
	b.OnJoin(func(w http.ResponseWriter, _ *agenttest.Join) { agenttest.WriteProblem(w, wire.AccessDenied, 0) })
	id := b.identity()
	refused := 0
	b.live(b.runOptions(), func(e agent.Event) bool {
		if w, ok := e.(agent.Waiting); ok {
			if !agent.IsRefused(w.Reason) || w.Identity == nil || w.Identity.NodeID != id.NodeID || w.For > time.Hour {
				t.Errorf("waits %+v", w)
			}
			refused++
		}
		return refused == 300
	})
	renewals, joins := len(b.Renewals()), len(b.Joins())-1
	if renewals < 50 || joins < 50 {
		t.Errorf("asked %d times while the certificate ran, %d times after", renewals, joins)
	}
	p, err := b.dir.Progress()
	if err != nil || p.LastProblem == "" || p.NextTryAt.Before(p.LastTriedAt) {
		t.Errorf("progress %+v, error %v", p, err)
	}
	b.OnJoin(nil)
	b.live(b.runOptions(), confirmed(1))
	if p, err := b.dir.Progress(); err != nil || p.LastProblem != "" || !p.NextTryAt.IsZero() {
		t.Errorf("progress %+v, error %v", p, err)
	}
}

// TestRetryAfterIsObeyedByRenewals never asks earlier than it was told.
func TestRetryAfterIsObeyedByRenewals(t *testing.T) {
	b := newBench(t)
	b.live(b.runOptions(), confirmed(1))
	var asked []time.Time
	b.OnRenew(func(w http.ResponseWriter, r *agenttest.Renewal) {
		if asked = append(asked, b.clock.Now()); len(asked) <= 5 {
			agenttest.WriteProblem(w, wire.RateLimited, 20*time.Minute)
			return
		}
		b.AnswerRenewal(w, r)
	})
	b.live(b.runOptions(), confirmed(1))
	for i := range asked[1:] {
		if d := asked[i+1].Sub(asked[i]); d < 20*time.Minute || d > 20*time.Minute+15*time.Second<<i {
			t.Errorf("came back after %v", d)
		}
	}
}

// prover signs with what the service expects.
type prover struct {
	key  string
	seen []agent.ProofRequest
}

func (p *prover) Prove(_ context.Context, r agent.ProofRequest) ([]byte, error) {
	p.seen = append(p.seen, r)
	return append(bytes.Clone(r.Challenge), p.key...), nil
}

// TestR25_StatementIsProvedAnewByRenewalAndRejoin answers challenges with a prover,
// and waits without one.
func TestR25_StatementIsProvedAnewByRenewalAndRejoin(t *testing.T) {
	b := newBench(t)
	b.Proof = []byte("the node's key")
	b.live(b.runOptions(), confirmed(1))
	o := b.runOptions()
	p := &prover{key: "the node's key"}
	o.Prover = p
	b.live(o, confirmed(1))
	if len(p.seen) != 1 || len(b.Renewals()) != 2 || b.Renewals()[0].HasSealed || b.Renewals()[1].Proof == nil {
		t.Fatalf("%d proofs in %d rounds", len(p.seen), len(b.Renewals()))
	}
	b.clock.Advance(2 * lifetime)
	b.live(o, admitted(agent.ByRejoin))
	if len(p.seen) != 2 || p.seen[0].CSRSHA256 == p.seen[1].CSRSHA256 {
		t.Errorf("%d proofs", len(p.seen))
	}
	for name, prover := range map[string]agent.Prover{"none": nil, "another key's": &prover{key: "another key"}} {
		o.Prover = prover
		b.live(o, func(e agent.Event) bool {
			w, ok := e.(agent.Waiting)
			if ok && name == "none" && !errors.Is(w.Reason, agent.ErrNoProver) {
				t.Errorf("without a prover it says %v", w.Reason)
			}
			return ok
		})
	}
	b.wantSound(3, 0)
}

// TestRenewalForAnotherNodeIsNotBelieved, though it is signed.
func TestRenewalForAnotherNodeIsNotBelieved(t *testing.T) {
	b := newBench(t)
	b.live(b.runOptions(), confirmed(1))
	id := b.identity()
	b.OnRenew(func(w http.ResponseWriter, r *agenttest.Renewal) {
		j := &agenttest.Join{Join: &wire.Join{CSR: r.Renew.CSR, Role: wire.RoleNode}, CSR: r.CSR}
		b.Write(w, b.AdmitAs(j, r.CSR.PublicKey, agenttest.Leaf{}))
	})
	b.live(b.runOptions(), func(e agent.Event) bool {
		w, ok := e.(agent.Waiting)
		if ok && !agent.IsUntrusted(w.Reason) {
			t.Errorf("waits because of %v", w.Reason)
		}
		return ok
	})
	if b.identity().CertificateSHA256 != id.CertificateSHA256 {
		t.Error("became another node")
	}
}

// TestKeyTypeStaysUnlessAnotherIsAskedFor over renewals.
func TestKeyTypeStaysUnlessAnotherIsAskedFor(t *testing.T) {
	b := newBench(t)
	b.config.KeyType = state.Ed25519
	b.live(b.runOptions(), confirmed(1))
	for _, kind := range []state.KeyType{"", state.ECDSAP384, ""} {
		b.config.KeyType = kind
		b.live(b.runOptions(), confirmed(1))
	}
	var got []string
	for _, r := range b.Renewals() {
		got = append(got, r.CSR.PublicKeyAlgorithm.String())
	}
	if want := []string{"Ed25519", "ECDSA", "ECDSA"}; len(got) != 3 || got[0] != want[0] || got[1] != want[1] || got[2] != want[2] {
		t.Errorf("keys %v", got)
	}
}

// TestACopyOfTheDiskIsFoundOut has two machines with one identity take turns: the
// rules that the other tests pass are able to fail.
func TestACopyOfTheDiskIsFoundOut(t *testing.T) {
	b := newBench(t)
	b.live(b.runOptions(), confirmed(1))
	_ = b.dir.Close()
	owner, thief := b.path, filepath.Join(t.TempDir(), "copy")
	if err := os.CopyFS(thief, os.DirFS(owner)); err != nil {
		// CopyFS does not copy links.
		t.Log(err)
	}
	_ = os.Remove(filepath.Join(thief, "current"))
	if err := os.Symlink("identities/1", filepath.Join(thief, "current")); err != nil {
		t.Fatal(err)
	}
	b.open()
	b.live(b.runOptions(), confirmed(1))
	_ = b.dir.Close()
	b.path = thief
	b.open()
	b.live(b.runOptions(), waits(1))
	if b.Conflicts() == 0 {
		t.Error("a copy renewed and nobody noticed")
	}
}

// TestOutputsThatCannotBeWrittenDoNotStopRenewals and are written when they can.
func TestOutputsThatCannotBeWrittenDoNotStopRenewals(t *testing.T) {
	b := newBench(t)
	dir := t.TempDir()
	blocker := filepath.Join(dir, "out")
	if err := os.WriteFile(blocker, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	o := b.runOptions()
	o.Join.Outputs = outputsIn(blocker)
	renewed := 0
	b.live(o, func(e agent.Event) bool {
		if a, ok := e.(agent.Admitted); ok && a.Way == agent.ByRenewal {
			renewed++
		}
		return renewed == 2
	})
	if b.Confirmed(b.identity().CertificateSHA256) > 0 {
		t.Error("confirmed what was not handed over")
	}
	if err := os.Remove(blocker); err != nil {
		t.Fatal(err)
	}
	b.live(o, confirmed(1))
	checkWhole(t, b.path, o.Join.Outputs, b.Service)
	b.wantSound(3, 0)
}

// TestConfirmationThatFailsIsSentLater without another exchange.
func TestConfirmationThatFailsIsSentLater(t *testing.T) {
	b := newBench(t)
	tries := 0
	b.OnConfirm(func(w http.ResponseWriter, _ *http.Request) {
		if tries++; tries == 4 {
			b.OnConfirm(nil)
		}
		agenttest.WriteProblem(w, wire.Unavailable, time.Minute)
	})
	b.live(b.runOptions(), confirmed(1))
	if waited := b.clock.Now().Sub(agenttest.Start); waited < 4*time.Minute || waited > 10*time.Minute {
		t.Errorf("confirmed after %v", waited)
	}
	if len(b.Joins()) != 1 || len(b.Renewals()) > 0 {
		t.Error("asked again for the sake of a confirmation")
	}
}

// TestReloadIsRunOnceForEachCertificate over restarts and renewals.
func TestReloadIsRunOnceForEachCertificate(t *testing.T) {
	b := newBench(t)
	o := b.runOptions()
	o.Join.Outputs = outputsIn(filepath.Join(t.TempDir(), "out"))
	var ran []string
	o.Reload = func(_ context.Context, id *state.Identity) error {
		if _, err := os.Stat(o.Join.Outputs.Cert); err != nil {
			t.Error("run before the hand-over")
		}
		ran = append(ran, id.CertificateSHA256)
		return nil
	}
	for range 3 {
		b.live(o, func(e agent.Event) bool { _, ok := e.(agent.RenewalPlanned); return ok })
		b.restart()
	}
	b.live(o, func(e agent.Event) bool { _, ok := e.(agent.Reloaded); return ok })
	if len(ran) != 2 || ran[0] == ran[1] {
		t.Errorf("ran for %v", ran)
	}
}

// TestReloadThatFailedOrWasCutShortIsRunAtTheNextStart and never blocks renewals.
func TestReloadThatFailedOrWasCutShortIsRunAtTheNextStart(t *testing.T) {
	b := newBench(t)
	o := b.runOptions()
	ran := 0
	o.Reload = func(context.Context, *state.Identity) error { ran++; return errors.New("exit status 1") }
	b.live(o, admitted(agent.ByRenewal))
	if ran != 1 {
		t.Errorf("ran %d times before the first renewal, want once", ran)
	}
	// The process ends between the hand-over and the end of the command.
	ctx, cancel := context.WithCancel(t.Context())
	o.Reload = func(context.Context, *state.Identity) error { ran++; cancel(); return nil }
	if err := b.machine().Run(ctx, o); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	fail := errors.New("exit status 1")
	for want := 3; want <= 5; want++ {
		o.Reload = func(context.Context, *state.Identity) error { ran++; return fail }
		b.restart()
		b.live(o, func(e agent.Event) bool { _, ok := e.(agent.RenewalPlanned); return ok })
		if want == 4 {
			fail = nil
		}
		if ran != want {
			t.Errorf("ran %d times, want %d", ran, want)
		}
	}
	b.restart()
	b.live(o, func(e agent.Event) bool { _, ok := e.(agent.RenewalPlanned); return ok })
	if ran != 5 {
		t.Errorf("run again after it ended well: %d times", ran)
	}
	p, err := b.dir.Progress()
	if err != nil || p.Reload == nil || p.Reload.Problem != "" {
		t.Errorf("progress %+v, error %v", p.Reload, err)
	}
}

// TestOnceDoesWhatIsDue and nothing else.
func TestOnceDoesWhatIsDue(t *testing.T) {
	b := newBench(t)
	o := b.runOptions()
	o.Join.Once = true
	once := func(want error) {
		t.Helper()
		if err := b.machine().Run(t.Context(), o); !errors.Is(err, want) {
			t.Fatalf("error %v, want %v", err, want)
		}
	}
	once(nil)
	once(nil)
	b.wantSound(1, 0)
	b.clock.Advance(lifetime * 3 / 4)
	once(nil)
	b.wantSound(2, 0)
	b.clock.Advance(2 * lifetime)
	once(nil)
	b.wantSound(3, 0)
	if len(b.clock.Sleeps()) > 0 {
		t.Errorf("slept %v", b.clock.Sleeps())
	}
	b.clock.Advance(lifetime * 3 / 4)
	b.OnRenew(func(w http.ResponseWriter, _ *agenttest.Renewal) { agenttest.WriteProblem(w, wire.AccessDenied, 0) })
	if err := b.machine().Run(t.Context(), o); !agent.IsRefused(err) {
		t.Errorf("error %v", err)
	}
}
