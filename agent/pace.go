package agent

import (
	"errors"
	"math/rand/v2"
	"time"
)

// Waits.
const (
	backOffBase = 15 * time.Second
	backOffMax  = time.Hour
	// maxRetryAfter caps what an unsigned answer can ask for.
	maxRetryAfter = time.Hour
	// spreadLeast and spreadMost bound the time over which machines spread that
	// find themselves late, as a whole fleet does after a power cut.
	spreadLeast = 5 * time.Minute
	spreadMost  = time.Hour
	// punctual is how late a renewal may be without being late.
	punctual = time.Minute
	// lookAgain is the most that a machine sleeps before it looks at the time again:
	// clocks are set, and suspended machines sleep longer than they meant to.
	lookAgain = 10 * time.Minute
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

// renewalPoint is a random point between 50% and 75% of a certificate's lifetime.
func renewalPoint(notBefore, notAfter time.Time, random func(time.Duration) time.Duration) time.Time {
	life := notAfter.Sub(notBefore)
	return notBefore.Add(life/2 + random(life/4)).Truncate(time.Second)
}

// spreadLate is how long a machine waits that finds its renewal overdue, though
// it did nothing wrong: whatever kept it may have kept the whole fleet. left is
// how long its certificate still runs, negative where it ran out.
func spreadLate(left time.Duration, random func(time.Duration) time.Duration) time.Duration {
	return random(min(max(left/4, spreadLeast), spreadMost))
}

// waitAfter is as long as a signed answer says, or a back-off.
func waitAfter(err error, back *backOff) time.Duration {
	if p, ok := errors.AsType[*PendingError](err); ok {
		back.reset()
		return p.RetryAfter + back.random(p.RetryAfter/10+1)
	}
	return back.next(asksToWait(err))
}

// asksToWait is the longest Retry-After in an error.
func asksToWait(err error) time.Duration {
	switch e := err.(type) { //nolint:errorlint // it walks the tree itself, to take the longest
	case *ProblemError:
		return e.RetryAfter
	case interface{ Unwrap() []error }:
		var longest time.Duration
		for _, sub := range e.Unwrap() {
			longest = max(longest, asksToWait(sub))
		}
		return longest
	case interface{ Unwrap() error }:
		return asksToWait(e.Unwrap())
	default:
		return 0
	}
}

func randomUpTo(limit time.Duration) time.Duration {
	if limit <= 0 {
		return 0
	}
	return rand.N(limit) //nolint:gosec // jitter is no secret
}

func (m *Machine) newBackOff() backOff {
	return backOff{base: backOffBase, limit: backOffMax, random: m.random}
}
