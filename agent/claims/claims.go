// Package claims collects what a machine says of itself: identifiers from its
// firmware (SMBIOS, as Linux shows it in /sys/class/dmi/id) and the addresses of
// its network cards. Claims prove nothing; they help a person to tell machines
// apart, and tokens to notice that they were put into the wrong one.
package claims

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"regexp"
	"slices"
	"strings"

	"github.com/better-compute/join-operator/api/wire"
)

const (
	// maxValue is the longest value, in bytes: people see claims in terminals.
	maxValue = 256
	// maxMACAddresses keeps machines with hundreds of virtual cards short.
	maxMACAddresses = 16
)

var (
	uuidPattern = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)
	hashPattern = regexp.MustCompile(`^[0-9a-f]{64}$`)
)

// placeholders are what firmware says when nobody told it anything.
var placeholders = []string{
	"default string", "to be filled by o.e.m.", "not specified", "not applicable", "none", "unknown", "n/a",
	"system serial number", "chassis serial number", "0", "0123456789", "123456789", "invalid",
	"00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff",
	"03000200-0400-0500-0006-000700080009",
}

// Collect reads the firmware's identifiers from sys, a file system rooted at
// /sys, and takes the addresses of the given network cards that are devices of
// their own there. What is missing, unreadable or a placeholder is left out.
func Collect(sys fs.FS, cards []net.Interface) wire.Claims {
	c := wire.Claims{
		ProductUUID:  normalUUID(readLine(sys, "class/dmi/id/product_uuid")),
		SerialNumber: clean(readLine(sys, "class/dmi/id/product_serial")),
	}
	for _, card := range cards {
		if _, err := fs.Stat(sys, "class/net/"+card.Name+"/device"); err != nil {
			continue
		}
		if mac := normalMAC(card.HardwareAddr.String()); mac != "" {
			c.MACAddresses = append(c.MACAddresses, mac)
		}
	}
	slices.Sort(c.MACAddresses)
	c.MACAddresses = slices.Compact(c.MACAddresses)
	c.MACAddresses = c.MACAddresses[:min(len(c.MACAddresses), maxMACAddresses)]
	return c
}

// Override replaces claims by settings of the form name=value. An empty value
// leaves the claim out; macAddresses takes a list separated by commas.
func Override(c wire.Claims, settings []string) (wire.Claims, error) {
	for _, s := range settings {
		name, value, ok := strings.Cut(s, "=")
		if !ok {
			return c, fmt.Errorf("claim %q: want name=value", s)
		}
		if err := set(&c, name, value); err != nil {
			return c, fmt.Errorf("claim %s: %w", name, err)
		}
	}
	return c, nil
}

func set(c *wire.Claims, name, value string) error {
	switch name {
	case "productUUID":
		c.ProductUUID = normalUUID(value)
		return dropped(value, c.ProductUUID, "is not a UUID, or a placeholder")
	case "serialNumber":
		c.SerialNumber = clean(value)
		return dropped(value, c.SerialNumber, "is a placeholder")
	case "hardwareKeySHA256":
		c.HardwareKeySHA256 = strings.ToLower(value)
		if value != "" && !hashPattern.MatchString(c.HardwareKeySHA256) {
			return errors.New("is not 64 hexadecimal digits")
		}
		return nil
	case "macAddresses":
		c.MACAddresses = nil
		for m := range strings.SplitSeq(value, ",") {
			mac := normalMAC(m)
			if err := dropped(m, mac, "is not a MAC address"); err != nil {
				return err
			}
			if mac != "" {
				c.MACAddresses = append(c.MACAddresses, mac)
			}
		}
		if len(c.MACAddresses) > maxMACAddresses {
			return fmt.Errorf("more than %d", maxMACAddresses)
		}
		return nil
	default:
		return errors.New("there are productUUID, serialNumber, macAddresses and hardwareKeySHA256")
	}
}

// dropped tells a value that normalising left nothing of.
func dropped(given, kept, why string) error {
	if strings.TrimSpace(given) != "" && kept == "" {
		return errors.New(why)
	}
	return nil
}

func readLine(sys fs.FS, name string) string {
	raw, err := fs.ReadFile(sys, name)
	if err != nil {
		return ""
	}
	line, _, _ := strings.Cut(string(raw), "\n")
	return line
}

// clean keeps printable ASCII, cuts it to length, and drops placeholders.
func clean(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < 0x20 || r > 0x7e {
			return -1
		}
		return r
	}, s)
	s = strings.TrimSpace(s[:min(len(s), maxValue)])
	if slices.Contains(placeholders, strings.ToLower(s)) || strings.Trim(s, "0. -") == "" {
		return ""
	}
	return s
}

func normalUUID(s string) string {
	s = strings.ToLower(clean(s))
	if !uuidPattern.MatchString(s) {
		return ""
	}
	return s
}

// normalMAC is six bytes in lower case with colons; an address that is zero, for
// a group, or of another length names no card.
func normalMAC(s string) string {
	mac, err := net.ParseMAC(strings.TrimSpace(s))
	if err != nil || len(mac) != 6 || mac[0]&1 != 0 || !slices.ContainsFunc(mac, func(b byte) bool { return b != 0 }) {
		return ""
	}
	return mac.String()
}
