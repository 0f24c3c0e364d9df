package agent

import (
	"container/heap"
	"context"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/better-compute/join-operator/agent/state"
	"github.com/better-compute/join-operator/api/wire"
)

// simClock is the time of a whole simulated fleet.
type simClock struct{ now time.Duration }

var simStart = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func (c *simClock) Now() time.Time         { return simStart.Add(c.now) }
func (c *simClock) Elapsed() time.Duration { return c.now }
func (c *simClock) Sleep(context.Context, time.Duration) error {
	panic("nobody sleeps in a simulation")
}

// simService answers a fixed number of exchanges a second, and tells the rest to
// come again.
type simService struct {
	capacity   int
	retryAfter time.Duration
	// downUntil is when it begins to answer at all.
	downUntil time.Duration

	second   time.Duration
	answered int
	asked    int
	// peak is the most that came in one second, from peakAfter on.
	peak, peakAfter int
}

func (s *simService) ask(at time.Duration) error {
	if second := at.Truncate(time.Second); second != s.second {
		s.second, s.answered, s.asked = second, 0, 0
	}
	s.asked++
	if int(s.second/time.Second) >= s.peakAfter {
		s.peak = max(s.peak, s.asked)
	}
	if at < s.downUntil {
		return context.DeadlineExceeded
	}
	if s.answered == s.capacity {
		return &ProblemError{Status: 503, Code: wire.Unavailable, RetryAfter: s.retryAfter}
	}
	s.answered++
	return nil
}

// simMachine is the part of a machine that decides when it asks.
type simMachine struct {
	at time.Duration
	// step is called at that time. It returns when to look again, or that the
	// machine is done.
	step func() (wait time.Duration, done bool)
}

type simQueue []*simMachine

func (q simQueue) Len() int           { return len(q) }
func (q simQueue) Less(i, j int) bool { return q[i].at < q[j].at }
func (q simQueue) Swap(i, j int)      { q[i], q[j] = q[j], q[i] }
func (q *simQueue) Push(x any)        { *q = append(*q, x.(*simMachine)) }
func (q *simQueue) Pop() any {
	last := (*q)[len(*q)-1]
	*q = (*q)[:len(*q)-1]
	return last
}

// simulate runs a fleet until every machine is done.
func simulate(t *testing.T, clock *simClock, fleet simQueue, limit time.Duration) (half, all time.Duration) {
	t.Helper()
	heap.Init(&fleet)
	n := fleet.Len()
	for fleet.Len() > 0 {
		m := fleet[0]
		if clock.now = m.at; clock.now > limit {
			t.Fatalf("%d of %d machines are not in after %v", fleet.Len(), n, limit)
		}
		wait, done := m.step()
		if done {
			heap.Pop(&fleet)
			if fleet.Len() == n/2 {
				half = clock.now
			}
			continue
		}
		m.at += wait
		heap.Fix(&fleet, 0)
	}
	return half, clock.now
}

// TestFleetThatComesBackAtOnceSpreadsItselfOut has 100,000 machines start in one
// second, by the functions that real machines plan with: after a power cut during
// which their certificates ran out or came due, after an outage of the service,
// and on their first day.
func TestFleetThatComesBackAtOnceSpreadsItselfOut(t *testing.T) {
	const (
		machines = 100_000
		life     = 168 * time.Hour
	)
	for _, c := range []struct {
		name string
		// ago is how long before the start the certificates were issued; zero has
		// machines that join for the first time.
		ago       time.Duration
		capacity  int
		downUntil time.Duration
		peakAfter int
		// bounds
		peak   int
		within time.Duration
	}{
		{name: "certificates ran out, 500/s", ago: 2 * life, capacity: 500, peak: 450, within: 6 * time.Minute},
		{name: "certificates ran out, 100/s", ago: 2 * life, capacity: 100, peak: 2_000, within: 80 * time.Minute},
		{name: "certificates are overdue, 500/s", ago: life * 8 / 10, capacity: 500, peak: 70, within: 61 * time.Minute},
		{name: "certificates are overdue, 20/s", ago: life * 8 / 10, capacity: 20, peak: 250, within: 3 * time.Hour},
		{name: "the service was down for hours, 500/s", ago: 2 * life, capacity: 500, downUntil: 4 * time.Hour, peakAfter: 14_400, peak: 120, within: 5*time.Hour + time.Minute},
		{name: "first joins, 500/s", capacity: 500, peakAfter: 60, peak: 2_000, within: 25 * time.Minute},
	} {
		t.Run(c.name, func(t *testing.T) {
			clock := &simClock{}
			service := &simService{capacity: c.capacity, retryAfter: 5 * time.Second, downUntil: c.downUntil, peakAfter: c.peakAfter}
			seeded := rand.New(rand.NewPCG(4, 2))
			random := func(limit time.Duration) time.Duration {
				if limit <= 0 {
					return 0
				}
				return time.Duration(seeded.Int64N(int64(limit)))
			}
			began := time.Now()
			var fleet simQueue
			for range machines {
				sim := &simMachine{at: random(time.Second)}
				if c.ago == 0 {
					back := backOff{base: backOffBase, limit: backOffMax, random: random}
					sim.step = func() (time.Duration, bool) {
						if err := service.ask(clock.now); err != nil {
							return waitAfter(err, &back), false
						}
						return 0, true
					}
				} else {
					l := simLife(clock, random, c.ago, life)
					sim.step = func() (time.Duration, bool) {
						if wait := l.untilRenewal(); wait > 0 {
							return min(wait, lookAgain), false
						}
						if err := service.ask(clock.now); err != nil {
							l.failed(err)
							return 0, false
						}
						return 0, true
					}
				}
				fleet = append(fleet, sim)
			}
			half, all := simulate(t, clock, fleet, 2*c.within)
			t.Logf("%d machines: peak %d/s, half in after %v, all after %v (simulated in %v)", machines, service.peak, half.Round(time.Second), all.Round(time.Second), time.Since(began).Round(time.Millisecond))
			if service.peak > c.peak {
				t.Errorf("%d exchanges in one second, want %d at most", service.peak, c.peak)
			}
			if all > c.within {
				t.Errorf("all in after %v, want %v at most", all, c.within)
			}
		})
	}
}

// simLife is a machine that joined some time before the simulation's start and
// whose process starts now.
func simLife(clock *simClock, random func(time.Duration) time.Duration, ago, lifetime time.Duration) *life {
	m := &Machine{clock: clock, random: random, observe: func(Event) {}}
	from := simStart.Add(-ago)
	m.time = newTimeline(clock, state.Progress{SignedAt: from}, from)
	id := &state.Identity{NotBefore: from, NotAfter: from.Add(lifetime), RenewAt: renewalPoint(from, from.Add(lifetime), random)}
	return &life{m: m, id: id, renewing: m.newBackOff()}
}
