package fleetnode

import (
	"testing"

	"github.com/better-compute/join-operator/controllers/internal/controllertest"
)

func TestEveryQueryUsesAnIndex(t *testing.T) {
	controllertest.Indexed(t, map[string]controllertest.Statement{
		"read":          {SQL: readNodeSQL, Args: []any{"n-1", "t"}},
		"lock":          {SQL: lockNodeSQL, Args: []any{"n-1", "t"}},
		"retire":        {SQL: retireNodeSQL, Args: []any{"n-1"}},
		"move":          {SQL: moveNodeSQL, Args: []any{"n-1", "gpu", ""}},
		"pool":          {SQL: poolExistsSQL, Args: []any{"t", "gpu"}},
		"drop bindings": {SQL: dropBindingsSQL, Args: []any{"n-1"}},
		"delete":        {SQL: deleteNodeSQL, Args: []any{"n-1"}},
		"revoke":        {SQL: revokeCertsSQL, Args: []any{"n-1", "retired"}},
		"page":          {SQL: pageSQL, Args: []any{"n-1", []string{"t"}, []string{"gpu"}, 5000}},
		"brake":         {SQL: readBrakeSQL, Args: []any{"t"}},
		"done":          {SQL: doneSQL, Args: []any{"t"}},
		"left":          {SQL: leftSQL, Args: []any{"t", 421}},
	})
}
