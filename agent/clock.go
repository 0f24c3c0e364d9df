package agent

import (
	"context"
	"time"
)

// Clock is the machine's time. Everything that waits or judges dates uses it.
type Clock interface {
	Now() time.Time
	// Elapsed is the time since some fixed point. Unlike Now it runs evenly,
	// whoever sets the clock, and also while the machine is suspended.
	Elapsed() time.Duration
	// Sleep returns after d, or with the context's error when that ends first.
	Sleep(ctx context.Context, d time.Duration) error
}

// SystemClock is the operating system's time.
type SystemClock struct{}

var processStart = time.Now()

// Now is the current time.
func (SystemClock) Now() time.Time { return time.Now() }

// Sleep waits. A suspended machine waits longer.
func (SystemClock) Sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
