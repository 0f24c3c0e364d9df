package claims_test

import (
	"net"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/better-compute/join-operator/agent/claims"
	"github.com/better-compute/join-operator/api/wire"
)

func sys(uuid, serial string, cards ...string) fstest.MapFS {
	m := fstest.MapFS{
		"class/dmi/id/product_uuid":   {Data: []byte(uuid)},
		"class/dmi/id/product_serial": {Data: []byte(serial)},
	}
	for _, c := range cards {
		m["class/net/"+c+"/device"] = &fstest.MapFile{}
	}
	return m
}

func card(name string, mac ...byte) net.Interface {
	return net.Interface{Name: name, HardwareAddr: mac}
}

// TestCollectNormalisesAndLeavesOutWhatSaysNothing reads several firmwares.
func TestCollectNormalisesAndLeavesOutWhatSaysNothing(t *testing.T) {
	const uuid = "4c4c4544-0042-4a10-8054-b4c04f4d3533"
	for name, c := range map[string]struct {
		sys   fstest.MapFS
		cards []net.Interface
		want  wire.Claims
	}{
		"a server": {
			sys("4C4C4544-0042-4A10-8054-B4C04F4D3533\n", " BJTM53\n", "eth0", "eth1"),
			[]net.Interface{card("eth1", 2, 0, 0, 0, 0, 9), card("eth0", 2, 0, 0, 0, 0, 1), card("docker0", 2, 0, 0, 0, 0, 7), card("lo")},
			wire.Claims{ProductUUID: uuid, SerialNumber: "BJTM53", MACAddresses: []string{"02:00:00:00:00:01", "02:00:00:00:00:09"}},
		},
		"placeholders":  {sys("03000200-0400-0500-0006-000700080009\n", "To Be Filled By O.E.M.\n"), nil, wire.Claims{}},
		"zeros":         {sys("00000000-0000-0000-0000-000000000000", "0000000"), nil, wire.Claims{}},
		"no firmware":   {fstest.MapFS{}, nil, wire.Claims{}},
		"escapes":       {sys("x\x1b[2J", "A\x1b[31mB\x00C\u00e9\n"), nil, wire.Claims{SerialNumber: "A[31mBC"}},
		"too long":      {sys("", strings.Repeat("S", 4000)), nil, wire.Claims{SerialNumber: strings.Repeat("S", 256)}},
		"group address": {sys("", "", "eth0"), []net.Interface{card("eth0", 1, 0, 0, 0, 0, 1)}, wire.Claims{}},
		"infiniband":    {sys("", "", "ib0"), []net.Interface{card("ib0", make([]byte, 20)...)}, wire.Claims{}},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, claims.Collect(c.sys, c.cards)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// TestOverrideReplacesLeavesOutAndRefuses goes through the settings.
func TestOverrideReplacesLeavesOutAndRefuses(t *testing.T) {
	base := wire.Claims{SerialNumber: "S", MACAddresses: []string{"02:00:00:00:00:01"}}
	got, err := claims.Override(base, []string{
		"serialNumber=", "productUUID=4C4C4544-0042-4A10-8054-B4C04F4D3533", "macAddresses=02-00-00-00-00-0A,02:00:00:00:00:0b",
		"hardwareKeySHA256=" + strings.Repeat("AB", 32),
	})
	want := wire.Claims{
		ProductUUID: "4c4c4544-0042-4a10-8054-b4c04f4d3533", MACAddresses: []string{"02:00:00:00:00:0a", "02:00:00:00:00:0b"},
		HardwareKeySHA256: strings.Repeat("ab", 32),
	}
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("error %v, difference %s", err, diff)
	}
	if base.SerialNumber != "S" || len(base.MACAddresses) != 1 {
		t.Error("the claims that were given changed")
	}
	for _, bad := range []string{"serialNumber", "colour=red", "productUUID=1", "macAddresses=x", "hardwareKeySHA256=ab", "macAddresses=" + strings.Repeat("02:00:00:00:00:01,", 17), "serialNumber=Default string"} {
		if _, err := claims.Override(base, []string{bad}); err == nil {
			t.Errorf("%.40q passes", bad)
		}
	}
}
