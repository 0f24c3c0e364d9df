package state

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
)

// KeyType is a kind of key that a machine may have.
type KeyType string

// The kinds of key that the protocol takes and this package makes.
const (
	ECDSAP256 KeyType = "ecdsa-p256"
	ECDSAP384 KeyType = "ecdsa-p384"
	Ed25519   KeyType = "ed25519"
	RSA2048   KeyType = "rsa-2048"
	RSA3072   KeyType = "rsa-3072"
	RSA4096   KeyType = "rsa-4096"
)

// KeyTypes lists every [KeyType], the default first.
func KeyTypes() []KeyType {
	return []KeyType{ECDSAP256, ECDSAP384, Ed25519, RSA2048, RSA3072, RSA4096}
}

const (
	pemKey     = "PRIVATE KEY"
	pemRequest = "CERTIFICATE REQUEST"
	pemCert    = "CERTIFICATE"
)

// Request is a key and the one certificate request for it: that of the identity
// in force, or one that is not answered yet. They lie in one file, so that neither
// is ever there without the other.
type Request struct {
	Key crypto.Signer
	// CSR is DER (RFC 2986). Its bytes never change: their hash is how the
	// service knows the machine again after a lost answer.
	CSR []byte
	// keyPEM is the key as it is stored, PKCS#8 (RFC 5958).
	keyPEM []byte
}

// CSRSHA256 is SHA-256 of the request's DER.
func (r *Request) CSRSHA256() [32]byte { return sha256.Sum256(r.CSR) }

// PublicKeySHA256 is the lower-case hexadecimal SHA-256 of the key's
// SubjectPublicKeyInfo (RFC 5280 section 4.1.2.7), as a JoinRequest shows it.
func (r *Request) PublicKeySHA256() (string, error) {
	spki, err := x509.MarshalPKIXPublicKey(r.Key.Public())
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(spki)
	return hex.EncodeToString(sum[:]), nil
}

// Request reads the key and request. It returns an error that is
// [fs.ErrNotExist] where there are none yet, and a [*DamagedError] where they
// cannot be read.
func (d *Dir) Request() (*Request, error) {
	path := d.file(requestName)
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	r, err := parseRequest(raw)
	if err != nil {
		return nil, &DamagedError{Path: path, Err: err, Remedy: d.requestRemedy()}
	}
	return r, nil
}

// EnsureRequest reads the key and request, and makes them where there are none.
func (d *Dir) EnsureRequest(kind KeyType) (*Request, error) {
	r, err := d.Request()
	if err == nil || !errors.Is(err, fs.ErrNotExist) {
		return r, err
	}
	return d.makeRequest(kind)
}

// requestRemedy: an identity in force has a copy of its own key.
func (d *Dir) requestRemedy() string {
	if _, err := d.Identity(); err == nil {
		return "Remove it: the identity in force has its own key, and the next renewal makes another request"
	}
	return "The machine's key is in it: restore it from a backup, or remove the whole state directory and join as a new node with a new token"
}

// NextRequest is the request to renew an identity with: the one that is not
// answered yet, or a new one, stored before it is returned, where the last one
// became that identity. So there is never a second new request while the first
// one may have been answered. An empty kind is that of the identity's key.
func (d *Dir) NextRequest(id *Identity, kind KeyType) (*Request, error) {
	r, err := d.Request()
	if err == nil && !r.Became(id) {
		return r, nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if kind == "" {
		kind = kindOf(id.Key)
	}
	return d.makeRequest(kind)
}

// Became reports whether an identity is what the request was answered with.
func (r *Request) Became(id *Identity) bool { return samePublicKey(r.Key.Public(), id.Key.Public()) }

func (d *Dir) makeRequest(kind KeyType) (*Request, error) {
	r, err := newRequest(kind)
	if err != nil {
		return nil, fmt.Errorf("make a key and certificate request: %w", err)
	}
	csr := pem.EncodeToMemory(&pem.Block{Type: pemRequest, Bytes: r.CSR})
	if err := replaceFile(d.fsys, d.file(requestName), append(bytes.Clone(r.keyPEM), csr...)); err != nil {
		return nil, fmt.Errorf("store the key and certificate request: %w", err)
	}
	return r, nil
}

func newRequest(kind KeyType) (*Request, error) {
	key, err := newKey(kind)
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	// Nothing of a request but its key reaches the certificate, so it says nothing.
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		return nil, err
	}
	return &Request{Key: key, CSR: csr, keyPEM: pem.EncodeToMemory(&pem.Block{Type: pemKey, Bytes: der})}, nil
}

func newKey(kind KeyType) (crypto.Signer, error) {
	switch kind {
	case ECDSAP256:
		return ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	case ECDSAP384:
		return ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	case Ed25519:
		_, key, err := ed25519.GenerateKey(rand.Reader)
		return key, err
	case RSA2048:
		return rsa.GenerateKey(rand.Reader, 2048)
	case RSA3072:
		return rsa.GenerateKey(rand.Reader, 3072)
	case RSA4096:
		return rsa.GenerateKey(rand.Reader, 4096)
	default:
		return nil, fmt.Errorf("no key type %q", kind)
	}
}

// kindOf is a key's kind, or the default for one that this package does not make.
func kindOf(key crypto.Signer) KeyType {
	switch pub := key.Public().(type) {
	case *ecdsa.PublicKey:
		if pub.Curve == elliptic.P384() {
			return ECDSAP384
		}
	case ed25519.PublicKey:
		return Ed25519
	case *rsa.PublicKey:
		return KeyType(fmt.Sprintf("rsa-%d", pub.N.BitLen()))
	}
	return ECDSAP256
}

func parseRequest(raw []byte) (*Request, error) {
	keyBlock, rest := pem.Decode(raw)
	if keyBlock == nil || keyBlock.Type != pemKey {
		return nil, errors.New("it does not begin with a private key in PEM")
	}
	csrBlock, rest := pem.Decode(rest)
	if csrBlock == nil || csrBlock.Type != pemRequest {
		return nil, errors.New("no certificate request in PEM follows the private key")
	}
	if len(bytes.TrimSpace(rest)) > 0 {
		return nil, errors.New("something follows the certificate request")
	}
	parsed, err := x509.ParsePKCS8PrivateKey(keyBlock.Bytes)
	if err != nil {
		return nil, errors.New("the private key is not PKCS#8")
	}
	key, ok := parsed.(crypto.Signer)
	if !ok {
		return nil, errors.New("the private key cannot sign")
	}
	csr, err := x509.ParseCertificateRequest(csrBlock.Bytes)
	if err != nil {
		return nil, fmt.Errorf("the certificate request: %w", err)
	}
	if err := csr.CheckSignature(); err != nil {
		return nil, fmt.Errorf("the certificate request's signature: %w", err)
	}
	if !samePublicKey(key.Public(), csr.PublicKey) {
		return nil, errors.New("the certificate request is for another key")
	}
	return &Request{Key: key, CSR: csrBlock.Bytes, keyPEM: pem.EncodeToMemory(keyBlock)}, nil
}

// samePublicKey compares keys of any kind that this package makes.
func samePublicKey(a, b crypto.PublicKey) bool {
	k, ok := a.(interface{ Equal(crypto.PublicKey) bool })
	return ok && k.Equal(b)
}
