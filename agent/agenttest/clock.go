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
