package attestors

import (
	"context"
	"strings"
	"time"
)

// Verdict is how one verification ended, as a [Meter] counts it.
type Verdict string

// The verdicts. A refusal is not a failure: a failed verification is a bug or an
// outage.
const (
	VerdictAdmitted          Verdict = "admitted"
	VerdictDeferredPending   Verdict = "deferred-pending"
	VerdictDeferredChallenge Verdict = "deferred-challenge"
	VerdictRefused           Verdict = "refused"
	VerdictFailed            Verdict = "failed"
)

// Meter observes verifications. It is called by many joins at once.
type Meter interface {
	// Verified is told of each verification and how long it took.
	Verified(attestor string, v Verdict, took time.Duration)
	// Refused is told the reason of each refusal.
	Refused(attestor, reason string)
}

// Metered wraps an attestor so that a meter sees each of its verifications. It
// changes nothing else: id, type, version, roles, outcomes and errors, panics
// too, are those of the wrapped one.
func Metered(a *Attestor, m Meter) *Attestor {
	s := a.Spec()
	s.Verify = func(ctx context.Context, ev Evidence, jc *JoinContext) (out Outcome, err error) {
		start := time.Now()
		verdict := VerdictFailed
		defer func() { m.Verified(s.ID, verdict, time.Since(start)) }()
		out, err = a.spec.Verify(ctx, ev, jc) // not a.Verify: OnRefusal is told once
		if err != nil {
			if r, ok := AsRefusal(err); ok {
				verdict = VerdictRefused
				m.Refused(s.ID, r.Reason)
			}
			return out, err
		}
		switch out.(type) {
		case *Admit:
			verdict = VerdictAdmitted
		case *Pending:
			verdict = VerdictDeferredPending
		case *Challenge:
			verdict = VerdictDeferredChallenge
		}
		return out, nil
	}
	return &Attestor{spec: s}
}

// Deferred reports whether a verdict is that of a round which decides nothing.
func (v Verdict) Deferred() bool { return strings.HasPrefix(string(v), "deferred-") }
