package attestors

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"

	"github.com/better-compute/join-operator/api/wire"
)

// Role is what a machine asks to join as.
type Role = wire.Role

// The roles that an attestor may list.
const (
	RoleNode    = wire.RoleNode
	RoleSite    = wire.RoleSite
	RoleRamdisk = wire.RoleRamdisk
)

// VerifyFunc decides one round of one join. It runs inside the join's transaction
// and does SQL and computation only; whatever waits for a network belongs in
// [PrepareFunc].
type VerifyFunc func(ctx context.Context, ev Evidence, jc *JoinContext) (Outcome, error)

// PrepareFunc does an attestor's I/O before any transaction is open, within
// five seconds. What it returns is given to Verify as [JoinContext].Prepared.
type PrepareFunc func(ctx context.Context, ev Evidence, pc *PrepareContext) (any, error)

// Spec is what the author of an attestor hands to [Define].
type Spec struct {
	// ID is what machines name, at most 40 characters of [a-z0-9-], beginning
	// with a letter.
	ID string
	// Type is what uses, bindings and approvals are kept by, so that a second
	// configuration or a rename admits nothing twice. Empty takes the ID.
	Type string
	// Version is the attestor's own, recorded with each join; 1 to 32 characters.
	Version string
	// Roles are those that the attestor may admit. A join for another role is
	// refused before Verify runs.
	Roles   []Role
	Prepare PrepareFunc
	Verify  VerifyFunc
	// OnRefusal, where set, is told the reason of each refusal that Prepare or
	// Verify returns, for metrics. It is called by many joins at once and must not
	// block.
	OnRefusal func(reason string)
}

// Attestor is a checked and frozen [Spec]. Its zero value is no attestor.
type Attestor struct {
	spec Spec
}

var idPattern = regexp.MustCompile(`^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$`)

// reserved are ids that mean something else where an attestor's id stands:
// refusals of the service's own, renewals, and joins that name none.
var reserved = []string{"join", "renew", "none"}

// Define checks a spec and freezes a copy of it: later changes of the caller's
// slices change nothing.
func Define(s Spec) (*Attestor, error) {
	switch {
	case !idPattern.MatchString(s.ID):
		return nil, fmt.Errorf("attestor id %q does not match %s", s.ID, idPattern)
	case slices.Contains(reserved, s.ID):
		return nil, fmt.Errorf("attestor id %q is the service's own", s.ID)
	case s.Type != "" && !idPattern.MatchString(s.Type):
		return nil, fmt.Errorf("attestor %s: type %q does not match %s", s.ID, s.Type, idPattern)
	case s.Version == "" || len(s.Version) > 32:
		return nil, fmt.Errorf("attestor %s: version must have 1 to 32 characters", s.ID)
	case len(s.Roles) == 0:
		return nil, fmt.Errorf("attestor %s: lists no role", s.ID)
	case s.Verify == nil:
		return nil, fmt.Errorf("attestor %s: %w", s.ID, errNoVerifier)
	}
	if s.Type == "" {
		s.Type = s.ID
	}
	s.Roles = slices.Clone(s.Roles)
	for i, r := range s.Roles {
		if !r.Valid() {
			return nil, fmt.Errorf("attestor %s: unknown role %q", s.ID, r)
		}
		if slices.Contains(s.Roles[:i], r) {
			return nil, fmt.Errorf("attestor %s: role %q is listed twice", s.ID, r)
		}
	}
	return &Attestor{spec: s}, nil
}

var errNoVerifier = errors.New("has no verifier")

// ID is the name that machines ask for.
func (a *Attestor) ID() string { return a.spec.ID }

// Type is what the attestor's uses, bindings and approvals are kept by.
func (a *Attestor) Type() string { return a.spec.Type }

// Version is the attestor's own version.
func (a *Attestor) Version() string { return a.spec.Version }

// Roles is a copy of the roles that the attestor may admit.
func (a *Attestor) Roles() []Role { return slices.Clone(a.spec.Roles) }

// Spec is a copy of what the attestor was defined by, for who defines another one
// around it:
//
//	s := a.Spec()
//	s.Verify = stricter(s.Verify)
//	b, err := attestors.Define(s)
func (a *Attestor) Spec() Spec {
	s := a.spec
	s.Roles = slices.Clone(s.Roles)
	return s
}

// Admits reports whether the attestor lists the role.
func (a *Attestor) Admits(r Role) bool { return slices.Contains(a.spec.Roles, r) }

// Prepares reports whether the attestor has I/O to do before the transaction.
func (a *Attestor) Prepares() bool { return a.spec.Prepare != nil }

// Prepare runs the attestor's I/O, if it has any.
func (a *Attestor) Prepare(ctx context.Context, ev Evidence, pc *PrepareContext) (any, error) {
	if a.spec.Prepare == nil {
		return nil, nil
	}
	prepared, err := a.spec.Prepare(ctx, ev, pc)
	a.told(err)
	return prepared, err
}

// Verify runs one round.
func (a *Attestor) Verify(ctx context.Context, ev Evidence, jc *JoinContext) (Outcome, error) {
	out, err := a.spec.Verify(ctx, ev, jc)
	a.told(err)
	return out, err
}

func (a *Attestor) told(err error) {
	if a.spec.OnRefusal == nil {
		return
	}
	if r, ok := AsRefusal(err); ok {
		a.spec.OnRefusal(r.Reason)
	}
}
