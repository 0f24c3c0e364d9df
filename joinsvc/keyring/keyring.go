package keyring

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/ed25519"
	"crypto/hpke"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/go-jose/go-jose/v4"

	"github.com/better-compute/join-operator/api/wire"
)

// ErrUnknownKey is returned for a key id that no loaded key has.
var ErrUnknownKey = errors.New("no key with that id is loaded")

// ErrNoKey is returned while no key of the kind that is needed is in use.
var ErrNoKey = errors.New("no key of this kind is in use yet")

// errOpen says no more, on purpose.
var errOpen = errors.New("does not open")

// Keyring is the live set of keys. Its zero value has none; Load fills it.
type Keyring struct {
	keys atomic.Pointer[keys]
	// Clock tells when a key comes into use; nil is time.Now.
	Clock func() time.Time
}

type keys struct {
	signing   []signingKey
	sealing   map[string]hpke.PrivateKey
	challenge []challengeKey
	ids       []string
}

type signingKey struct {
	id      string
	useFrom time.Time
	signers map[string]jose.Signer // by typ
}

type challengeKey struct {
	id      string
	useFrom time.Time
	aead    cipher.AEAD
}

// Load replaces the keys. A set that cannot be used is an error, and nothing is
// replaced then.
func (k *Keyring) Load(signing, sealing, challenge Set) error {
	next := &keys{sealing: map[string]hpke.PrivateKey{}}
	for _, s := range signing.Keys {
		if s.Algorithm != Ed25519 || len(s.Private) != ed25519.SeedSize {
			return fmt.Errorf("signing key %s is no Ed25519 seed", s.ID)
		}
		key := signingKey{id: s.ID, useFrom: s.UseFrom, signers: map[string]jose.Signer{}}
		for _, typ := range []string{wire.TypeJoin} {
			signer, err := jose.NewSigner(
				jose.SigningKey{Algorithm: jose.EdDSA, Key: jose.JSONWebKey{Key: ed25519.NewKeyFromSeed(s.Private), KeyID: s.ID}},
				(&jose.SignerOptions{}).WithType(jose.ContentType(typ)))
			if err != nil {
				return fmt.Errorf("signing key %s: %w", s.ID, err)
			}
			key.signers[typ] = signer
		}
		next.signing = append(next.signing, key)
		next.ids = append(next.ids, s.ID)
	}
	for _, s := range sealing.Keys {
		if s.Algorithm != HPKE {
			return fmt.Errorf("sealing key %s is of the unknown kind %q", s.ID, s.Algorithm)
		}
		key, err := hpke.MLKEM768X25519().NewPrivateKey(s.Private)
		if err != nil {
			return fmt.Errorf("sealing key %s cannot be read", s.ID)
		}
		next.sealing[s.ID] = key
		next.ids = append(next.ids, s.ID)
	}
	for _, s := range challenge.Keys {
		if s.Algorithm != AES256GCM || len(s.Private) != 32 || len(s.ID) > 255 {
			return fmt.Errorf("challenge key %s is no AES-256 key", s.ID)
		}
		block, err := aes.NewCipher(s.Private)
		if err != nil {
			return fmt.Errorf("challenge key %s: %w", s.ID, err)
		}
		aead, err := cipher.NewGCMWithRandomNonce(block)
		if err != nil {
			return fmt.Errorf("challenge key %s: %w", s.ID, err)
		}
		next.challenge = append(next.challenge, challengeKey{s.ID, s.UseFrom, aead})
		next.ids = append(next.ids, s.ID)
	}
	slices.SortFunc(next.signing, func(a, b signingKey) int { return b.useFrom.Compare(a.useFrom) })
	slices.SortFunc(next.challenge, func(a, b challengeKey) int { return b.useFrom.Compare(a.useFrom) })
	slices.Sort(next.ids)
	k.keys.Store(next)
	return nil
}

func (k *Keyring) now() time.Time {
	if k.Clock != nil {
		return k.Clock()
	}
	return time.Now()
}

func (k *Keyring) load() *keys {
	if l := k.keys.Load(); l != nil {
		return l
	}
	return &keys{}
}

// IDs lists the loaded keys, sorted: what a replica reports, so that a new key is
// used only when every replica has it.
func (k *Keyring) IDs() []string { return slices.Clone(k.load().ids) }

// Ready reports whether answers can be signed, sealed parts opened and challenges
// sealed.
func (k *Keyring) Ready() bool {
	l, now := k.load(), k.now()
	_, signs := inUse(l.signing, now)
	_, seals := inUse(l.challenge, now)
	return signs && seals && len(l.sealing) > 0
}

// dated is a key that comes into use at a time.
type dated interface{ from() time.Time }

func (k signingKey) from() time.Time   { return k.useFrom }
func (k challengeKey) from() time.Time { return k.useFrom }

// inUse is the newest key that is in use.
func inUse[K dated](keys []K, now time.Time) (K, bool) {
	for _, key := range keys {
		if !now.Before(key.from()) {
			return key, true
		}
	}
	var none K
	return none, false
}

// Knows reports whether a sealing key is loaded.
func (k *Keyring) Knows(kid string) bool {
	_, ok := k.load().sealing[kid]
	return ok
}

// Open opens a sealed part: enc || ciphertext of HPKE base mode (RFC 9180) in the
// default suite. Its errors do not say what was wrong, but ErrUnknownKey.
func (k *Keyring) Open(kid string, aad, sealed []byte) ([]byte, error) {
	key, ok := k.load().sealing[kid]
	if !ok {
		return nil, ErrUnknownKey
	}
	const enc = 1120 // ML-KEM-768 ciphertext and X25519 share
	if len(sealed) < enc {
		return nil, errOpen
	}
	recipient, err := hpke.NewRecipient(sealed[:enc], key, hpke.HKDFSHA256(), hpke.ChaCha20Poly1305(), []byte(wire.SealInfo))
	if err != nil {
		return nil, errOpen
	}
	plaintext, err := recipient.Open(aad, sealed[enc:])
	if err != nil {
		return nil, errOpen
	}
	return plaintext, nil
}

// Sign signs an answer as a compact JWS (RFC 7515) with EdDSA, kid and typ.
func (k *Keyring) Sign(typ string, payload []byte) (string, error) {
	key, ok := inUse(k.load().signing, k.now())
	if !ok {
		return "", ErrNoKey
	}
	signer, ok := key.signers[typ]
	if !ok {
		return "", fmt.Errorf("nothing of type %q is signed", typ)
	}
	jws, err := signer.Sign(payload)
	if err != nil {
		return "", fmt.Errorf("sign an answer: %w", err)
	}
	return jws.CompactSerialize()
}

// stateVersion begins every sealed state and is authenticated with it.
const stateVersion = 1

// SealState seals what a machine carries to its next round, for one purpose and
// bound to aad. The form is version, length of the key id, key id, nonce and
// ciphertext of AES-256-GCM.
func (k *Keyring) SealState(purpose string, aad, plaintext []byte) ([]byte, error) {
	key, ok := inUse(k.load().challenge, k.now())
	if !ok {
		return nil, ErrNoKey
	}
	head := append([]byte{stateVersion, byte(len(key.id))}, key.id...)
	sealed := key.aead.Seal(nil, nil, plaintext, stateAAD(head, purpose, aad))
	return append(head, sealed...), nil
}

// OpenState opens what SealState sealed for the same purpose and aad.
func (k *Keyring) OpenState(purpose string, aad, sealed []byte) ([]byte, error) {
	if len(sealed) < 2 || sealed[0] != stateVersion || len(sealed) < 2+int(sealed[1]) {
		return nil, errOpen
	}
	head := sealed[:2+int(sealed[1])]
	for _, key := range k.load().challenge {
		if key.id == string(head[2:]) {
			plaintext, err := key.aead.Open(nil, nil, sealed[len(head):], stateAAD(head, purpose, aad))
			if err != nil {
				return nil, errOpen
			}
			return plaintext, nil
		}
	}
	return nil, ErrUnknownKey
}

func stateAAD(head []byte, purpose string, aad []byte) []byte {
	out := append([]byte("bc-state\x00"), head...)
	out = append(append(out, 0), purpose...)
	return append(append(out, 0), aad...)
}
