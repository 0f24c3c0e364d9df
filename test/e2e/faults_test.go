package e2e

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/test/machine"
)

// fault runs a command of the launcher on one process.
func fault(t *testing.T, verb, process string) {
	t.Helper()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	if err := sys.dev(root, verb, process); err != nil {
		t.Fatalf("%s %s: %v", verb, process, err)
	}
}

// without stops a process, runs f, and starts it again whatever f did.
func without(t *testing.T, process string, f func()) {
	t.Helper()
	fault(t, "kill", process)
	defer fault(t, "start", process)
	f()
}

// keepJoining lets machines join one after the other, from several goroutines,
// until stop is called; every one of them must get in by trying again.
func keepJoining(t *testing.T, ns, text string) (stop func() []*wire.Answer) {
	t.Helper()
	target := sys.target(t)
	done := make(chan struct{})
	var mu sync.Mutex
	var answers []*wire.Answer
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				m, err := machine.New()
				if err != nil {
					t.Error(err)
					return
				}
				a, err := joinPatiently(context.WithoutCancel(t.Context()), target, m, text)
				if err != nil {
					t.Errorf("a machine stays outside: %v", err)
					return
				}
				mu.Lock()
				answers = append(answers, a)
				mu.Unlock()
			}
		})
	}
	return func() []*wire.Answer {
		close(done)
		wg.Wait()
		return answers
	}
}

func TestInvariant9_KilledProcessesStrandNobodyAndLeaveNothingHalfDone(t *testing.T) {
	ns := tenant(t)
	pool(t, ns, "general", false)
	const uses = 100000
	text := token(t, ns, "many", "general", uses)
	for _, process := range []string{"joinsvc-1", "joinsvc-2", "gateway", "manager"} {
		t.Run(process, func(t *testing.T) {
			before := count(t, `SELECT count(*) FROM nodes WHERE tenant = $1`, ns)
			stop := keepJoining(t, ns, text)
			eventually(t, 30*time.Second, "joins are under way", func() error {
				if n := count(t, `SELECT count(*) FROM nodes WHERE tenant = $1`, ns); n < before+20 {
					return fmt.Errorf("%d", n-before)
				}
				return nil
			})
			fault(t, "kill", process)
			fault(t, "start", process)
			answers := stop()
			nodes := count(t, `SELECT count(*) FROM nodes WHERE tenant = $1`, ns)
			certs := count(t, `SELECT count(*) FROM node_certs WHERE tenant = $1`, ns)
			left := count(t, `SELECT sum(uses_left) FROM join_token_slots s JOIN join_tokens t ON t.id = s.token_id WHERE t.tenant = $1`, ns)
			if got := nodes - before; got != len(answers) {
				t.Errorf("%d machines hold certificates, %d nodes were entered", len(answers), got)
			}
			if certs != nodes || uses-left != nodes {
				t.Errorf("%d nodes, %d certificates, %d uses spent", nodes, certs, uses-left)
			}
		})
	}
}

func TestInvariant8_WithoutPostgresEveryJoinIsAnswered503Quickly(t *testing.T) {
	ns := tenant(t)
	pool(t, ns, "general", false)
	text := token(t, ns, "many", "general", 100)
	target := sys.target(t)
	m := newMachine(t)
	without(t, "postgres", func() {
		began := time.Now()
		_, err := target.JoinToken(t.Context(), m, text)
		p, ok := errors.AsType[*machine.ProblemError](err)
		if !ok || p.Code != wire.Unavailable || p.Header.Get("Retry-After") == "" {
			t.Errorf("got %v, want UNAVAILABLE with Retry-After", err)
		}
		if took := time.Since(began); took > 1500*time.Millisecond {
			t.Errorf("it took %s", took)
		}
	})
	if _, err := joinPatiently(t.Context(), target, m, text); err != nil {
		t.Errorf("after Postgres came back: %v", err)
	}
}

func TestInvariant8_WithoutAPIServerTokenJoinsGoOnAndPendingOnesAreRecordedLater(t *testing.T) {
	ns := tenant(t)
	pool(t, ns, "general", false)
	pool(t, ns, "gpu", true)
	open, guarded := token(t, ns, "open", "general", 10), token(t, ns, "guarded", "gpu", 1)
	target := sys.target(t)
	var name string
	without(t, "kube-apiserver", func() {
		if _, err := target.JoinToken(t.Context(), newMachine(t), open); err != nil {
			t.Errorf("a token join: %v", err)
		}
		name = waits(t, target, newMachine(t), guarded)
	})
	eventually(t, 90*time.Second, "the pending join is recorded", func() error {
		return sys.kube.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: name}, &v1alpha1.JoinRequest{})
	})
}
