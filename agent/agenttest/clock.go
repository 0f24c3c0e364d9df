package agenttest

import (
	"context"
	"sync"
	"time"
)

// Clock is simulated time: it stands still but for those who sleep, and moves at
// once to where they wake.
type Clock struct {
	mu     sync.Mutex
	now    time.Time
	sleeps []time.Duration
}

// Start is where every [Clock] begins.
var Start = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// NewClock is a clock that begins at [Start].
func NewClock() *Clock { return &Clock{now: Start} }

// Now is the simulated time.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

// Elapsed is the simulated time since [Start].
func (c *Clock) Elapsed() time.Duration { return c.Now().Sub(Start) }

// Sleep moves the time on.
func (c *Clock) Sleep(ctx context.Context, d time.Duration) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
	c.sleeps = append(c.sleeps, d)
	return nil
}

// Advance moves the time on, or back, without a sleeper.
func (c *Clock) Advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// Sleeps lists how long each sleeper slept.
func (c *Clock) Sleeps() []time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]time.Duration(nil), c.sleeps...)
}

// WrongClock is a machine's clock that is off from simulated time.
type WrongClock struct {
	*Clock
	mu            sync.Mutex
	ahead, paused time.Duration
}

// Set puts the clock ahead of simulated time, or behind where negative.
func (w *WrongClock) Set(ahead time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ahead = ahead
}

// Pause lets simulated time go on without the machine, as when a virtual machine
// is saved and restored: its clock is set right afterwards.
func (w *WrongClock) Pause(d time.Duration) {
	w.Advance(d)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.paused += d
}

// Now is what the clock shows.
func (w *WrongClock) Now() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.Clock.Now().Add(w.ahead)
}

// Elapsed is the simulated time less the pauses.
func (w *WrongClock) Elapsed() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.Clock.Elapsed() - w.paused
}
