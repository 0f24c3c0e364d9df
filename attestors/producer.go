package attestors

import "context"

// Producer is an attestor's half on the machine: it makes the evidence that the
// verifier of the same id judges.
type Producer interface {
	// ID is the attestor's id as machines name it.
	ID() string
	// Produce makes the evidence of one round. challenge is nil in a first
	// round; later it is what arrived in an answer that the pinned key signed
	// for this CSR, and only then.
	Produce(ctx context.Context, req ProduceRequest) (Produced, error)
}

// ProduceRequest is what a producer may bind its evidence to.
type ProduceRequest struct {
	Role      Role
	CSR       []byte
	CSRSHA256 [32]byte
	Challenge []byte
}

// Produced is one round's evidence, sealed by the agent before it leaves.
type Produced struct {
	Token   string
	Payload []byte
}
