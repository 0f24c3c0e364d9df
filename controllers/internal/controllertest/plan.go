package controllertest

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/better-compute/join-operator/test/pgtest"
)

// Statement is a query and its parameters.
type Statement struct {
	SQL  string
	Args []any
}

// Indexed fails for a statement that reads a whole table though it need not: one
// that does so even where the planner is told to avoid it.
func Indexed(t *testing.T, statements map[string]Statement) {
	t.Helper()
	db := pgtest.New(t).Pool(t, pgtest.Admin)
	conn, err := db.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	if _, err := conn.Exec(t.Context(), `SET enable_seqscan = off`); err != nil {
		t.Fatal(err)
	}
	for name, s := range statements {
		rows, err := conn.Query(t.Context(), "EXPLAIN "+s.SQL, append([]any{pgx.QueryExecModeSimpleProtocol}, s.Args...)...)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
		// The cursors are one row for each follower.
		text := strings.ReplaceAll(strings.Join(plan, "\n"), "Seq Scan on cursors", "")
		if err != nil || strings.Contains(text, "Seq Scan") {
			t.Errorf("%s: %v\n%s", name, err, text)
		}
	}
}
