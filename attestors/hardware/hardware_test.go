package hardware_test

import (
	"encoding/hex"
	"strings"
	"testing"

	"github.com/better-compute/join-operator/attestors"
	"github.com/better-compute/join-operator/attestors/hardware"
)

type normalizer func(string) (string, bool)

func TestOneIdentifierHasManySpellingsAndOneNormalForm(t *testing.T) {
	for name, c := range map[string]struct {
		f         normalizer
		want      string
		spellings []string
	}{
		"UUID": {hardware.UUID, "4c4c454400354b108052b7c04f4a4e32", []string{
			"4c4c4544-0035-4b10-8052-b7c04f4a4e32", "4C4C4544-0035-4B10-8052-B7C04F4A4E32", "{4c4c4544-0035-4b10-8052-b7c04f4a4e32}",
			"4c4c454400354b108052b7c04f4a4e32", "urn:uuid:4c4c4544-0035-4b10-8052-b7c04f4a4e32", " 4c4c4544-0035-4b10-8052-b7c04f4a4e32\n",
		}},
		"MAC":    {hardware.MAC, "525400abcdef", []string{"52:54:00:ab:cd:ef", "52-54-00-AB-CD-EF", "5254.00ab.cdef", "525400ABCDEF", " 52:54:00:ab:cd:ef "}},
		"serial": {hardware.Serial, "7XKPQ2", []string{"7XKPQ2", " 7xkpq2 ", "7xKpQ2\t"}},
		"key":    {hardware.KeyHash, strings.Repeat("ab", 32), []string{strings.Repeat("ab", 32), strings.Repeat("AB", 32)}},
	} {
		for _, s := range c.spellings {
			if got, ok := c.f(s); !ok || got != c.want {
				t.Errorf("%s %q: %q, %v", name, s, got, ok)
			}
		}
	}
}

func TestWhatIsNoIdentifierMatchesNobody(t *testing.T) {
	for name, c := range map[string]struct {
		f      normalizer
		values []string
	}{
		"UUID": {hardware.UUID, []string{
			"", "x", "00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff", "FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF",
			"03000200-0400-0500-0006-000700080009", "{4c4c4544-0035-4b10-8052-b7c04f4a4e32", "4c4c4544-0035-4b10-8052-b7c04f4a4e3",
			"4c4c4544-0035-4b10-8052-b7c04f4a4e3g", "4c4c4544 0035 4b10 8052 b7c04f4a4e32", "4c4c-4544-0035-4b10-8052-b7c04f4a4e32",
			"--------------------------------", strings.Repeat("a", 10_000),
		}},
		"MAC": {hardware.MAC, []string{
			"", "00:00:00:00:00:00", "ff:ff:ff:ff:ff:ff", "01:00:5e:00:00:01", "33:33:00:00:00:01", "52:54:00:ab:cd", "52:54-00:ab:cd:ef",
			"52:54:00:ab:cd:eg", "52 54 00 ab cd ef", "52:54:00:ab:cd:ef:01:02", "5254:00ab:cdef", "525.400a.bcde.f", strings.Repeat("a", 10_000),
		}},
		"serial": {hardware.Serial, []string{
			"", " ", "0", "000000", "XXXXXXXX", "To be filled by O.E.M.", "TO BE FILLED BY O.E.M.", "Default string", "System Serial Number", "None",
			"n/a", "Not Specified", "0123456789", "1234567890", "a\x00b", "a\x1b[31m", "caf\u00e9", "\u017f7XKPQ2", strings.Repeat("ab", 1000),
		}},
		"key": {hardware.KeyHash, []string{"", "ab", strings.Repeat("ab", 33), strings.Repeat("zz", 32)}},
	} {
		for _, v := range c.values {
			if got, ok := c.f(v); ok {
				t.Errorf("%s %.40q is taken for %q", name, v, got)
			}
		}
	}
}

func TestR07_AnExpectationIsMetByAllOfItAndByNoPlaceholder(t *testing.T) {
	key := make([]byte, 32)
	full := attestors.Expect{ProductUUID: "4c4c4544-0035-4b10-8052-b7c04f4a4e32", SerialNumber: "7XKPQ2", MACAddress: "52:54:00:ab:cd:ef", HardwareKeySHA256: hex.EncodeToString(key)}
	claims := attestors.Claims{ProductUUID: "4C4C454400354B108052B7C04F4A4E32", SerialNumber: "7xkpq2", MACAddresses: []string{"52-54-00-00-00-01", "525400ABCDEF"}}
	if m := hardware.Match(full, claims, key); m != "" {
		t.Errorf("the machine itself: %s", m)
	}
	if m := hardware.Match(attestors.Expect{}, attestors.Claims{}, nil); m != "" {
		t.Errorf("nothing is expected: %s", m)
	}
	for want, spoil := range map[hardware.Mismatch]func(*attestors.Claims) []byte{
		hardware.MismatchUUID:   func(c *attestors.Claims) []byte { c.ProductUUID = ""; return key },
		hardware.MismatchSerial: func(c *attestors.Claims) []byte { c.SerialNumber += "x"; return key },
		hardware.MismatchMAC:    func(c *attestors.Claims) []byte { c.MACAddresses = c.MACAddresses[:1]; return key },
		hardware.MismatchKey:    func(c *attestors.Claims) []byte { c.HardwareKeySHA256 = hex.EncodeToString(key); return nil },
	} {
		c := claims
		trusted := spoil(&c)
		if got := hardware.Match(full, c, trusted); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	same := attestors.Expect{ProductUUID: "00000000-0000-0000-0000-000000000000"}
	if hardware.Match(same, attestors.Claims{ProductUUID: same.ProductUUID}, nil) != hardware.MismatchUUID {
		t.Error("a placeholder matches itself")
	}
}

func FuzzNormalForms(f *testing.F) {
	for _, s := range []string{"4c4c4544-0035-4b10-8052-b7c04f4a4e32", "{x}", "52:54:00:ab:cd:ef", "5254.00ab.cdef", " serial ", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		for name, normalize := range map[string]normalizer{"UUID": hardware.UUID, "MAC": hardware.MAC, "serial": hardware.Serial, "key": hardware.KeyHash} {
			normal, ok := normalize(s)
			if !ok {
				if normal != "" {
					t.Errorf("%s %q: refused with %q", name, s, normal)
				}
				continue
			}
			if again, ok := normalize(normal); !ok || again != normal {
				t.Errorf("%s %q: the normal form %q is not its own", name, s, normal)
			}
		}
	})
}
