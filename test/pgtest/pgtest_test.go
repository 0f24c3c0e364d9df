package pgtest_test

import (
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/better-compute/join-operator/joinsvc/rows"
	"github.com/better-compute/join-operator/test/pgtest"
)

func TestEachTestHasAMigratedDatabaseOfItsOwn(t *testing.T) {
	t.Parallel()
	a, b := pgtest.New(t), pgtest.New(t)
	if _, err := a.Pool(t, pgtest.Admin).Exec(t.Context(), `INSERT INTO tenants (name, uid, state) VALUES ('t', 'u', 'active')`); err != nil {
		t.Fatal(err)
	}
	for db, want := range map[*pgtest.DB]int{a: 1, b: 0} {
		var n int
		if err := db.Pool(t, pgtest.Admin).QueryRow(t.Context(), `SELECT count(*) FROM tenants`).Scan(&n); err != nil {
			t.Fatal(err)
		}
		if n != want {
			t.Errorf("a database holds %d tenants, want %d", n, want)
		}
	}
}

func TestProcessesConnectAsTheirOwnRoles(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for _, role := range []pgtest.Role{pgtest.Manager, pgtest.Service, pgtest.Keys} {
		pool := db.Pool(t, role)
		var user string
		if err := pool.QueryRow(t.Context(), `SELECT current_user`).Scan(&user); err != nil {
			t.Fatal(err)
		}
		if user != string(role) {
			t.Errorf("connected as %s, want %s", user, role)
		}
		_, err := pool.Exec(t.Context(), `DROP TABLE schema_compat`)
		var pg *pgconn.PgError
		if !errors.As(err, &pg) || pg.Code != "42501" {
			t.Errorf("%s drops a table: %v, want insufficient privilege", role, err)
		}
	}
	if err := rows.Compatible(t.Context(), db.Pool(t, pgtest.Service)); err != nil {
		t.Error(err)
	}
}

func TestTheClockIsSimulatedForEveryRole(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	pool := db.Pool(t, pgtest.Service)
	now := func() (at time.Time) {
		t.Helper()
		if err := pool.QueryRow(t.Context(), `SELECT join_now()`).Scan(&at); err != nil {
			t.Fatal(err)
		}
		return at
	}
	if since := time.Since(now()).Abs(); since > time.Minute {
		t.Errorf("before it is set, the clock is %s off", since)
	}
	at := time.Date(2030, 1, 2, 3, 4, 5, 6000, time.UTC)
	db.SetNow(t, at)
	if got := now(); !got.Equal(at) {
		t.Errorf("join_now() = %s, want %s", got, at)
	}
	db.Advance(t, time.Hour)
	if got, want := now(), at.Add(time.Hour); !got.Equal(want) {
		t.Errorf("an hour later join_now() = %s, want %s", got, want)
	}
}

func TestAServerOfOnesOwnKeepsWhatWasCommitted(t *testing.T) {
	t.Parallel()
	server := pgtest.NewServer(t)
	db := pgtest.New(t, pgtest.OnServer(server))
	pool := db.Pool(t, pgtest.Admin)
	if _, err := pool.Exec(t.Context(), `INSERT INTO tenants (name, uid, state) VALUES ('t', 'u', 'active')`); err != nil {
		t.Fatal(err)
	}
	server.Kill()
	if err := pool.Ping(t.Context()); err == nil {
		t.Fatal("a killed server answers")
	}
	server.Start(t)
	var n int
	if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM tenants`).Scan(&n); err != nil || n != 1 {
		t.Fatalf("after the crash there are %d tenants (%v), want 1", n, err)
	}
	server.Stop()
	server.Start(t)
}
