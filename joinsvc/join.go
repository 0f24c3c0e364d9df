package joinsvc

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"runtime/debug"
	"time"

	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/attestors"
	"github.com/better-compute/join-operator/attestors/hardware"
	"github.com/better-compute/join-operator/attestors/jointoken"
	"github.com/better-compute/join-operator/joinsvc/pki"
)

// challengePurpose is what the keyring seals a challenge's state for.
const challengePurpose = "challenge"

// ask is one round of one join as it came, opened.
type ask struct {
	wire     *wire.Join
	attestor *attestors.Attestor
	csr      *pki.CSR
	sealed   *wire.Sealed
	state    []byte
	// tokenID is the public part of the sealed token; empty where there is none or
	// its text is none.
	tokenID  string
	prepared any
	source   string
}

func (a *ask) evidence() attestors.Evidence {
	return attestors.Evidence{Payload: a.sealed.Evidence, State: a.state}
}

// refuse says of whom a refusal speaks.
func (a *ask) refuse(r *attestors.Refusal) *RefusedJoin {
	claimed, _ := hardware.KeyHash(a.sealed.Claims.HardwareKeySHA256)
	return &RefusedJoin{
		Refusal: r, Attestor: a.attestor.ID(), CSRSHA256: a.csr.SHA256, HardwareKeySHA256: claimed, TokenID: a.tokenID,
	}
}

// Join answers one round: source is the machine's address as the gateway saw it.
// The answer is not signed yet. Its errors are a *[RefusedJoin], a *[Problem], or
// anything else, which is a bug or an outage that nobody foresaw (INTERNAL).
func (s *Service) Join(ctx context.Context, j *wire.Join, source netip.Addr) (*wire.Answer, error) {
	start := time.Now()
	a, err := s.open(j, source)
	var answer *wire.Answer
	if err == nil {
		err = s.prepare(ctx, a)
	}
	if err == nil {
		answer, err = s.decide(ctx, a)
	}
	s.metrics.joined(a, answer, err, time.Since(start))
	var refused *RefusedJoin
	if errors.As(err, &refused) && s.cfg.OnRefusal != nil {
		s.cfg.OnRefusal(refused.Attestor, refused.Refusal.Reason)
	}
	return answer, err
}

// open checks in the protocol's order all that needs no database. It returns the
// ask as far as it came.
func (s *Service) open(j *wire.Join, source netip.Addr) (*ask, error) {
	a := &ask{wire: j, sealed: &wire.Sealed{}, source: sourceKey(source)}
	var err error
	if a.csr, err = pki.ParseCSR(j.CSR); err != nil {
		return a, &Problem{Code: wire.InvalidInput, Detail: "csr: " + err.Error()}
	}
	attestor, known := s.registry.Find(j.Attestor)
	if !known {
		return a, &Problem{Code: wire.Unsupported}
	}
	a.attestor = attestor
	if !attestor.Admits(j.Role) {
		return a, a.refuse(attestors.Refuse("role-not-listed").
			Because("the attestor %s does not admit the role %s", attestor.ID(), j.Role))
	}
	if j.HasSealed {
		if err := s.unseal(a); err != nil {
			return a, err
		}
	}
	if j.State != nil {
		a.state, err = s.cfg.Keys.OpenState(challengePurpose, stateAAD(a), j.State)
		if err != nil {
			return a, a.refuse(attestors.Refuse("state").
				Because("the state is no answer to a challenge of this attestor for this CSR, or too old"))
		}
	}
	return a, nil
}

func (s *Service) unseal(a *ask) error {
	j := a.wire
	if !s.cfg.Keys.Knows(j.KeyID) {
		return &Problem{Code: wire.StaleBundle}
	}
	plaintext, err := s.cfg.Keys.Open(j.KeyID, wire.SealAAD(j.Attestor, j.Role, j.CSR), j.Sealed)
	if err != nil {
		if !s.cfg.Keys.Knows(j.KeyID) { // dropped just now
			return &Problem{Code: wire.StaleBundle}
		}
		return a.refuse(attestors.Refuse("sealed").
			Because("the sealed part does not open: it was changed, or sealed for another CSR, attestor or role"))
	}
	sealed, err := wire.DecodeSealed(plaintext)
	if err != nil {
		return a.refuse(attestors.Refuse("sealed-form").Because("the sealed part is not of the protocol's form"))
	}
	a.sealed = sealed
	if token, err := jointoken.Parse(sealed.Token); err == nil {
		a.tokenID = token.ID
	}
	return nil
}

// stateAAD binds a challenge's state to the join that it was handed out in.
func stateAAD(a *ask) []byte {
	return fmt.Appendf(nil, "%s\x00%s\x00%s\x00%s", a.attestor.ID(), a.attestor.Version(), a.wire.Role, a.csr.SHA256[:])
}

// prepare runs the attestor's I/O. One that ignores its deadline is left behind:
// it holds no transaction.
func (s *Service) prepare(ctx context.Context, a *ask) error {
	if !a.attestor.Prepares() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, prepareTimeout)
	defer cancel()
	type result struct {
		prepared any
		err      error
	}
	done := make(chan result, 1)
	go func() {
		var r result
		defer func() {
			if p := recover(); p != nil {
				r.err = panicError(a, p)
			}
			done <- r
		}()
		r.prepared, r.err = a.attestor.Prepare(ctx, a.evidence(), &attestors.PrepareContext{
			Role: a.wire.Role, CSRSHA256: a.csr.SHA256, PublicKey: a.csr.PublicKey, Claims: a.sealed.Claims,
		})
	}()
	select {
	case r := <-done:
		if refusal, ok := attestors.AsRefusal(r.err); ok {
			return a.refuse(refusal)
		}
		a.prepared = r.prepared
		return failure(a, r.err)
	case <-ctx.Done():
		return failure(a, ctx.Err())
	}
}

// verify runs the attestor inside the transaction.
func (s *Service) verify(ctx context.Context, a *ask, jc *attestors.JoinContext) (out attestors.Outcome, err error) {
	defer func() {
		if p := recover(); p != nil {
			out, err = nil, panicError(a, p)
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, verifyTimeout)
	defer cancel()
	out, err = a.attestor.Verify(ctx, a.evidence(), jc)
	if refusal, ok := attestors.AsRefusal(err); ok {
		return nil, a.refuse(refusal)
	}
	if err == nil && out == nil {
		err = errors.New("it returned neither an outcome nor an error")
	}
	return out, failure(a, err)
}

// failure is what an attestor's error is that is no refusal: a deadline is an
// outage, everything else a bug. Either fails this one join only.
func failure(a *ask, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return unavailable(fmt.Errorf("attestor %s: %w", a.attestor.ID(), err))
	}
	return fmt.Errorf("attestor %s failed: %w", a.attestor.ID(), err)
}

// panicError keeps the values of panics out of the log but for the runtime's own:
// others may quote evidence.
func panicError(a *ask, p any) error {
	if _, ok := p.(runtime.Error); !ok {
		p = fmt.Sprintf("a value of type %T", p)
	}
	return fmt.Errorf("attestor %s panicked: %v\n%s", a.attestor.ID(), p, debug.Stack())
}

// sourceKey is what the caps count a machine's address by: an IPv4 address, or
// the /64 of an IPv6 one.
func sourceKey(addr netip.Addr) string {
	addr = addr.Unmap().WithZone("")
	if !addr.IsValid() {
		return ""
	}
	if addr.Is4() {
		return addr.String()
	}
	prefix, err := addr.Prefix(64)
	if err != nil {
		return ""
	}
	return prefix.String()
}
