package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/better-compute/join-operator/agent/state"
	"github.com/better-compute/join-operator/agent/trust"
	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/attestors"
)

// Prover proves what a machine's certificate states about the node's key, which
// may live in a TPM. Without one, a certificate that makes a statement cannot be
// renewed.
type Prover interface {
	// Prove answers a challenge that a pinned key signed for this request.
	Prove(ctx context.Context, c ProofRequest) (proof []byte, err error)
}

// ProofRequest is what a proof answers and is bound to.
type ProofRequest struct {
	Challenge []byte
	// CSRSHA256 is SHA-256 of the DER of the request for the next certificate.
	CSRSHA256 [32]byte
}

// ErrNoProver is returned where the service asks for a proof of the node's key
// and the machine has nothing to prove it with.
var ErrNoProver = errors.New("the certificate states which key the node has, and the service wants that proved anew; this bcd has nothing to prove it with")

func prove(ctx context.Context, p Prover, r *state.Request, challenge []byte) ([]byte, error) {
	if p == nil {
		return nil, ErrNoProver
	}
	proof, err := p.Prove(ctx, ProofRequest{Challenge: challenge, CSRSHA256: r.CSRSHA256()})
	if err != nil {
		return nil, fmt.Errorf("prove the node's key: %w", err)
	}
	return proof, nil
}

// renewQuestion asks for the next certificate by one that is in force.
type renewQuestion struct {
	request *state.Request
	id      *state.Identity
	prover  Prover
}

func (*renewQuestion) path() string { return wire.PathRenew }

func (q *renewQuestion) expects() asked {
	return asked{
		csrSHA256: q.request.CSRSHA256(), publicKey: q.request.Key.Public(), role: q.id.Role,
		challenger: wire.RenewAttestor, attestor: q.id.Attestor, again: q.id,
	}
}

func (q *renewQuestion) prepare(ctx context.Context, challenge []byte) (envelope, error) {
	leaf := q.id.Chain[0]
	signature, err := wire.SignStatement(q.id.Key, wire.RenewStatement(leaf, q.request.CSR))
	if err != nil {
		return nil, err
	}
	renew := wire.Renew{Certificate: leaf, CSR: q.request.CSR, Signature: signature}
	if challenge == nil {
		return func(*trust.Bundle, []byte) ([]byte, error) { return json.Marshal(&renew) }, nil
	}
	proof, err := prove(ctx, q.prover, q.request, challenge)
	if err != nil {
		return nil, err
	}
	plaintext, err := json.Marshal(&wire.Sealed{Evidence: proof})
	if err != nil {
		return nil, err
	}
	return func(b *trust.Bundle, sealedState []byte) ([]byte, error) {
		second := renew
		second.HasSealed, second.State = true, sealedState
		if second.KeyID, second.Sealed, err = b.Seal(wire.RenewAttestor, q.id.Role, q.request.CSR, plaintext); err != nil {
			return nil, err
		}
		return json.Marshal(&second)
	}, nil
}

// certificateProducer makes the evidence of the attestor x509pop from an identity
// of this machine.
type certificateProducer struct {
	request *state.Request
	id      *state.Identity
	prover  Prover
}

func (*certificateProducer) ID() string { return "x509pop" }

func (p *certificateProducer) Produce(ctx context.Context, r attestors.ProduceRequest) (attestors.Produced, error) {
	var none attestors.Produced
	leaf := p.id.Chain[0]
	evidence := wire.X509POP{Certificate: leaf}
	var err error
	if evidence.Signature, err = wire.SignStatement(p.id.Key, wire.X509POPStatement(leaf, r.CSR)); err != nil {
		return none, err
	}
	if r.Challenge != nil {
		if evidence.Proof, err = prove(ctx, p.prover, p.request, r.Challenge); err != nil {
			return none, err
		}
	}
	payload, err := json.Marshal(&evidence)
	return attestors.Produced{Payload: payload}, err
}
