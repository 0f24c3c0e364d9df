package keyring

import (
	"encoding/json"
	"fmt"
	"time"
)

// The Secrets of the keys' namespace and the one item that each holds.
const (
	SigningSecret   = "signing-keys"
	SealingSecret   = "sealing-keys"
	ChallengeSecret = "challenge-keys"
	DataKey         = "keys.json"
)

// The algorithms of the three kinds.
const (
	Ed25519   = "Ed25519"
	HPKE      = "HPKE-MLKEM768-X25519"
	AES256GCM = "AES-256-GCM"
)

// Set is the content of one Secret.
type Set struct {
	Keys []Key `json:"keys"`
}

// Key is one key with its dates: it is loaded, and so can open and verify, as long
// as it is in the Secret; it signs and seals from UseFrom on.
type Key struct {
	ID        string    `json:"kid"`
	Algorithm string    `json:"algorithm"`
	Private   []byte    `json:"private"`
	CreatedAt time.Time `json:"createdAt"`
	UseFrom   time.Time `json:"useFrom"`
	DropAfter time.Time `json:"dropAfter,omitzero"`
}

// ParseSet reads the content of a Secret. Its errors repeat no key.
func ParseSet(data []byte) (Set, error) {
	var s Set
	if err := json.Unmarshal(data, &s); err != nil {
		return Set{}, fmt.Errorf("%s is not of the keys' form", DataKey)
	}
	return s, nil
}
