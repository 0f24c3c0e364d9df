package pki

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/crypto/cryptobyte"
	cbasn1 "golang.org/x/crypto/cryptobyte/asn1"
)

// MaxCSR is the largest certificate request that is read, in bytes: several times
// what RSA 4096 with every usual extension needs.
const MaxCSR = 16 << 10

// maxDepth bounds how deep a request's structures nest; an honest one has 8 levels.
const maxDepth = 16

// The sizes and exponents of RSA keys that are taken. A key that is too large is
// work for whoever verifies, a small or even exponent is no key that an honest
// machine makes.
const (
	minRSABits     = 2048
	maxRSABits     = 4096
	minRSAExponent = 65537
)

// CSR is a certificate request whose signature verified. Of all that it says, only
// the public key is ever used.
type CSR struct {
	// DER is the request as it came. The caller must not change it.
	DER []byte
	// SHA256 is the hash of DER, by which a request is known again.
	SHA256 [32]byte
	// PublicKey is *ecdsa.PublicKey (P-256 or P-384), ed25519.PublicKey or
	// *rsa.PublicKey (2048 to 4096 bits).
	PublicKey crypto.PublicKey
	// PublicKeySHA256 is the hash of its SubjectPublicKeyInfo (RFC 5280 section 4.1).
	PublicKeySHA256 [32]byte
}

// ParseCSR reads a PKCS#10 request (RFC 2986) in DER and verifies that who sent it
// has the key. Its errors speak of the form alone and are safe to show to anybody.
func ParseCSR(der []byte) (*CSR, error) {
	if len(der) > MaxCSR {
		return nil, fmt.Errorf("is longer than %d bytes", MaxCSR)
	}
	if !wellFormed(der) {
		return nil, errors.New("is not exactly one certificate request in DER")
	}
	parsed, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return nil, errors.New("is not a certificate request that can be read")
	}
	// Before the signature, since a key of any size and exponent would be any
	// amount of work.
	if err := checkKey(parsed.PublicKey); err != nil {
		return nil, err
	}
	if !slices.Contains(signatureAlgorithms, parsed.SignatureAlgorithm) {
		return nil, errors.New("is signed by an algorithm that is not accepted")
	}
	if err := parsed.CheckSignature(); err != nil {
		return nil, errors.New("has a signature that its own key did not make")
	}
	// One key has one encoding, so that its hash tells it.
	spki, err := x509.MarshalPKIXPublicKey(parsed.PublicKey)
	if err != nil || !bytes.Equal(spki, parsed.RawSubjectPublicKeyInfo) {
		return nil, errors.New("has a public key in an unusual encoding")
	}
	return &CSR{
		DER: der, SHA256: sha256.Sum256(der),
		PublicKey: parsed.PublicKey, PublicKeySHA256: sha256.Sum256(spki),
	}, nil
}

// signatureAlgorithms are those by which a request may prove its key. SHA-1, which
// the standard library lets requests use, is not among them.
var signatureAlgorithms = []x509.SignatureAlgorithm{
	x509.ECDSAWithSHA256, x509.ECDSAWithSHA384, x509.ECDSAWithSHA512, x509.PureEd25519,
	x509.SHA256WithRSA, x509.SHA384WithRSA, x509.SHA512WithRSA,
	x509.SHA256WithRSAPSS, x509.SHA384WithRSAPSS, x509.SHA512WithRSAPSS,
}

func checkKey(key crypto.PublicKey) error {
	switch k := key.(type) {
	case *ecdsa.PublicKey:
		if k.Curve != elliptic.P256() && k.Curve != elliptic.P384() {
			return errors.New("has an ECDSA key that is neither P-256 nor P-384")
		}
	case ed25519.PublicKey:
		if len(k) != ed25519.PublicKeySize {
			return errors.New("has an Ed25519 key of a wrong size")
		}
	case *rsa.PublicKey:
		if bits := k.N.BitLen(); bits < minRSABits || bits > maxRSABits {
			return fmt.Errorf("has an RSA key of %d bits, not of %d to %d", bits, minRSABits, maxRSABits)
		}
		if k.N.Bit(0) == 0 || k.E < minRSAExponent || k.E%2 == 0 {
			return errors.New("has an RSA key with an exponent that is even or below 65537")
		}
	default:
		return errors.New("has a key that is not ECDSA, Ed25519 or RSA")
	}
	return nil
}

// wellFormed reports whether der is a CertificationRequest with nothing before,
// behind or between its fields (RFC 2986 section 4.2), and DER all through. The
// standard library ignores what it does not expect at the end of a sequence.
func wellFormed(der []byte) bool {
	input := cryptobyte.String(der)
	var request, info, subject, spki, attributes, algorithm cryptobyte.String
	var version int
	var signature []byte
	return isDER(input, 0) &&
		input.ReadASN1(&request, cbasn1.SEQUENCE) && input.Empty() &&
		request.ReadASN1(&info, cbasn1.SEQUENCE) &&
		info.ReadASN1Integer(&version) && version == 0 &&
		info.ReadASN1(&subject, cbasn1.SEQUENCE) &&
		info.ReadASN1(&spki, cbasn1.SEQUENCE) &&
		info.ReadASN1(&attributes, cbasn1.Tag(0).ContextSpecific().Constructed()) && info.Empty() &&
		request.ReadASN1(&algorithm, cbasn1.SEQUENCE) &&
		request.ReadASN1BitStringAsBytes(&signature) && request.Empty()
}

// isDER walks through nested elements: definite lengths in their shortest form and
// nothing left over.
func isDER(s cryptobyte.String, depth int) bool {
	if depth > maxDepth {
		return false
	}
	for !s.Empty() {
		var content cryptobyte.String
		var tag cbasn1.Tag
		if !s.ReadAnyASN1(&content, &tag) {
			return false
		}
		if tag&constructed != 0 && !isDER(content, depth+1) {
			return false
		}
	}
	return true
}

// constructed is the bit of an identifier octet (X.690 section 8.1.2.5).
const constructed = 0x20
