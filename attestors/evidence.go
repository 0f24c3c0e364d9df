package attestors

import "github.com/better-compute/join-operator/api/wire"

// Evidence is what a machine sent for its attestor to judge.
type Evidence struct {
	// Payload is the attestor's own format, opened from the sealed part. Nobody
	// has checked it.
	Payload []byte
	// State is what the attestor sealed in an earlier round, opened and
	// authenticated by the service; nil in a first round.
	State []byte
}

// Claims is what the machine says of itself; it proves nothing.
type Claims = wire.Claims
