package hardware

import (
	"slices"
	"strings"
)

// maxLength bounds what is looked at; no identifier is longer.
const maxLength = 128

// UUID normalises an SMBIOS product UUID: case, braces, a urn:uuid: prefix and
// dashes are spelling. What it returns is 32 lower-case hexadecimal digits; ok is
// false for what is no UUID and for one that says nothing (all digits the same,
// and the samples that firmware is shipped with).
func UUID(s string) (normal string, ok bool) {
	if len(s) > maxLength {
		return "", false
	}
	s = strings.ToLower(strings.TrimSpace(s))
	s = strings.TrimPrefix(s, "urn:uuid:")
	if inner, braced := strings.CutPrefix(s, "{"); braced {
		if inner, braced = strings.CutSuffix(inner, "}"); !braced {
			return "", false
		}
		s = inner
	}
	if len(s) == 36 {
		if s[8] != '-' || s[13] != '-' || s[18] != '-' || s[23] != '-' {
			return "", false
		}
		s = s[:8] + s[9:13] + s[14:18] + s[19:23] + s[24:]
	}
	if len(s) != 32 || !hexadecimal(s) || uniform(s) || slices.Contains(sampleUUIDs, s) {
		return "", false
	}
	return s, true
}

// MAC normalises a 48-bit MAC address: case and separators (":", "-", "." or
// none) are spelling. What it returns is 12 lower-case hexadecimal digits; ok is
// false for what is no address of one interface (broadcast, multicast, zero).
func MAC(s string) (normal string, ok bool) {
	if len(s) > maxLength {
		return "", false
	}
	s = strings.ToLower(strings.TrimSpace(s))
	var digits string
	switch len(s) {
	case 12:
		digits = s
	case 14: // 0123.4567.89ab
		digits = joined(s, 4, ".")
	case 17:
		digits = joined(s, 2, s[2:3])
		if s[2] != ':' && s[2] != '-' {
			return "", false
		}
	}
	if len(digits) != 12 || !hexadecimal(digits) || uniform(digits) {
		return "", false
	}
	if strings.IndexByte("13579bdf", digits[1]) >= 0 {
		return "", false // the group bit: no interface has it
	}
	return digits, true
}

// Serial normalises a serial number: surrounding space is spelling, and so is
// case, since asset systems change it. ok is false for an empty one and for the
// placeholders of firmware that nobody filled in.
func Serial(s string) (normal string, ok bool) {
	if len(s) > maxLength {
		return "", false
	}
	s = strings.TrimSpace(s)
	for i := range len(s) { // before letters are changed: some that are not ASCII become so
		if s[i] < ' ' || s[i] > '~' {
			return "", false
		}
	}
	s = strings.ToUpper(s)
	if s == "" || uniform(s) || slices.Contains(placeholderSerials, s) {
		return "", false
	}
	return s, true
}

// KeyHash normalises the hexadecimal SHA-256 of a hardware key.
func KeyHash(s string) (normal string, ok bool) {
	s = strings.ToLower(strings.TrimSpace(s))
	if len(s) != 64 || !hexadecimal(s) {
		return "", false
	}
	return s, true
}

// sampleUUIDs are in whole production runs.
var sampleUUIDs = []string{
	"03000200040005000006000700080009",
	"12345678123412341234123456789abc",
	"12345678123456789012123456789012",
	"00020003000400050006000700080009",
	"fefefefefefefefefefefefefefefefe",
}

// placeholderSerials stand where nobody filled in a serial number.
var placeholderSerials = []string{
	"TO BE FILLED BY O.E.M.", "TO BE FILLED BY O.E.M", "TO BE FILLED", "DEFAULT STRING", "SYSTEM SERIAL NUMBER", "CHASSIS SERIAL NUMBER",
	"BASE BOARD SERIAL NUMBER", "NOT SPECIFIED", "NOT APPLICABLE", "NOT AVAILABLE", "NOT SETTABLE", "NONE", "N/A", "NA", "NULL", "EMPTY",
	"UNKNOWN", "INVALID", "OEM", "O.E.M.", "SERNUM", "SERIAL NUMBER", "SERIAL", "SYSTEM", "DEFAULT",
	"0123456789", "123456789", "1234567890", "1234567", "12345678", "01234567890123456789", "..", "...",
}

// joined takes the separators out of groups of n characters; it returns "" where
// a separator is missing.
func joined(s string, n int, separator string) string {
	groups := strings.Split(s, separator)
	for _, g := range groups {
		if len(g) != n {
			return ""
		}
	}
	return strings.Join(groups, "")
}

func hexadecimal(s string) bool {
	for i := range len(s) {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

func uniform(s string) bool { return strings.Count(s, s[:1]) == len(s) }
