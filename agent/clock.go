package agent

import (
	"context"
	"math/rand/v2"
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

// Waits of the protocol.
const (
	backOffBase = 15 * time.Second
	backOffMax  = time.Hour
	// maxRetryAfter caps what an unsigned answer can ask for.
	maxRetryAfter = time.Hour
	// walkEvery is the least time between two walks through the rotations.
	walkEvery = time.Minute
	// clockTolerance is how far this machine's clock may be off without a word.
	clockTolerance = 5 * time.Minute

	confirmBase  = time.Second
	confirmMax   = 15 * time.Second
	confirmTries = 4
)

// backOff is full jitter: a random part of a limit that doubles with every wait.
type backOff struct {
	base, limit time.Duration
	random      func(limit time.Duration) time.Duration
	tries       int
}

// next is the wait after one more failure, never less than an endpoint asked for.
func (b *backOff) next(atLeast time.Duration) time.Duration {
	upTo := b.limit
	if b.tries < 32 {
		upTo = min(b.limit, b.base<<b.tries)
	}
	if upTo <= 0 {
		upTo = b.limit
	}
	b.tries++
	if atLeast > 0 {
		// Machines that were all told the same time must not come back as one.
		return min(atLeast, maxRetryAfter) + b.random(upTo)
	}
	return b.random(upTo)
}

func (b *backOff) reset() { b.tries = 0 }

func randomUpTo(limit time.Duration) time.Duration {
	if limit <= 0 {
		return 0
	}
	return rand.N(limit) //nolint:gosec // jitter is no secret
}
