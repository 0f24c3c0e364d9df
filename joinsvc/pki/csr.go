package pki

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"errors"
)

// maxCSR caps a request's DER, in bytes: an RSA-4096 one without extensions has
// about 1,200.
const maxCSR = 16 << 10

// CSR is a certificate request that proved the possession of its key. Nothing but
// the key is used.
type CSR struct {
	DER             []byte
	SHA256          [32]byte
	PublicKey       crypto.PublicKey
	PublicKeySHA256 [32]byte // over the SubjectPublicKeyInfo
}

// ParseCSR reads a DER PKCS#10 request (RFC 2986) strictly: nothing after it, its
// signature verified, its key of a kind and size that the protocol allows. The
// errors are safe to show to a machine.
func ParseCSR(der []byte) (*CSR, error) {
	if len(der) > maxCSR {
		return nil, errors.New("is too long")
	}
	// A modulus is measured before anything is computed with it.
	r, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return nil, errors.New("is not one DER certificate request")
	}
	if err := checkKey(r.PublicKey); err != nil {
		return nil, err
	}
	if err := r.CheckSignature(); err != nil {
		return nil, errors.New("its signature does not verify, or is of a kind that is not allowed")
	}
	return &CSR{
		DER: der, SHA256: sha256.Sum256(der),
		PublicKey: r.PublicKey, PublicKeySHA256: sha256.Sum256(r.RawSubjectPublicKeyInfo),
	}, nil
}

func checkKey(key crypto.PublicKey) error {
	switch k := key.(type) {
	case *ecdsa.PublicKey:
		if k.Curve != elliptic.P256() && k.Curve != elliptic.P384() {
			return errors.New("an ECDSA key must be on P-256 or P-384")
		}
	case ed25519.PublicKey:
	case *rsa.PublicKey:
		if n := k.N.BitLen(); n < 2048 || n > 4096 {
			return errors.New("an RSA key must have 2048 to 4096 bits")
		}
		if k.N.Bit(0) == 0 || k.E < 65537 || k.E%2 == 0 {
			return errors.New("an RSA key must have an odd modulus and an odd exponent of at least 65537")
		}
	default:
		return errors.New("its key must be ECDSA P-256 or P-384, Ed25519, or RSA 2048 to 4096")
	}
	return nil
}
