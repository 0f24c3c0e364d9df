package trust

import (
	"bytes"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/go-jose/go-jose/v4"
	kjson "sigs.k8s.io/json"
)

// ErrUnknownKey is returned for a signature by a key that the pinned bundle does
// not list. There may be a newer bundle that does.
var ErrUnknownKey = errors.New("signed by a key that the pinned bundle does not list")

// keySet is Ed25519 keys by key id.
type keySet map[string]ed25519.PublicKey

// parseKeySet reads a JWK set of Ed25519 keys (RFC 7517, RFC 8037). Keys of other
// kinds are skipped, so that a later protocol may add some.
func parseKeySet(raw json.RawMessage) (keySet, error) {
	var set jose.JSONWebKeySet
	if err := json.Unmarshal(raw, &set); err != nil {
		return nil, err
	}
	keys := keySet{}
	for _, k := range set.Keys {
		pub, ok := k.Key.(ed25519.PublicKey)
		if !ok {
			continue
		}
		if k.KeyID == "" {
			return nil, errors.New("a key has no kid")
		}
		if _, twice := keys[k.KeyID]; twice {
			return nil, fmt.Errorf("two keys have the kid %q", k.KeyID)
		}
		keys[k.KeyID] = pub
	}
	if len(keys) == 0 {
		return nil, errors.New("no Ed25519 key")
	}
	return keys, nil
}

// open verifies a compact JWS (RFC 7515 section 7.1) whose header has alg EdDSA,
// the type and a kid of the set, and returns its payload.
func (s keySet) open(typ string, compact []byte) ([]byte, error) {
	jws, err := jose.ParseSignedCompact(string(compact), []jose.SignatureAlgorithm{jose.EdDSA})
	if err != nil {
		return nil, fmt.Errorf("not a compact JWS with alg EdDSA: %w", err)
	}
	header := jws.Signatures[0].Protected
	if got, _ := header.ExtraHeaders[jose.HeaderType].(string); got != typ {
		return nil, fmt.Errorf("the JWS has typ %q, not %q", got, typ)
	}
	if _, critical := header.ExtraHeaders["crit"]; critical {
		return nil, errors.New("the JWS has a critical header that this protocol does not know")
	}
	if header.KeyID == "" {
		return nil, errors.New("the JWS has no kid")
	}
	key, ok := s[header.KeyID]
	if !ok {
		return nil, fmt.Errorf("%w (kid %.64q)", ErrUnknownKey, header.KeyID)
	}
	payload, err := jws.Verify(key)
	if err != nil {
		return nil, fmt.Errorf("the signature does not verify (kid %q)", header.KeyID)
	}
	return payload, nil
}

// decode reads signed JSON by exact names and without doubled ones. Unknown names
// are ignored: later services may add some.
func decode(payload []byte, v any) error {
	strict, err := kjson.UnmarshalStrict(bytes.TrimSpace(payload), v, kjson.DisallowDuplicateFields)
	if err != nil {
		return err
	}
	return errors.Join(strict...)
}
