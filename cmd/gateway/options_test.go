package main

import (
	"io"
	"slices"
	"testing"
)

func TestDefaultsAreProductions(t *testing.T) {
	o, err := parseOptions(nil, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if o.refusalBurst != 600 || o.refusalRate != 5 {
		t.Errorf("a source has %v refusals, refilled at %v/s", o.refusalBurst, o.refusalRate)
	}
	if o.pprof || o.opsListen != "" || o.trustedHops != 0 || len(o.proxies) != 0 {
		t.Errorf("what must be asked for is on: %+v", o)
	}
}

func TestOptions(t *testing.T) {
	o, err := parseOptions([]string{"--upstream", "https://a:1", "--upstream=https://b:1", "--proxy-protocol-from", "10.1.2.3/8", "--trusted-hops", "2"}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(o.upstreams, []string{"https://a:1", "https://b:1"}) || o.proxies.String() != "[10.0.0.0/8]" || o.trustedHops != 2 {
		t.Errorf("%+v", o)
	}
	for _, bad := range [][]string{{"more"}, {"--trusted-hops", "-1"}, {"--proxy-protocol-from", "10.0.0.1"}, {"--pprof"}, {"--unknown"}} {
		if _, err := parseOptions(bad, io.Discard); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}
