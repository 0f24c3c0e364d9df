package agent_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/better-compute/join-operator/agent"
	"github.com/better-compute/join-operator/agent/state"
)

// off is how long a machine was off: its certificate is due, or ran out.
var off = map[string]time.Duration{"renewal": lifetime * 4 / 5, "rejoin": 2 * lifetime}

// TestKillAtEveryChangeOnDiskStillRenewsOnce kills a real process (SIGKILL) before
// each change that it makes on disk for a renewal or a join by its certificate,
// and in the middle of each write; then lets the next process go on. There must be
// one new certificate, never a second request for it, and everything handed over.
func TestKillAtEveryChangeOnDiskStillRenewsOnce(t *testing.T) {
	for name, d := range off {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			killed := 0
			for n := 1; ; n++ {
				dir := t.TempDir()
				_ = b.dir.Close()
				b.path = filepath.Join(dir, "state")
				b.open()
				b.mustJoin()
				_ = b.dir.Close()
				b.clock.Advance(d)
				now := timeEnv + "=" + b.clock.Elapsed().String()
				before, _ := b.Issued()
				code, signal, stderr := process(t, b.Service, n, dir, now)
				if code == stepsExit {
					break
				}
				if signal != syscall.SIGKILL {
					t.Fatalf("change %d: exit %d, signal %v: %s", n, code, signal, stderr)
				}
				killed++
				view, err := state.View(b.path)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := view.Identity(); err != nil {
					t.Fatalf("after a kill at change %d no identity is in force: %v", n, err)
				}
				if code, signal, stderr := process(t, b.Service, never, dir, now); code != stepsExit {
					t.Fatalf("after a kill at change %d: exit %d, signal %v: %s", n, code, signal, stderr)
				}
				if all, abandoned := b.Issued(); all != before+1 || abandoned > 0 || b.Conflicts() > 0 {
					t.Fatalf("after a kill at change %d: %d new certificates, %d abandoned, %d conflicts", n, all-before, abandoned, b.Conflicts())
				}
				checkWhole(t, b.path, outputsIn(filepath.Join(dir, "out")), b.Service)
				id, err := view.Identity()
				if err != nil {
					t.Fatal(err)
				}
				if raw, err := os.ReadFile(filepath.Join(dir, "out", "reloaded")); err != nil || string(raw) != id.CertificateSHA256 || id.Generation != 2 {
					t.Errorf("after a kill at change %d: reloaded for %.8s (%v), want generation 2, have %d", n, raw, err, id.Generation)
				}
			}
			if killed < 40 {
				t.Errorf("killed at %d changes only: the test missed most", killed)
			}
		})
	}
}

// TestFullDiskAtEveryChangeStillRenewsOnce has the disk full from the nth change
// on; then there is room again.
func TestFullDiskAtEveryChangeStillRenewsOnce(t *testing.T) {
	for name, d := range off {
		t.Run(name, func(t *testing.T) {
			for n := 1; ; n++ {
				b := newBench(t)
				b.mustJoin()
				_ = b.dir.Close()
				b.clock.Advance(d)
				o := b.runOptions()
				o.Join.Once, o.Join.Outputs = true, outputsIn(filepath.Join(t.TempDir(), "out"))
				f := &faulty{n: n, fate: func(string) error { return syscall.ENOSPC }}
				err := func() error {
					dir, err := state.Open(b.path, state.WithFileSystem(f))
					if err != nil {
						return err
					}
					defer dir.Close()
					m, err := agent.New(agent.Config{State: dir, Logger: quiet(), Clock: b.clock})
					if err != nil {
						return err
					}
					return m.Run(t.Context(), o)
				}()
				if f.step < n {
					if n < 30 {
						t.Errorf("only %d changes", f.step)
					}
					break
				}
				if err != nil && !errors.Is(err, syscall.ENOSPC) {
					t.Fatalf("full at change %d: %v", n, err)
				}
				b.open()
				if err := b.machine().Run(t.Context(), o); err != nil {
					t.Fatalf("with room again after change %d: %v", n, err)
				}
				b.wantSound(2, 0)
				checkWhole(t, b.path, o.Join.Outputs, b.Service)
				_ = b.dir.Close()
			}
		})
	}
}

// TestFullDiskIsWaitedOutByARunningRenewal frees the disk while it backs off.
func TestFullDiskIsWaitedOutByARunningRenewal(t *testing.T) {
	b := newBench(t)
	b.mustJoin()
	_ = b.dir.Close()
	full := true
	f := &faulty{n: never, fate: func(string) error {
		if full {
			return syscall.ENOSPC
		}
		return nil
	}}
	b.open(state.WithFileSystem(f))
	failed := 0
	renewed := confirmed(1)
	b.live(b.runOptions(), func(e agent.Event) bool {
		if p, ok := e.(agent.RenewalPlanned); ok && p.In > 0 {
			f.n = f.step + 1
		}
		if w, ok := e.(agent.Waiting); ok {
			if !errors.Is(w.Reason, syscall.ENOSPC) {
				t.Errorf("waits because of %v", w.Reason)
			}
			failed++
			full = failed < 5
		}
		return renewed(e)
	})
	if len(b.Renewals()) != 1 || failed != 5 {
		t.Errorf("%d exchanges after %d failures: something was sent that was not on disk", len(b.Renewals()), failed)
	}
	b.wantSound(2, 0)
}

// TestResetThatIsCutShortIsFinished stops it at every change on disk; whoever
// opens the directory next finds nothing of the old node.
func TestResetThatIsCutShortIsFinished(t *testing.T) {
	for _, bundle := range []bool{false, true} {
		for n := 1; ; n++ {
			b := newBench(t)
			b.mustJoin()
			old, err := b.dir.Request()
			if err != nil {
				t.Fatal(err)
			}
			_ = b.dir.Close()
			f := &faulty{n: never, fate: func(string) error { return syscall.EIO }}
			b.open(state.WithFileSystem(f))
			f.n = f.step + n
			if err := b.dir.Reset(bundle); err == nil {
				if n < 9 {
					t.Errorf("only %d changes", n-1)
				}
				break
			}
			_ = b.dir.Close()
			b.open()
			_, idErr := b.dir.Identity()
			_, requestErr := b.dir.Request()
			if idErr == nil && requestErr == nil {
				// It had not begun.
				if n > 5 {
					t.Errorf("stopped at change %d: nothing was done", n)
				}
				_ = b.dir.Close()
				continue
			}
			if !errors.Is(idErr, fs.ErrNotExist) || !errors.Is(requestErr, fs.ErrNotExist) {
				t.Errorf("stopped at change %d: identity %v, request %v", n, idErr, requestErr)
			}
			if _, err := b.dir.Bundle(); errors.Is(err, fs.ErrNotExist) != bundle {
				t.Errorf("stopped at change %d: the pinned bundle: %v", n, err)
			}
			b.mustJoin()
			if request, err := b.dir.Request(); err != nil || request.CSRSHA256() == old.CSRSHA256() {
				t.Errorf("joined again with the same request (%v)", err)
			}
			_ = b.dir.Close()
		}
	}
}
