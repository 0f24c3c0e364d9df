// Package machine is a machine of protocol 1 reduced to the wire: it seals,
// sends and verifies with nothing but package wire, keeps no state and never
// tries again. Tests and the load tool use it where the agent's care would be in
// the way; it is also a second implementation, that the first is held against.
package machine

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hpke"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"fmt"

	"github.com/better-compute/join-operator/api/wire"
)

// Machine is a key and the one CSR made with it.
type Machine struct {
	Key crypto.Signer
	CSR []byte
}

// New makes a machine with an ECDSA P-256 key.
func New() (*Machine, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		return nil, err
	}
	return &Machine{Key: key, CSR: csr}, nil
}

// CSRSHA256 is the hash of the machine's CSR in lower-case hexadecimal.
func (m *Machine) CSRSHA256() string {
	sum := sha256.Sum256(m.CSR)
	return hex.EncodeToString(sum[:])
}

// Envelope seals what is secret and puts the rest around it. Callers may spoil
// the result before they encode it.
func (t *Target) Envelope(m *Machine, attestor string, role wire.Role, s *wire.Sealed) (*wire.Join, error) {
	plaintext, err := json.Marshal(s)
	if err != nil {
		return nil, err
	}
	sealed, err := t.Seal(wire.SealAAD(attestor, role, m.CSR), plaintext)
	if err != nil {
		return nil, err
	}
	return &wire.Join{Attestor: attestor, Role: role, CSR: m.CSR, KeyID: t.kid, Sealed: sealed, HasSealed: true}, nil
}

// Seal seals any plaintext to the bundle's first key of the default suite.
func (t *Target) Seal(aad, plaintext []byte) ([]byte, error) {
	enc, sender, err := hpke.NewSender(t.sealTo, hpke.HKDFSHA256(), hpke.ChaCha20Poly1305(), []byte(wire.SealInfo))
	if err != nil {
		return nil, err
	}
	ciphertext, err := sender.Seal(aad, plaintext)
	if err != nil {
		return nil, err
	}
	return append(enc, ciphertext...), nil
}

// Leaf is the certificate of a joined answer.
func Leaf(a *wire.Answer) (*x509.Certificate, error) {
	if a.Outcome != wire.OutcomeJoined || len(a.Certificates) != 2 {
		return nil, fmt.Errorf("an answer that says %q with %d certificates is no join", a.Outcome, len(a.Certificates))
	}
	der, err := wire.DecodeBase64(a.Certificates[0])
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}

// Confirmation is the body with which the machine says that it stored a leaf.
func (m *Machine) Confirmation(leaf []byte) (*wire.Confirm, error) {
	signature, err := wire.SignStatement(m.Key, wire.ConfirmStatement(leaf))
	if err != nil {
		return nil, err
	}
	return &wire.Confirm{Certificate: leaf, Signature: signature}, nil
}
