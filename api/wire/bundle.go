package wire

import (
	"encoding/json"
	"time"
)

// Bundle is the join bundle: everything that a machine must trust before it can
// ask. It is public and unsigned; machines get their first one out of band and
// adopt later ones only through signed rotations. Fields that a machine does
// not know are ignored.
type Bundle struct {
	Protocol int `json:"protocol"`
	// Generation counts from 1; a lower one is never adopted.
	Generation  int       `json:"generation"`
	TrustDomain string    `json:"trustDomain"`
	Endpoints   []string  `json:"endpoints"`
	IssuedAt    time.Time `json:"issuedAt"`
	// TLSCA and NodeCAs are PEM (RFC 7468), newest first.
	TLSCA   string `json:"tlsCA"`
	NodeCAs string `json:"nodeCAs"`
	// SigningKeys and BundleKeys are JWK sets (RFC 7517) of Ed25519 keys (RFC 8037).
	SigningKeys json.RawMessage `json:"signingKeys"`
	BundleKeys  json.RawMessage `json:"bundleKeys"`
	// Sealing is in the service's order of preference: a machine takes the first
	// whose suite it knows.
	Sealing []SealingKey `json:"sealing"`
}

// SealingKey is a public key to seal to, with its HPKE suite by IANA's numbers
// (registry "Hybrid Public Key Encryption (HPKE)").
type SealingKey struct {
	KeyID     string `json:"kid"`
	KEM       uint16 `json:"kem"`
	KDF       uint16 `json:"kdf"`
	AEAD      uint16 `json:"aead"`
	PublicKey string `json:"publicKey"`
}

// The default suite: MLKEM768-X25519, HKDF-SHA256, ChaCha20-Poly1305.
const (
	KEMMLKEM768X25519    uint16 = 0x647a
	KDFHKDFSHA256        uint16 = 0x0001
	AEADChaCha20Poly1305 uint16 = 0x0003
)
