package keyring

import (
	"fmt"

	"github.com/go-jose/go-jose/v4"
)

// Signer makes compact JWS (RFC 7515 section 7.1) with alg EdDSA (RFC 8037), typ
// and kid in the protected header.
type Signer struct{ signer jose.Signer }

// NewSigner makes a signer of one key and one typ.
func NewSigner(k Key, typ string) (*Signer, error) {
	private, err := k.ed25519Private()
	if err != nil {
		return nil, fmt.Errorf("signing key %s: %w", k.KeyID, err)
	}
	s, err := jose.NewSigner(
		jose.SigningKey{Algorithm: jose.EdDSA, Key: jose.JSONWebKey{Key: private, KeyID: k.KeyID}},
		(&jose.SignerOptions{}).WithType(jose.ContentType(typ)))
	if err != nil {
		return nil, fmt.Errorf("signing key %s: %w", k.KeyID, err)
	}
	return &Signer{s}, nil
}

// Sign signs a payload.
func (s *Signer) Sign(payload []byte) (string, error) {
	jws, err := s.signer.Sign(payload)
	if err != nil {
		return "", fmt.Errorf("sign: %w", err)
	}
	return jws.CompactSerialize()
}

// Sign signs a payload with the current signing key, as a compact JWS whose
// protected header has the typ and the key's id. It returns ErrNoKey while there
// is none.
func (r *Keyring) Sign(typ string, payload []byte) (string, error) {
	k := r.signing.Load().current(r.now())
	if k == nil {
		return "", ErrNoKey
	}
	s, ok := k.signers.Load(typ)
	if !ok {
		made, err := NewSigner(k.Key, typ)
		if err != nil {
			return "", err
		}
		s, _ = k.signers.LoadOrStore(typ, made)
	}
	return s.(*Signer).Sign(payload)
}
