package agent_test

import (
	"net/http"
	"testing"
	"time"

	"github.com/better-compute/join-operator/agent"
	"github.com/better-compute/join-operator/agent/agenttest"
	"github.com/better-compute/join-operator/api/wire"
)

const year = 365 * 24 * time.Hour

// wrongClock gives the machine a clock of its own.
func (b *bench) wrongClock(ahead time.Duration) *agenttest.WrongClock {
	w := &agenttest.WrongClock{Clock: b.clock}
	w.Set(ahead)
	b.config.Clock = w
	return w
}

// partsOfLife records when renewals came, as parts of their certificates' lives.
func (b *bench) partsOfLife() *[]float64 {
	parts := &[]float64{}
	b.OnRenew(func(w http.ResponseWriter, r *agenttest.Renewal) {
		id := b.identity()
		*parts = append(*parts, float64(b.clock.Now().Sub(id.NotBefore))/float64(id.NotAfter.Sub(id.NotBefore)))
		b.AnswerRenewal(w, r)
	})
	return parts
}

// TestWrongClockDoesNotMoveARenewal has clocks that are off by years, hours and
// minutes, over restarts.
func TestWrongClockDoesNotMoveARenewal(t *testing.T) {
	for _, ahead := range []time.Duration{10 * year, -10 * year, 26 * time.Hour, -26 * time.Hour, 4 * time.Minute} {
		t.Run(ahead.String(), func(t *testing.T) {
			b := newBench(t)
			b.wrongClock(ahead)
			parts := b.partsOfLife()
			said := 0
			count := func(e agent.Event) bool {
				if w, ok := e.(agent.ClockWrong); ok {
					said++
					if (w.Ahead-ahead).Abs() > time.Second || (w.ServiceTime.Sub(b.clock.Now())).Abs() > time.Second {
						t.Errorf("said %+v", w)
					}
				}
				return false
			}
			for range 3 {
				next := confirmed(1)
				b.live(b.runOptions(), func(e agent.Event) bool { return count(e) || next(e) })
				b.restart()
			}
			if want := map[bool]int{true: 3, false: 0}[ahead.Abs() > 5*time.Minute]; said != want {
				t.Errorf("said %d times in 3 processes, want %d", said, want)
			}
			early := 0
			for _, p := range *parts {
				switch {
				case p < 0.4:
					early++ // The service says so, with 429.
				case p < 0.499 || p > 0.751:
					t.Errorf("renewed at %.3f of the lifetime", p)
				}
			}
			// After a restart, a clock by which the certificate ran out is asked about once.
			if allowed := map[bool]int{true: 2, false: 0}[ahead > year]; early > allowed || len(*parts) != 2+early {
				t.Errorf("asked at %v of the lifetime for 2 renewals", *parts)
			}
			b.wantSound(3, 0)
		})
	}
}

// TestClockThatIsSetWhileItRunsMovesNoRenewal costs one early exchange at most.
func TestClockThatIsSetWhileItRunsMovesNoRenewal(t *testing.T) {
	for _, to := range []time.Duration{10 * year, -10 * year} {
		b := newBench(t)
		clock := b.wrongClock(0)
		parts := b.partsOfLife()
		renewed := admitted(agent.ByRenewal)
		b.live(b.runOptions(), func(e agent.Event) bool {
			if _, ok := e.(agent.RenewalPlanned); ok {
				clock.Set(to)
			}
			return renewed(e)
		})
		last := (*parts)[len(*parts)-1]
		if len(*parts) > 2 || last < 0.499 || last > 0.751 {
			t.Errorf("set by %v: asked at %v of the lifetime", to, *parts)
		}
		b.wantSound(2, 0)
	}
}

// TestClockThatIsSetRightIsBelieved has a clock of 1970 until the network is up.
func TestClockThatIsSetRightIsBelieved(t *testing.T) {
	b := newBench(t)
	clock := b.wrongClock(-50 * year)
	b.live(b.runOptions(), confirmed(1))
	b.restart()
	clock.Set(0)
	b.clock.Advance(2 * lifetime)
	back := b.clock.Now()
	b.live(b.runOptions(), admitted(agent.ByRejoin))
	if waited := b.clock.Now().Sub(back); waited > 5*time.Minute {
		t.Errorf("back after %v", waited)
	}
}

// TestMachineThatStoodStillUnnoticedComesBackSoon is a virtual machine that was
// saved and restored: its clock was set right, its own count of time was not.
func TestMachineThatStoodStillUnnoticedComesBackSoon(t *testing.T) {
	for _, pause := range []time.Duration{lifetime - 10*time.Hour, 3 * lifetime} {
		b := newBench(t)
		clock := b.wrongClock(0)
		var back time.Time
		renewed := confirmed(2)
		b.live(b.runOptions(), func(e agent.Event) bool {
			if _, ok := e.(agent.RenewalPlanned); ok && back.IsZero() {
				clock.Pause(pause)
				back = b.clock.Now()
			}
			return renewed(e)
		})
		if waited := b.clock.Now().Sub(back); waited > 3*time.Hour {
			t.Errorf("stood still for %v, and has a new certificate only %v later", pause, waited)
		}
		b.wantSound(2, 0)
	}
}

// shortServing has endpoints whose certificate runs as short as real ones do.
func (b *bench) shortServing(from, until time.Time) {
	ca := agenttest.NewAuthority(b.t, "tls")
	ca.ServeFrom, ca.ServeUntil = from, until
	server := b.Serve(b.Server.Config.Handler, ca)
	b.EditBundle(func(x *wire.Bundle) { x.TLSCA, x.Endpoints = ca.PEM(), []string{server.URL} })
}

// TestClockOffByYearsIsToldThoughEndpointsLookOutOfDateByIt joins, says by how
// much the clock is off, and renews.
func TestClockOffByYearsIsToldThoughEndpointsLookOutOfDateByIt(t *testing.T) {
	for _, ahead := range []time.Duration{10 * year, -10 * year} {
		b := newBench(t)
		b.shortServing(agenttest.Start.AddDate(0, 0, -1), agenttest.Start.AddDate(0, 3, 0))
		b.wrongClock(ahead)
		said := false
		renewed := admitted(agent.ByRenewal)
		b.live(b.runOptions(), func(e agent.Event) bool {
			w, ok := e.(agent.ClockWrong)
			said = said || ok && w.Ahead == ahead
			return renewed(e)
		})
		if !said {
			t.Errorf("%v: not said", ahead)
		}
	}
}

// TestEndpointThatIsOutOfDateByWhatWasSignedGetsNothing, whatever the clock says.
func TestEndpointThatIsOutOfDateByWhatWasSignedGetsNothing(t *testing.T) {
	for _, ahead := range []time.Duration{0, 10 * year, -10 * year} {
		b := newBench(t)
		b.shortServing(agenttest.Start.AddDate(0, -1, 0), agenttest.Start.AddDate(0, 0, -2))
		b.wrongClock(ahead)
		if _, err := b.once(); !agent.IsUntrusted(err) || len(b.Joins()) > 0 {
			t.Errorf("%v: error %v, %d requests", ahead, err, len(b.Joins()))
		}
	}
	// A certificate that ran out a day ago, and a service that has spoken already.
	b := newBench(t)
	b.shortServing(agenttest.Start.AddDate(0, -1, 0), agenttest.Start.Add(time.Hour))
	b.live(b.runOptions(), func(e agent.Event) bool {
		w, ok := e.(agent.Waiting)
		if ok && !agent.IsUntrusted(w.Reason) {
			t.Errorf("waits because of %v", w.Reason)
		}
		return ok
	})
	if len(b.Renewals()) > 0 {
		t.Error("a request was sent")
	}
}
