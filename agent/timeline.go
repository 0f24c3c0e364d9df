package agent

import (
	"slices"
	"time"

	"github.com/better-compute/join-operator/agent/state"
)

// timeline is what a machine takes for the time. Its clock may be wrong by years;
// what the service signed is not, and from there time runs evenly.
type timeline struct {
	clock Clock
	// signedAt is the latest time that was signed, and heardAt when, by
	// Clock.Elapsed, it was heard of.
	signedAt time.Time
	heardAt  time.Duration
	// fresh is true where the service said it to this process. Otherwise it comes
	// from the disk or from the bundle, and only bounds the time from below.
	fresh bool
	// offset is how far the clock was ahead when the service last spoke.
	offset time.Duration
	// said is the offset that a person was last told of.
	said time.Duration
}

// newTimeline goes on from what is on disk.
func newTimeline(c Clock, p state.Progress, bundleIssuedAt time.Time) *timeline {
	t := &timeline{clock: c, signedAt: p.SignedAt, heardAt: c.Elapsed(), offset: time.Duration(p.ClockOffsetSeconds) * time.Second}
	t.notBefore(bundleIssuedAt)
	return t
}

// notBefore takes in that something was signed at a time, with no word of when.
func (t *timeline) notBefore(signed time.Time) {
	if signed.After(t.atLeast()) {
		t.signedAt, t.heardAt = signed, t.clock.Elapsed()
	}
}

// heard takes in the time of an answer that came just now. One that is older than
// what was heard before is shown again by somebody, and turns nothing back.
func (t *timeline) heard(issuedAt time.Time) {
	least := t.atLeast()
	if issuedAt.Before(least.Add(-clockTolerance)) {
		return
	}
	t.offset = t.clock.Now().Sub(issuedAt)
	t.signedAt, t.heardAt, t.fresh = later(issuedAt, least), t.clock.Elapsed(), true
}

// atLeast is the earliest that it can be.
func (t *timeline) atLeast() time.Time { return t.signedAt.Add(t.clock.Elapsed() - t.heardAt) }

// now is the time to judge certificates by: the later of the clock and what was
// signed, but not a clock that the service has shown to be wrong.
func (t *timeline) now() time.Time {
	least, clock := t.atLeast(), t.clock.Now().Round(0)
	if t.fresh {
		if clock.Sub(least).Abs() > clockTolerance {
			return least
		}
		return later(least, clock)
	}
	return estimate(clock, t.offset, least)
}

// otherwise is another view of the time, which differs from now where the clock
// stepped since the service last spoke: it was set, or the machine stood still
// without noticing, as a virtual machine does that is restored.
func (t *timeline) otherwise() time.Time {
	clock := t.clock.Now().Round(0)
	if t.fresh {
		return later(clock.Add(-t.offset), t.atLeast())
	}
	return later(clock, t.atLeast())
}

// estimate is the time before the service has spoken: the clock, less what it was
// last ahead by, as long as that is not before what was signed. A clock that was
// set right meanwhile is told by that it would be too early otherwise.
func estimate(clock time.Time, offset time.Duration, least time.Time) time.Time {
	candidates := []time.Time{clock}
	if offset.Abs() > clockTolerance {
		candidates = append(candidates, clock.Add(-offset))
	}
	slices.SortFunc(candidates, time.Time.Compare)
	for _, c := range candidates {
		if !c.Before(least) {
			return c
		}
	}
	return least
}

// Now is what a machine with this progress takes for the time while its clock
// shows clock.
func Now(clock time.Time, p state.Progress) time.Time {
	return estimate(clock, time.Duration(p.ClockOffsetSeconds)*time.Second, p.SignedAt)
}

// news is the offset to tell a person of, if there is something new to tell.
func (t *timeline) news() (ahead time.Duration, tell bool) {
	if (t.offset - t.said).Abs() <= clockTolerance {
		return 0, false
	}
	t.said = t.offset
	return t.offset, t.offset.Abs() > clockTolerance
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
