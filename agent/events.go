package agent

import "time"

// Event is something that a person who watches a machine join would want to see:
// [Waiting], [AwaitingDecision], [ClockWrong] or [BundleAdopted].
type Event interface{ event() }

// Waiting says that an exchange brought no join, and when the next one begins.
type Waiting struct {
	Reason error
	For    time.Duration
}

// AwaitingDecision says that a person has to decide a JoinRequest. It comes once
// for each request.
type AwaitingDecision struct {
	JoinRequest string
	// Tenant is the request's namespace where the answer named it.
	Tenant string
}

// ClockWrong says that this machine's clock is far off, by a signed answer.
type ClockWrong struct {
	// Ahead is negative where the clock lags.
	Ahead time.Duration
}

// BundleAdopted says that a signed rotation led to a newer bundle.
type BundleAdopted struct{ Generation int }

func (Waiting) event()          {}
func (AwaitingDecision) event() {}
func (ClockWrong) event()       {}
func (BundleAdopted) event()    {}
