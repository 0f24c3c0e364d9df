package rows_test

import (
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/better-compute/join-operator/joinsvc/rows"
	"github.com/better-compute/join-operator/test/pgtest"
)

func TestSeveralManagersMigrateAtOnceAndAgain(t *testing.T) {
	db := pgtest.New(t, pgtest.WithoutMigration())
	for range 2 {
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				if err := rows.Migrate(t.Context(), db.URL(pgtest.Manager)); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	}
	if err := rows.Compatible(t.Context(), db.Pool(t, pgtest.Service)); err != nil {
		t.Error(err)
	}
}

func TestOnlyTheManagerMayMigrate(t *testing.T) {
	db := pgtest.New(t, pgtest.WithoutMigration())
	for _, role := range []pgtest.Role{pgtest.Service, pgtest.Keys} {
		if err := rows.Migrate(t.Context(), db.URL(role)); err == nil {
			t.Errorf("%s migrated the schema", role)
		}
	}
}

func TestADatabaseThatCannotBeReliedOnIsRefused(t *testing.T) {
	db := pgtest.New(t)
	admin := db.Pool(t, pgtest.Admin)
	exec := func(sql string) {
		t.Helper()
		if _, err := admin.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	exec(`UPDATE schema_compat SET min_reader = 1000`)
	if err := rows.Compatible(t.Context(), db.Pool(t, pgtest.Service)); !errors.Is(err, rows.ErrTooOld) {
		t.Errorf("a schema that is too new: %v", err)
	}
	exec(`UPDATE schema_compat SET min_reader = 1`)
	exec(`DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET synchronous_commit = off', current_database()); END $$`)
	if err := rows.Compatible(t.Context(), db.Pool(t, pgtest.Service)); err == nil || !strings.Contains(err.Error(), "synchronous_commit") {
		t.Errorf("a database that forgets commits: %v", err)
	}
	empty := pgtest.New(t, pgtest.WithoutMigration())
	if err := rows.Compatible(t.Context(), empty.Pool(t, pgtest.Service)); err == nil {
		t.Error("a database without a schema is taken")
	}
}

// Every transaction lives under the same timeouts.
func TestConnectionsHaveTheirTimeouts(t *testing.T) {
	pool := pgtest.New(t).Pool(t, pgtest.Service)
	for name, want := range map[string]string{
		"lock_timeout": "2s", "statement_timeout": "5s", "idle_in_transaction_session_timeout": "10s",
		"transaction_isolation": "read committed", "search_path": "\"join\"",
	} {
		var got string
		if err := pool.QueryRow(t.Context(), `SELECT current_setting($1)`, name).Scan(&got); err != nil {
			t.Fatal(err)
		}
		if strings.Trim(got, `"`) != strings.Trim(want, `"`) {
			t.Errorf("%s is %s, want %s", name, got, want)
		}
	}
}
