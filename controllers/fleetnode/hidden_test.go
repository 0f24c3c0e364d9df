package fleetnode

import (
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/better-compute/join-operator/controllers/outbox"
)

func TestNewNodesOfHiddenPoolsAreNotLookedAt(t *testing.T) {
	hidden := []types.NamespacedName{{Namespace: "factory", Name: "quiet"}}
	for name, tc := range map[string]struct {
		event outbox.Event
		want  bool
	}{
		"new in a hidden pool":      {outbox.Event{Type: "node.joined", Tenant: "factory", Data: []byte(`{"pool":"quiet"}`)}, true},
		"reclaimed in a hidden one": {outbox.Event{Type: "node.joined", Tenant: "factory", Data: []byte(`{"pool":"quiet","reclaimed":true}`)}, false},
		"new in a shown pool":       {outbox.Event{Type: "node.joined", Tenant: "factory", Data: []byte(`{"pool":"gpu"}`)}, false},
		"another tenant's pool":     {outbox.Event{Type: "node.joined", Tenant: "other", Data: []byte(`{"pool":"quiet"}`)}, false},
		"confirmed":                 {outbox.Event{Type: "node.active", Tenant: "factory", Data: []byte(`{}`)}, false},
		"no pool named":             {outbox.Event{Type: "node.joined", Tenant: "factory", Data: []byte(`{}`)}, false},
	} {
		if got := entersHidden(tc.event, hidden); got != tc.want {
			t.Errorf("%s: %t, want %t", name, got, tc.want)
		}
	}
}
