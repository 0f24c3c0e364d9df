package agent

import (
	"time"

	"github.com/better-compute/join-operator/agent/state"
)

// Event is something that a person who watches a machine would want to see:
// [Waiting], [AwaitingDecision], [ClockWrong], [BundleAdopted], [Admitted],
// [RenewalPlanned], [Confirmed] or [Reloaded].
type Event interface{ event() }

// Waiting says that an exchange brought no certificate, and when the next one
// begins.
type Waiting struct {
	Reason error
	For    time.Duration
	// Identity is what should be renewed; nil before the machine has joined.
	Identity *state.Identity
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
	// ServiceTime is what the answer says.
	ServiceTime time.Time
}

// BundleAdopted says that a signed rotation led to a newer bundle.
type BundleAdopted struct{ Generation int }

// Way is how a certificate was got.
type Way string

// The ways to a certificate.
const (
	// ByJoin is the evidence that a machine was given.
	ByJoin Way = "join"
	// ByRenewal is the certificate before it, in force.
	ByRenewal Way = "renewal"
	// ByRejoin is the certificate before it, run out (the attestor x509pop).
	ByRejoin Way = "rejoin"
)

// Admitted says that an identity is stored and in force.
type Admitted struct {
	Identity *state.Identity
	Way      Way
}

// RenewalPlanned says when the certificate in force will be renewed, by the
// service's time.
type RenewalPlanned struct {
	At time.Time
	In time.Duration
}

// Confirmed says that the service knows that everything is stored.
type Confirmed struct{}

// Reloaded says how the reload command ended.
type Reloaded struct{ Err error }

func (Waiting) event()          {}
func (AwaitingDecision) event() {}
func (ClockWrong) event()       {}
func (BundleAdopted) event()    {}
func (Admitted) event()         {}
func (RenewalPlanned) event()   {}
func (Confirmed) event()        {}
func (Reloaded) event()         {}
