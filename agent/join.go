package agent

import (
	"context"
	"errors"
	"io/fs"
	"time"

	"github.com/better-compute/join-operator/agent/state"
	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/attestors"
)

// JoinOptions is how a machine wants to join.
type JoinOptions struct {
	// Producer makes the evidence; its id is the attestor that is asked for. A
	// machine that has joined needs none.
	Producer attestors.Producer
	Role     wire.Role
	Claims   wire.Claims
	// Outputs get copies of what is stored.
	Outputs state.Outputs
	// Once stops after one exchange, whatever it brings.
	Once bool
	// WaitLimit is for how long to go on; zero goes on until the context ends. A
	// wait that would end later is not begun.
	WaitLimit time.Duration
}

// Joined is a machine that has joined, with everything stored.
type Joined struct {
	Identity *state.Identity
	// Before is true where it had joined before this call.
	Before bool
	// Confirmed is true where the service knows that everything is stored. A
	// machine that could not say so loses nothing.
	Confirmed bool
	// IssuerPinned is false where the issuer is newer than the pinned bundle and
	// only the signed answer vouches for it; always true where Before is.
	IssuerPinned bool
}

// Join asks until the machine has joined. A machine that joined before gets its
// identity back, with outputs written and the confirmation sent where a crash
// left them undone.
//
// With Once or a WaitLimit it may end without: the error then is, or wraps, what
// the last exchange brought: [*PendingError], [*ProblemError], [*UntrustedError]
// or a network's error.
func (m *Machine) Join(ctx context.Context, o JoinOptions) (*Joined, error) {
	if joined, err := m.resume(ctx, o); joined != nil || err != nil {
		return joined, err
	}
	return m.untilJoined(ctx, o, func() (*Joined, error) {
		j, err := m.attempt(ctx, o)
		if err != nil {
			return nil, err
		}
		return m.finish(ctx, o, j)
	})
}

// untilJoined makes attempts, with waits between them.
func (m *Machine) untilJoined(ctx context.Context, o JoinOptions, attempt func() (*Joined, error)) (*Joined, error) {
	began := m.clock.Elapsed()
	back := m.newBackOff()
	for {
		joined, err := attempt()
		if err == nil {
			return joined, nil
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		wait := waitAfter(err, &back)
		m.recordFailure(err, wait)
		if o.Once || o.WaitLimit > 0 && m.clock.Elapsed()+wait-began > o.WaitLimit {
			return nil, err
		}
		m.observe(Waiting{Reason: err, For: wait})
		m.log.Info("waiting", "for", wait.Round(time.Second).String(), "reason", Summary(err))
		if err := m.clock.Sleep(ctx, wait); err != nil {
			return nil, err
		}
	}
}

// resume finishes a join whose identity is stored. It returns neither a result
// nor an error where there is none.
func (m *Machine) resume(ctx context.Context, o JoinOptions) (*Joined, error) {
	id, err := m.state.Identity()
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if !m.now().Before(id.NotAfter) {
		return nil, &ExpiredError{id.NotAfter}
	}
	if err := sameRole(id, o.Role); err != nil {
		return nil, err
	}
	return m.finish(ctx, o, &Joined{Identity: id, Before: true, IssuerPinned: true})
}

// attempt is one exchange, with the identity stored that it brings.
func (m *Machine) attempt(ctx context.Context, o JoinOptions) (*Joined, error) {
	return m.obtain(ctx, &joinQuestion{request: m.request, producer: o.Producer, role: o.Role, claims: o.Claims})
}

// obtain asks, and stores the identity that the answer brings, under the key that
// was asked for.
func (m *Machine) obtain(ctx context.Context, q question) (*Joined, error) {
	a, err := m.exchange(ctx, q)
	if err != nil {
		return nil, err
	}
	// The newest bundle first: what is stored next to the identity comes from it.
	m.followHint(ctx, a.BundleSHA256)
	if a.Outcome == wire.OutcomePending {
		return nil, m.pending(a)
	}
	id, pinned, err := q.expects().identity(a, m.bundle, m.now())
	if err != nil {
		return nil, &UntrustedError{err}
	}
	if !pinned {
		m.log.Warn("the certificate's issuer is newer than the pinned bundle; the signed answer vouches for it", "generation", m.bundle.Generation())
	}
	id.RenewAt = renewalPoint(id.NotBefore, id.NotAfter, m.random)
	if err := m.state.StoreIdentity(id, m.request); err != nil {
		return nil, &LocalError{err}
	}
	return &Joined{Identity: id, IssuerPinned: pinned}, nil
}

// finish writes the outputs, and only when all is stored says so to the service.
func (m *Machine) finish(ctx context.Context, o JoinOptions, j *Joined) (*Joined, error) {
	if err := m.state.WriteOutputs(o.Outputs); err != nil {
		return nil, &LocalError{err}
	}
	p := m.progress()
	p.Settled()
	if p.ConfirmedSHA256 != j.Identity.CertificateSHA256 {
		if err := m.confirm(ctx, j.Identity, o.Once); err != nil {
			m.log.Warn("the service does not know yet that everything is stored; the join stands", "error", err)
		} else {
			p.ConfirmedSHA256 = j.Identity.CertificateSHA256
		}
	}
	j.Confirmed = p.ConfirmedSHA256 == j.Identity.CertificateSHA256
	m.storeProgress(p)
	return j, nil
}

func (m *Machine) pending(a *wire.Answer) *PendingError {
	retry := time.Duration(a.RetryAfterSeconds) * time.Second
	if a.RetryAfterSeconds < 1 {
		retry = backOffBase
	}
	e := &PendingError{JoinRequest: a.JoinRequest, Tenant: a.Tenant, RetryAfter: min(retry, maxRetryAfter)}
	p := m.progress()
	if p.Pending == nil || p.Pending.JoinRequest != e.JoinRequest {
		p.Pending = &state.Pending{JoinRequest: e.JoinRequest, Tenant: e.Tenant, Since: m.clock.Now().UTC().Truncate(time.Second)}
		m.storeProgress(p)
	}
	if m.awaiting != e.JoinRequest {
		m.awaiting = e.JoinRequest
		m.observe(AwaitingDecision{JoinRequest: e.JoinRequest, Tenant: e.Tenant})
	}
	return e
}

// recordFailure keeps why an exchange brought no certificate, for "bcd status".
func (m *Machine) recordFailure(err error, wait time.Duration) {
	p := m.progress()
	now := m.clock.Now().UTC().Truncate(time.Second)
	p.LastTriedAt, p.NextTryAt = now, now.Add(wait)
	p.LastProblem = printable(Summary(err), 500)
	if _, ok := errors.AsType[*PendingError](err); ok {
		p.LastProblem = ""
	}
	m.storeProgress(p)
}

func (m *Machine) progress() state.Progress {
	p, err := m.state.Progress()
	if err != nil {
		m.log.Warn("the progress cannot be read and begins anew", "error", err)
	}
	return p
}

// storeProgress is not worth a join: a full disk may have room again later.
func (m *Machine) storeProgress(p state.Progress) {
	p.ClockOffsetSeconds, p.SignedAt = int64(m.time.offset/time.Second), m.time.signedAt.UTC()
	if err := m.state.StoreProgress(p); err != nil {
		m.log.Warn("the progress was not stored", "error", err)
	}
}
