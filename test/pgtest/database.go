package pgtest

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/better-compute/join-operator/hack/controlplane"
	"github.com/better-compute/join-operator/joinsvc/rows"
)

// Role is who connects.
type Role string

// The roles of joinsvc/rows, and the server's administrator.
const (
	Admin   Role = "postgres"
	Manager Role = "join_manager"
	Service Role = "join_service"
	Keys    Role = "join_keys"
)

// rolePassword is every role's on a test server, which listens on loopback only
// and whose administrator's password is random.
const rolePassword = "join-test"

// DB is one test's own database.
type DB struct {
	name  string
	admin *url.URL
}

// Option changes what New makes.
type Option func(*options)

type options struct {
	server *Server
	empty  bool
}

// OnServer puts the database onto a server of the test's own.
func OnServer(s *Server) Option { return func(o *options) { o.server = s } }

// WithoutMigration leaves the schema empty: roles.sql has run and nothing else.
func WithoutMigration() Option { return func(o *options) { o.empty = true } }

// New makes a database that is migrated to the newest schema and dropped when the
// test ends.
func New(tb testing.TB, opts ...Option) *DB {
	tb.Helper()
	var o options
	for _, opt := range opts {
		opt(&o)
	}
	var base *url.URL
	if o.server != nil {
		base = o.server.url
	} else {
		var err error
		if base, err = shared(); err != nil {
			tb.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(tb.Context(), time.Minute)
	defer cancel()
	template, err := makeTemplate(ctx, base, !o.empty)
	if err != nil {
		tb.Fatalf("template database: %v", err)
	}
	db := &DB{name: "t_" + strings.ToLower(rand.Text()[:16]), admin: base}
	if err := db.exec(ctx, "postgres", fmt.Sprintf(`CREATE DATABASE %s TEMPLATE %s`, db.name, template)); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		// The test may have stopped its server for good.
		_ = db.exec(ctx, "postgres", fmt.Sprintf(`DROP DATABASE IF EXISTS %s WITH (FORCE)`, db.name))
	})
	return db
}

// URL is how a role connects to the database.
func (db *DB) URL(role Role) string {
	u := *db.admin
	u.Path = "/" + db.name
	if role != Admin {
		u.User = url.UserPassword(string(role), rolePassword)
	}
	return u.String()
}

// Pool opens the database as a role, as the processes do (rows.Open), and closes
// it when the test ends. An administrator's pool sees the schema join too.
func (db *DB) Pool(tb testing.TB, role Role) *pgxpool.Pool {
	tb.Helper()
	pool, err := rows.Open(tb.Context(), db.URL(role), rows.Options{})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(pool.Close)
	return pool
}

// SetNow stops the database's clock: from now on join_now() answers t, in every
// connection. Transactions that are open see it at their next statement.
func (db *DB) SetNow(tb testing.TB, t time.Time) {
	tb.Helper()
	if err := db.exec(tb.Context(), db.name, simulatedClock,
		fmt.Sprintf(`UPDATE "join".test_clock SET stopped = '%s'`, t.UTC().Format(time.RFC3339Nano))); err != nil {
		tb.Fatalf("set the database's clock: %v", err)
	}
}

// Advance moves the database's clock by d; one that runs is stopped first.
func (db *DB) Advance(tb testing.TB, d time.Duration) {
	tb.Helper()
	db.SetNow(tb, db.Now(tb).Add(d))
}

// Now is what join_now() answers.
func (db *DB) Now(tb testing.TB) time.Time {
	tb.Helper()
	conn, err := pgx.Connect(tb.Context(), db.URL(Admin))
	if err != nil {
		tb.Fatal(err)
	}
	defer conn.Close(context.Background())
	var now time.Time
	if err := conn.QueryRow(tb.Context(), `SELECT "join".join_now()`).Scan(&now); err != nil {
		tb.Fatal(err)
	}
	return now
}

// simulatedClock replaces join_now(); it may run again. The function reads the
// table as the role that calls it, so everybody may read it.
const simulatedClock = `
CREATE TABLE IF NOT EXISTS "join".test_clock (singleton boolean PRIMARY KEY DEFAULT true CHECK (singleton), stopped timestamptz);
INSERT INTO "join".test_clock DEFAULT VALUES ON CONFLICT DO NOTHING;
GRANT SELECT ON "join".test_clock TO PUBLIC;
CREATE OR REPLACE FUNCTION "join".join_now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE
  RETURN coalesce((SELECT stopped FROM "join".test_clock), transaction_timestamp());
`

// exec runs statements as administrator in the named database.
func (db *DB) exec(ctx context.Context, database string, statements ...string) error {
	conn, err := connect(ctx, db.admin, database)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	for _, s := range statements {
		if _, err := conn.Exec(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

func connect(ctx context.Context, server *url.URL, database string) (*pgx.Conn, error) {
	u := *server
	u.Path = "/" + database
	return pgx.Connect(ctx, u.String())
}

// makeTemplate makes the database that New copies, once per server and schema;
// several test binaries may try at the same time.
func makeTemplate(ctx context.Context, server *url.URL, migrated bool) (string, error) {
	name, err := templateName(migrated)
	if err != nil {
		return "", err
	}
	conn, err := connect(ctx, server, "postgres")
	if err != nil {
		return "", err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if _, err := conn.Exec(ctx, `SELECT pg_advisory_lock(hashtext('join-pgtest-template'))`); err != nil {
		return "", err
	}
	var exists bool
	if err := conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)`, name).Scan(&exists); err != nil || exists {
		return name, err
	}
	making := name + "_making"
	for _, s := range []string{`DROP DATABASE IF EXISTS ` + making, `CREATE DATABASE ` + making} {
		if _, err := conn.Exec(ctx, s); err != nil {
			return "", err
		}
	}
	db := &DB{name: making, admin: server}
	if err := db.exec(ctx, making, rows.RolesSQL); err != nil {
		return "", fmt.Errorf("roles.sql: %w", err)
	}
	for _, role := range []Role{Manager, Service, Keys} {
		if err := db.exec(ctx, making, fmt.Sprintf(`ALTER ROLE %s PASSWORD '%s'`, role, rolePassword)); err != nil {
			return "", err
		}
	}
	if migrated {
		if err := rows.Migrate(ctx, db.URL(Manager)); err != nil {
			return "", err
		}
	}
	// Renamed last: a template that exists is whole.
	_, err = conn.Exec(ctx, fmt.Sprintf(`ALTER DATABASE %s RENAME TO %s`, making, name))
	return name, err
}

// templateName tells schemas apart, for servers that outlive a change of one.
func templateName(migrated bool) (string, error) {
	h := sha256.New()
	fmt.Fprintf(h, "%t\x00%s\x00", migrated, rows.RolesSQL)
	root, err := controlplane.RepositoryRoot()
	if err != nil {
		return "", err
	}
	files, err := filepath.Glob(filepath.Join(root, "joinsvc", "rows", "migrations", "*.sql"))
	if err != nil {
		return "", err
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(h, "%s\x00%d\x00%s", filepath.Base(file), len(b), b)
	}
	return "join_template_" + hex.EncodeToString(h.Sum(nil)[:8]), nil
}
