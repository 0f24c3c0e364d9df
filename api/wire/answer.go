package wire

import "time"

// Outcome is what a signed answer says.
type Outcome string

// The outcomes of protocol 1. Only OutcomeJoined is a join.
const (
	OutcomeJoined    Outcome = "joined"
	OutcomePending   Outcome = "pending"
	OutcomeChallenge Outcome = "challenge"
)

// Answer is the payload of a 200 answer to a join or a renewal: a compact JWS
// (RFC 7515) with alg EdDSA and typ [TypeJoin]. Which fields are set depends on
// Outcome. Machines ignore fields that they do not know.
type Answer struct {
	Protocol int `json:"protocol"`
	// CSRSHA256 is lower-case hex: the request that this answers.
	CSRSHA256 string  `json:"csrSHA256"`
	Outcome   Outcome `json:"outcome"`
	// IssuedAt is the database's time, by which a machine notices a wrong clock.
	IssuedAt time.Time `json:"issuedAt"`
	// BundleSHA256 is lower-case hex of the newest bundle's bytes: a hint to walk.
	BundleSHA256 string `json:"bundleSHA256,omitempty"`

	NodeID string `json:"nodeID,omitempty"`
	Tenant string `json:"tenant,omitempty"`
	Site   string `json:"site,omitempty"`
	Pool   string `json:"pool,omitempty"`
	Role   Role   `json:"role,omitempty"`
	// Certificates is the leaf and its issuer, DER in base64 (RFC 4648 section 4).
	Certificates []string `json:"certificates,omitempty"`
	// AllowedKinds is absent where the certificate restricts nothing; an empty
	// list allows nothing.
	AllowedKinds *[]string  `json:"allowedKinds,omitempty"`
	NotAfter     *time.Time `json:"notAfter,omitempty"`

	JoinRequest       string `json:"joinRequest,omitempty"`
	RetryAfterSeconds int    `json:"retryAfterSeconds,omitempty"`

	Attestor  string `json:"attestor,omitempty"`
	Challenge string `json:"challenge,omitempty"`
	State     string `json:"state,omitempty"`
}
