package hardware

import (
	"crypto/subtle"
	"encoding/hex"

	"github.com/better-compute/join-operator/attestors"
)

// Mismatch is what of an expectation a machine did not meet, in the words of a
// refusal's reason.
type Mismatch string

// The mismatches.
const (
	MismatchUUID   Mismatch = "expect-uuid"
	MismatchSerial Mismatch = "expect-serial"
	MismatchMAC    Mismatch = "expect-mac"
	MismatchKey    Mismatch = "expect-hardware-key"
)

// Match holds a machine against an expectation. Its claims guard against
// mistakes, not thieves; trustedKey is the SHA-256 of a hardware key that was
// proved, nil where none was: a mere claim never satisfies the expectation of a
// key. An expectation that is a placeholder or does not parse matches no machine.
// Match returns "" where all is met.
func Match(e attestors.Expect, c attestors.Claims, trustedKey []byte) Mismatch {
	if e.ProductUUID != "" && !same(UUID, e.ProductUUID, c.ProductUUID) {
		return MismatchUUID
	}
	if e.SerialNumber != "" && !same(Serial, e.SerialNumber, c.SerialNumber) {
		return MismatchSerial
	}
	if e.MACAddress != "" && !hasMAC(e.MACAddress, c.MACAddresses) {
		return MismatchMAC
	}
	if e.HardwareKeySHA256 != "" {
		want, ok := KeyHash(e.HardwareKeySHA256)
		if !ok || len(trustedKey) == 0 || !equal(want, hex.EncodeToString(trustedKey)) {
			return MismatchKey
		}
	}
	return ""
}

// maxMACs bounds how many of a machine's addresses are looked at.
const maxMACs = 256

func hasMAC(want string, claimed []string) bool {
	for _, c := range claimed[:min(len(claimed), maxMACs)] {
		if same(MAC, want, c) {
			return true
		}
	}
	return false
}

func same(normalize func(string) (string, bool), want, got string) bool {
	w, ok := normalize(want)
	if !ok {
		return false
	}
	g, ok := normalize(got)
	return ok && equal(w, g)
}

func equal(a, b string) bool { return subtle.ConstantTimeCompare([]byte(a), []byte(b)) == 1 }
