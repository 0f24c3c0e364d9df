package wire

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/sha512"
	"errors"
	"fmt"
)

// ErrSignature is returned by [VerifyStatement] for a signature that does not
// verify and for a key of a kind that the protocol does not know.
var ErrSignature = errors.New("signature does not verify")

// The one form that each kind of key signs statements in: RSA is PSS with
// SHA-256 and a salt of 32 bytes (RFC 8017 section 8.1).
var pssOptions = &rsa.PSSOptions{SaltLength: 32, Hash: crypto.SHA256}

// SignStatement signs a statement of this package with a machine's key: ECDSA
// as ASN.1 with SHA-256 for P-256 and SHA-384 for P-384, Ed25519 pure, RSA as
// PSS. The signer may live in hardware.
func SignStatement(key crypto.Signer, statement []byte) ([]byte, error) {
	switch pub := key.Public().(type) {
	case *ecdsa.PublicKey:
		digest, hash, err := ecdsaDigest(pub, statement)
		if err != nil {
			return nil, err
		}
		return key.Sign(rand.Reader, digest, hash)
	case ed25519.PublicKey:
		return key.Sign(rand.Reader, statement, crypto.Hash(0))
	case *rsa.PublicKey:
		digest := sha256.Sum256(statement)
		return key.Sign(rand.Reader, digest[:], pssOptions)
	default:
		return nil, fmt.Errorf("no signature form for a key of type %T", pub)
	}
}

// VerifyStatement is the counterpart of [SignStatement].
func VerifyStatement(key crypto.PublicKey, statement, signature []byte) error {
	ok := false
	switch pub := key.(type) {
	case *ecdsa.PublicKey:
		digest, _, err := ecdsaDigest(pub, statement)
		ok = err == nil && ecdsa.VerifyASN1(pub, digest, signature)
	case ed25519.PublicKey:
		ok = ed25519.Verify(pub, statement, signature)
	case *rsa.PublicKey:
		digest := sha256.Sum256(statement)
		ok = rsa.VerifyPSS(pub, crypto.SHA256, digest[:], signature, pssOptions) == nil
	}
	if !ok {
		return ErrSignature
	}
	return nil
}

func ecdsaDigest(pub *ecdsa.PublicKey, statement []byte) ([]byte, crypto.Hash, error) {
	switch pub.Curve {
	case elliptic.P256():
		d := sha256.Sum256(statement)
		return d[:], crypto.SHA256, nil
	case elliptic.P384():
		d := sha512.Sum384(statement)
		return d[:], crypto.SHA384, nil
	default:
		return nil, 0, errors.New("no signature form for this curve")
	}
}
