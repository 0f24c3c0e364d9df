// Package wire is version 1 of the join protocol as bytes: the envelope of a
// join, what is sealed inside it, the signed answers, the problems and the join
// bundle, together with the exact strings that keys sign and seal over.
//
// It is what the agent and the service share, and the whole of what somebody
// who writes another machine needs. It holds no keys and does no I/O; see
// docs/protocol for the same in prose with test vectors.
package wire

import "time"

// Protocol is the version that every request and answer of this package carries.
const Protocol = 1

// Caps on what is read before anything has been proved. They are part of the
// protocol: a longer body is answered TOO_LARGE.
const (
	// MaxBody is the largest request body, in bytes.
	MaxBody = 256 << 10
	// MaxAnswer is the largest answer that a machine reads, in bytes.
	MaxAnswer = 1 << 20
)

// Media types and JWS header types (RFC 7515 section 4.1.9).
const (
	MediaTypeJOSE    = "application/jose"
	MediaTypeJSON    = "application/json"
	MediaTypeProblem = "application/problem+json"

	TypeJoin   = "bc-join+jws"
	TypeBundle = "bc-bundle+jws"
)

// Paths of the protocol's endpoints.
const (
	PathJoin      = "/v1/join"
	PathRenew     = "/v1/renew"
	PathConfirm   = "/v1/confirm"
	PathCommands  = "/v1/commands"
	PathBundle    = "/v1/bundle"
	PathRotations = "/v1/bundle/rotations"
	PathCRL       = "/v1/crl"
)

// Role is what a machine asks to be: the role of the certificate it is given.
type Role string

// The roles of protocol 1. A ramdisk is the role of a certificate only; the node
// that it enters has the role RoleNode.
const (
	RoleNode    Role = "node"
	RoleSite    Role = "site"
	RoleRamdisk Role = "ramdisk"
)

// Valid reports whether r is one of the protocol's roles.
func (r Role) Valid() bool { return r == RoleNode || r == RoleSite || r == RoleRamdisk }

// RefusalPace is the grid on which refusals leave: a refusal is sent at the next
// multiple of it after its request came, so that time tells nothing of the reason.
const RefusalPace = 100 * time.Millisecond
