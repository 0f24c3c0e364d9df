package attestors

import "time"

// Outcome is what a verifier returns: [*Admit], [*Pending] or [*Challenge].
type Outcome interface{ outcome() }

// Admit says that the machine may join, and as which node. The service checks
// the rest (the tenant, the pool, expectations, bindings, approvals) itself.
type Admit struct {
	// Subject is what the evidence proved to be joining, in the attestor type's
	// own encoding. Uses, bindings and approvals are kept by its SHA-256.
	Subject []byte
	// SubjectProved is true where the evidence proves the subject, not merely
	// names it: only then may a new CSR supersede an undecided older request.
	SubjectProved bool

	Tenant, Pool, Site string
	// Role must be the role that was asked for.
	Role Role
	// NodeID is set to reclaim that node.
	NodeID string
	// TokenID is set where a token admits the machine; one use of it is spent.
	TokenID string
	// Use, where set, may be used once for ever, or until its expiry.
	Use *Use
	// Bind, where set, is 32 bytes that tie a subject to this node for good.
	Bind []byte
	// HardwareKey, where set, is the SHA-256 of a hardware key that the evidence proved.
	HardwareKey []byte
	// NodeKeyURI is a statement about the node's key that the service can prove
	// at every renewal; leave it empty unless it is a urn:bc:tpm-ak.
	NodeKeyURI string
	// AllowedKinds is nil where the certificate does not restrict commands.
	AllowedKinds []string
	// Facts is what was proved, in digests and labels, never evidence: at most
	// 32, values of at most 256 printable ASCII characters.
	Facts map[string]string
	// Verified is what rules may speak of besides Facts: values of the variables
	// that the attestor's type declares (package rules), all of them proved. It is
	// neither stored nor shown.
	Verified map[string]any
}

// Use is evidence that admits one join.
type Use struct {
	// Subject is 32 bytes: the SHA-256 of what may be used once.
	Subject []byte
	// ExpiresAt is when the evidence can no longer be presented; zero keeps the
	// use for ever.
	ExpiresAt time.Time
}

// Pending says that the machine must come again with the same CSR because a
// person has to decide. The service adds what pools ask for by themselves.
type Pending struct {
	// Would is what approval would admit.
	Would *Admit
}

// Challenge says that the machine must answer Data in a second round.
type Challenge struct {
	// Data is the attestor's own format, read by the producer of the same id.
	Data []byte
	// State is what the second round must bring back. The service seals it,
	// bound to the CSR, the role and the attestor.
	State []byte
}

func (*Admit) outcome()     {}
func (*Pending) outcome()   {}
func (*Challenge) outcome() {}
