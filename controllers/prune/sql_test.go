package prune

import (
	"testing"

	"github.com/better-compute/join-operator/controllers/internal/controllertest"
)

func TestLargeTablesArePrunedByIndex(t *testing.T) {
	controllertest.Indexed(t, map[string]controllertest.Statement{
		"attestation_uses": {SQL: usesSQL, Args: []any{"0", 5000}},
		"events":           {SQL: eventsSQL, Args: []any{"168h", 5000}},
		"join_requests":    {SQL: requestsSQL, Args: []any{"168h", 5000}},
		"node_certs":       {SQL: certsSQL, Args: []any{"8760h", 5000}},
	})
}
