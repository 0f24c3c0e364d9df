package jointoken

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/better-compute/join-operator/controllers/internal/controllertest"
)

func TestEveryQueryUsesAnIndex(t *testing.T) {
	controllertest.Indexed(t, map[string]controllertest.Statement{
		"world":   {SQL: worldSQL, Args: []any{"t", "gpu", "uid"}},
		"lock":    {SQL: lockTokenSQL, Args: []any{"aaaaaaaaaaaa"}},
		"slots":   {SQL: countSlotsSQL, Args: []any{"aaaaaaaaaaaa"}},
		"grow":    {SQL: growTokenSQL, Args: []any{"aaaaaaaaaaaa", 7}},
		"revoke":  {SQL: revokeSQL, Args: []any{"t", "first", "uid"}},
		"orphans": {SQL: orphansSQL, Args: []any{"t", "first", "uid"}},
	})
}

func TestUsesAreSpreadEvenly(t *testing.T) {
	slots, shares := spread(10, 2, 4)
	if d := cmp.Diff([]int16{2, 3, 4, 5}, slots); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff([]int32{3, 3, 2, 2}, shares); d != "" {
		t.Error(d)
	}
}
