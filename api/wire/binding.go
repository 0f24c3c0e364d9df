package wire

import (
	"crypto/sha256"
	"hash"
)

// SealInfo is the HPKE info string of a sealed part (RFC 9180 section 5.1).
const SealInfo = "bc-join/v1"

// RenewAttestor stands for the attestor in the AAD of a renewal's sealed part.
const RenewAttestor = "renew"

const (
	renewLabel   = "bc-renew/v1"
	confirmLabel = "bc-confirm/v1"
	x509popLabel = "bc-x509pop/v1"
)

// SealAAD is the associated data that binds a sealed part to its envelope:
// SHA-256("bc-join/v1" NUL attestor NUL role NUL CSR), the attestor as sent.
func SealAAD(attestor string, role Role, csr []byte) []byte {
	h := sha256.New()
	writeFields(h, SealInfo, attestor, string(role))
	h.Write(csr)
	return h.Sum(nil)
}

// RenewStatement is what a certificate's key signs to renew it for a new CSR.
func RenewStatement(leaf, csr []byte) []byte { return statement(renewLabel, leaf, csr) }

// X509POPStatement is what a certificate's key signs to join again by it.
func X509POPStatement(leaf, csr []byte) []byte { return statement(x509popLabel, leaf, csr) }

// ConfirmStatement is what a certificate's key signs to say that it is stored.
func ConfirmStatement(leaf []byte) []byte {
	l := sha256.Sum256(leaf)
	return append([]byte(confirmLabel+"\x00"), l[:]...)
}

func statement(label string, leaf, csr []byte) []byte {
	l, c := sha256.Sum256(leaf), sha256.Sum256(csr)
	out := append([]byte(label+"\x00"), l[:]...)
	out = append(out, 0)
	return append(out, c[:]...)
}

func writeFields(h hash.Hash, fields ...string) {
	for _, f := range fields {
		h.Write([]byte(f))
		h.Write([]byte{0})
	}
}
