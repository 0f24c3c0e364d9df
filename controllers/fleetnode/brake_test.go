package fleetnode

import (
	"strings"
	"testing"
)

func TestBrake(t *testing.T) {
	const burst = "k3xq7a"
	on := &tripped{burst}
	for _, c := range []struct {
		name    string
		s       situation
		want    verdict
		tripped string
	}{
		{name: "one of many", s: situation{wanted: 1, left: 1000}, want: goOn},
		{name: "twenty of twenty", s: situation{wanted: 20, left: 20}, want: goOn},
		{name: "twenty one of forty", s: situation{wanted: 21, left: 40}, want: hold, tripped: "fresh"},
		{name: "twenty one of a large fleet", s: situation{wanted: 21, left: 420}, want: goOn},
		{name: "just above one in twenty", s: situation{wanted: 21, left: 419}, want: hold, tripped: "fresh"},
		{name: "those that went count, and are no longer left", s: situation{wanted: 1, done: 20, left: 399}, want: hold, tripped: "fresh"},
		{name: "those that went count in the fleet too", s: situation{wanted: 1, done: 20, left: 400}, want: goOn},
		{name: "the CRD goes", s: situation{wanted: 1, left: 1000, crdGoing: true}, want: hold, tripped: "fresh"},
		{name: "an old answer does not answer a new burst", s: situation{wanted: 50, left: 50, annotation: "confirm-k3xq7a"}, want: hold, tripped: "fresh"},
		{name: "nor later", s: situation{brake: on, annotation: "confirm-aaaaaa"}, want: hold, tripped: burst},
		{name: "nothing said", s: situation{brake: on}, want: hold, tripped: burst},
		{name: "confirmed", s: situation{brake: on, annotation: "confirm-k3xq7a"}, want: goOnConfirmed, tripped: burst},
		{name: "cancelled", s: situation{brake: on, annotation: "cancel-k3xq7a"}, want: cancel, tripped: burst},
		{name: "a word that names no burst is no answer", s: situation{brake: on, annotation: "confirm"}, want: hold, tripped: burst},
		{name: "anything else is no answer", s: situation{brake: on, annotation: "yes-k3xq7a"}, want: hold, tripped: burst},
		{name: "a held one stays held though the window is over", s: situation{brake: on, wanted: 1, left: 1000}, want: hold, tripped: burst},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, b := decide(c.s, func() string { return "fresh" })
			name := ""
			if b != nil {
				name = b.burst
			}
			if got != c.want || name != c.tripped {
				t.Errorf("decide = %v, %q; want %v, %q", got, name, c.want, c.tripped)
			}
		})
	}
}

func TestHoldMessageNamesTheCommand(t *testing.T) {
	b := &tripped{"k3xq7a"}
	const command = "kubectl annotate --overwrite namespace acme join.better-compute.dev/held-deletions=confirm-k3xq7a"
	if m := holdMessage("acme", "", b); !strings.Contains(m, command) || strings.Contains(m, "another burst") {
		t.Error(m)
	}
	if m := holdMessage("acme", "confirm-aaaaaa", b); !strings.Contains(m, command) || !strings.Contains(m, "another burst") {
		t.Error(m)
	}
}
