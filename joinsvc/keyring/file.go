package keyring

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/ed25519"
	"crypto/hpke"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	kjson "sigs.k8s.io/json"
)

// The Secrets of keys, and the data item of each that holds a File.
const (
	SigningSecret   = "signing-keys"
	SealingSecret   = "sealing-keys"
	ChallengeSecret = "challenge-keys"
	// BundleSecret lies in a namespace that only the keys job can read.
	BundleSecret = "bundle-keys"

	Item = "keys.json"
)

// Algorithm says what a key is for and how its private half is encoded.
type Algorithm string

// The algorithms: signatures (RFC 8032; the private half is the seed), sealed parts
// (RFC 9180 with HKDF-SHA256 and ChaCha20-Poly1305), and states (AEAD).
const (
	Ed25519        Algorithm = "Ed25519"
	MLKEM768X25519 Algorithm = "HPKE-MLKEM768-X25519"
	AES256GCM      Algorithm = "AES-256-GCM"
)

// File is what a Secret of keys holds, as JSON.
type File struct {
	Keys []Key `json:"keys"`
}

// Key is one key with its times.
type Key struct {
	// KeyID is the first 16 hexadecimal digits of a SHA-256: over the public key, or,
	// for a symmetric key, over the SHA-256 of the key.
	KeyID     string    `json:"kid"`
	Algorithm Algorithm `json:"algorithm"`
	Private   []byte    `json:"private"`
	CreatedAt time.Time `json:"createdAt"`
	// UseFrom is when the key begins to sign or seal. It is absent while the key is
	// not published yet; it opens what was sealed to it from the start.
	UseFrom time.Time `json:"useFrom,omitzero"`
	// DropAfter is when the key is gone for every purpose; absent for a current one.
	DropAfter time.Time `json:"dropAfter,omitzero"`
}

// NewKey makes a key that is not in use yet.
func NewKey(a Algorithm, now time.Time) (Key, error) {
	k := Key{Algorithm: a, CreatedAt: now.UTC().Truncate(time.Second)}
	switch a {
	case Ed25519:
		_, private, err := ed25519.GenerateKey(rand.Reader)
		if err != nil {
			return Key{}, err
		}
		k.Private = private.Seed()
	case MLKEM768X25519:
		private, err := hpke.MLKEM768X25519().GenerateKey()
		if err != nil {
			return Key{}, err
		}
		if k.Private, err = private.Bytes(); err != nil {
			return Key{}, err
		}
	case AES256GCM:
		k.Private = make([]byte, 32)
		if _, err := rand.Read(k.Private); err != nil {
			return Key{}, err
		}
	default: // derivedID says that it is unknown
	}
	var err error
	k.KeyID, err = k.derivedID()
	return k, err
}

// Dropped reports whether the key is gone.
func (k Key) Dropped(now time.Time) bool { return !k.DropAfter.IsZero() && !now.Before(k.DropAfter) }

// InUse reports whether the key may sign or seal.
func (k Key) InUse(now time.Time) bool {
	return !k.UseFrom.IsZero() && !now.Before(k.UseFrom) && !k.Dropped(now)
}

// Current is the key of a list that signs or seals: of those in use, the one that
// came into use last. It returns nil where there is none.
func Current(keys []Key, now time.Time) *Key {
	var best *Key
	for i := range keys {
		if k := &keys[i]; k.InUse(now) && (best == nil || k.UseFrom.After(best.UseFrom)) {
			best = k
		}
	}
	return best
}

// ParseFile reads a File strictly: every key of the algorithm and with the id that
// its bytes have. Its errors say nothing of a key but its id.
func ParseFile(raw []byte, want Algorithm) (*File, error) {
	var f File
	strict, err := kjson.UnmarshalStrict(raw, &f, kjson.DisallowDuplicateFields, kjson.DisallowUnknownFields)
	if err != nil || len(strict) > 0 {
		return nil, errors.New("is not one JSON object of the form of a key file") // the cause could quote a key
	}
	seen := map[string]bool{}
	for _, k := range f.Keys {
		id, err := k.derivedID()
		switch {
		case k.Algorithm != want:
			return nil, fmt.Errorf("key %.16q has another algorithm than %s", k.KeyID, want)
		case err != nil:
			return nil, fmt.Errorf("key %.16q cannot be read as %s", k.KeyID, want)
		case id != k.KeyID:
			return nil, fmt.Errorf("key %.16q has not the id of its bytes", k.KeyID)
		case seen[id]:
			return nil, fmt.Errorf("key %s is listed twice", id)
		}
		seen[id] = true
	}
	return &f, nil
}

// Marshal writes a file as its Secret holds it.
func (f *File) Marshal() ([]byte, error) { return json.Marshal(f) }

func (k Key) derivedID() (string, error) {
	var over []byte
	switch k.Algorithm {
	case Ed25519:
		pub, err := k.Ed25519Public()
		if err != nil {
			return "", err
		}
		over = pub
	case MLKEM768X25519:
		private, err := k.hpkePrivate()
		if err != nil {
			return "", err
		}
		over = private.PublicKey().Bytes()
	case AES256GCM:
		if len(k.Private) != 32 {
			return "", errKey
		}
		sum := sha256.Sum256(k.Private)
		over = sum[:]
	default:
		return "", fmt.Errorf("unknown algorithm %.40q", k.Algorithm)
	}
	sum := sha256.Sum256(over)
	return hex.EncodeToString(sum[:8]), nil
}

var errKey = errors.New("not a key of its algorithm")

func (k Key) ed25519Private() (ed25519.PrivateKey, error) {
	if k.Algorithm != Ed25519 || len(k.Private) != ed25519.SeedSize {
		return nil, errKey
	}
	return ed25519.NewKeyFromSeed(k.Private), nil
}

// Ed25519Public is the public half of a signing key.
func (k Key) Ed25519Public() (ed25519.PublicKey, error) {
	private, err := k.ed25519Private()
	if err != nil {
		return nil, err
	}
	return private.Public().(ed25519.PublicKey), nil
}

func (k Key) hpkePrivate() (hpke.PrivateKey, error) {
	if k.Algorithm != MLKEM768X25519 {
		return nil, errKey
	}
	private, err := hpke.MLKEM768X25519().NewPrivateKey(k.Private)
	if err != nil {
		return nil, errKey
	}
	return private, nil
}

// HPKEPublic is the public half of a sealing key, as the bundle has it.
func (k Key) HPKEPublic() ([]byte, error) {
	private, err := k.hpkePrivate()
	if err != nil {
		return nil, err
	}
	return private.PublicKey().Bytes(), nil
}

func (k Key) aead() (cipher.AEAD, error) {
	if k.Algorithm != AES256GCM || len(k.Private) != 32 {
		return nil, errKey
	}
	block, err := aes.NewCipher(k.Private)
	if err != nil {
		return nil, errKey
	}
	return cipher.NewGCMWithRandomNonce(block)
}
