package keyring

import (
	"encoding/hex"
	"fmt"
)

// A sealed state is stateVersion || key id (8 bytes) || nonce (12) || AES-256-GCM
// ciphertext. Purpose and version are part of the associated data, so that what
// was sealed for one purpose never opens for another.
const (
	stateVersion = 1
	stateLabel   = "bc-state/v1"
	kidSize      = 8
	stateHeader  = 1 + kidSize
)

// SealState seals what a machine carries to the next round. aad is what else it is
// bound to. It returns ErrNoKey while there is no challenge key.
func (r *Keyring) SealState(purpose string, aad, plaintext []byte) ([]byte, error) {
	k := r.challenge.Load().current(r.now())
	if k == nil {
		return nil, ErrNoKey
	}
	kid, err := hex.DecodeString(k.KeyID)
	if err != nil || len(kid) != kidSize {
		return nil, fmt.Errorf("challenge key %s: its id is not %d bytes in hexadecimal", k.KeyID, kidSize)
	}
	out := make([]byte, 0, stateHeader+len(plaintext)+k.state.Overhead())
	out = append(append(out, stateVersion), kid...)
	return k.state.Seal(out, nil, plaintext, stateAAD(purpose, aad)), nil //nolint:gosec // this AEAD makes its own nonce
}

// OpenState opens a state that was sealed for the same purpose and aad by any key
// that is still loaded. Its error is ErrSealed, whatever was wrong.
func (r *Keyring) OpenState(purpose string, aad, sealed []byte) ([]byte, error) {
	if len(sealed) < stateHeader || sealed[0] != stateVersion {
		return nil, ErrSealed
	}
	k := r.challenge.Load().find(hex.EncodeToString(sealed[1:stateHeader]), r.now())
	if k == nil {
		return nil, ErrSealed
	}
	plaintext, err := k.state.Open(nil, nil, sealed[stateHeader:], stateAAD(purpose, aad))
	if err != nil {
		return nil, ErrSealed
	}
	return plaintext, nil
}

func stateAAD(purpose string, aad []byte) []byte {
	return fmt.Appendf(nil, "%s\x00%s\x00%s", stateLabel, purpose, aad)
}
