package fleetnode

import (
	"strings"
	"testing"
)

func TestBrake(t *testing.T) {
	for _, c := range []struct {
		name    string
		s       situation
		want    verdict
		tripped bool
		armed   bool
	}{
		{name: "one of many", s: situation{wanted: 1, left: 1000}, want: goOn},
		{name: "twenty of twenty", s: situation{wanted: 20, left: 20}, want: goOn},
		{name: "twenty one of forty", s: situation{wanted: 21, left: 40}, want: hold, tripped: true, armed: true},
		{name: "twenty one of a large fleet", s: situation{wanted: 21, left: 420}, want: goOn},
		{name: "just above one in twenty", s: situation{wanted: 21, left: 419}, want: hold, tripped: true, armed: true},
		{name: "those that went count, and are no longer left", s: situation{wanted: 1, done: 20, left: 399}, want: hold, tripped: true, armed: true},
		{name: "those that went count in the fleet too", s: situation{wanted: 1, done: 20, left: 400}, want: goOn},
		{name: "the CRD goes", s: situation{wanted: 1, left: 1000, crdGoing: true}, want: hold, tripped: true, armed: true},
		{name: "an old annotation does not answer a new burst", s: situation{wanted: 50, left: 50, annotation: "confirm"}, want: hold, tripped: true},
		{name: "nor later", s: situation{brake: &tripped{}, annotation: "confirm"}, want: hold, tripped: true},
		{name: "taken off, it may be set anew", s: situation{brake: &tripped{}}, want: hold, tripped: true, armed: true},
		{name: "confirmed", s: situation{brake: &tripped{armed: true}, annotation: "confirm"}, want: goOnConfirmed, tripped: true, armed: true},
		{name: "cancelled", s: situation{brake: &tripped{armed: true}, annotation: "cancel"}, want: cancel, tripped: true, armed: true},
		{name: "anything else is no answer", s: situation{brake: &tripped{armed: true}, annotation: "yes"}, want: hold, tripped: true, armed: true},
		{name: "a held one stays held though the window is over", s: situation{brake: &tripped{armed: true}, wanted: 1, left: 1000}, want: hold, tripped: true, armed: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, b := decide(c.s)
			if got != c.want || (b != nil) != c.tripped || (b != nil && b.armed != c.armed) {
				t.Errorf("decide = %v, %+v; want %v, tripped %t, armed %t", got, b, c.want, c.tripped, c.armed)
			}
		})
	}
}

func TestHoldMessageNamesTheCommand(t *testing.T) {
	const command = "kubectl annotate namespace acme join.better-compute.dev/held-deletions=confirm"
	if m := holdMessage("acme", "", &tripped{armed: true}); !strings.Contains(m, command) || strings.Contains(m, "remove it first") {
		t.Error(m)
	}
	if m := holdMessage("acme", "confirm", &tripped{}); !strings.Contains(m, "remove it first") {
		t.Error(m)
	}
}
