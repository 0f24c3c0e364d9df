package v1alpha1

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
)

// Canonical is the one encoding of what was asked: JSON with the fields in the
// order of the type and map keys sorted. It is what the database keeps.
func (a *JoinRequestAsk) Canonical() ([]byte, error) {
	b, err := json.Marshal(a)
	if err != nil {
		return nil, fmt.Errorf("encode a join request: %w", err)
	}
	return b, nil
}

// Hash is the SHA-256 of [JoinRequestAsk.Canonical]. A decision counts only for
// an object that hashes to its row.
func (a *JoinRequestAsk) Hash() ([32]byte, error) {
	b, err := a.Canonical()
	if err != nil {
		return [32]byte{}, err
	}
	return sha256.Sum256(b), nil
}
