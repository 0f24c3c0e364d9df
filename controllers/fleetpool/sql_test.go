package fleetpool

import (
	"testing"

	"github.com/better-compute/join-operator/controllers/internal/controllertest"
)

func TestEveryQueryUsesAnIndex(t *testing.T) {
	controllertest.Indexed(t, map[string]controllertest.Statement{
		"withdraw": {SQL: withdrawSQL, Args: []any{"t", "gpu"}},
		"count":    {SQL: countSQL, Args: []any{"t", "gpu"}},
		"pools of": {SQL: poolsOfNodesSQL, Args: []any{[]string{"n-1", "n-2"}}},
	})
}
