// Package rows is the schema of the database: its migrations, the roles of each
// process, and how a process opens it. What is written into the rows stands
// beside the code that decides it.
package rows

import (
	"context"
	"embed"
	_ "embed" // for RolesSQL
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
)

// RolesSQL makes the schema and the roles of all processes. An administrator
// runs it once in a new database, and may run it again.
//
//go:embed roles.sql
var RolesSQL string

//go:embed migrations/*.sql
var migrations embed.FS

// reader is the schema that this release was written for; see Compatible.
const reader = 1

// ErrTooOld is returned where the schema is of a release that this binary is
// too old to read.
var ErrTooOld = errors.New("the database's schema is newer than this release can read")

// ErrForgetful is returned where the database may lose what it committed.
var ErrForgetful = errors.New("the database runs with synchronous_commit=off: a commit could be forgotten after its certificate was given out")

// Migrate brings the schema up to this release. It logs in as the manager and
// assumes the schema's owner for the migration alone; an advisory lock keeps
// several managers from doing it at once.
func Migrate(ctx context.Context, url string) error {
	cfg, err := pgx.ParseConfig(url)
	if err != nil {
		return fmt.Errorf("database url: %w", err)
	}
	cfg.RuntimeParams["role"] = "join_schema"
	cfg.RuntimeParams["search_path"] = "join"
	db := stdlib.OpenDB(*cfg)
	defer db.Close()
	files, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return err
	}
	locker, err := lock.NewPostgresSessionLocker()
	if err != nil {
		return err
	}
	p, err := goose.NewProvider(goose.DialectPostgres, db, files, goose.WithSessionLocker(locker))
	if err != nil {
		return err
	}
	if _, err := p.Up(ctx); err != nil {
		return fmt.Errorf("migrate the schema: %w", err)
	}
	return nil
}

// Options are the limits of one process's connections.
type Options struct {
	// MaxConns caps the pool; zero takes the driver's default.
	MaxConns int32
}

// Open opens a pool with the timeouts that every transaction here lives under:
// lock 2 s, statement 5 s, idle in transaction 10 s.
func Open(ctx context.Context, url string, o Options) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, fmt.Errorf("database url: %w", err)
	}
	p := cfg.ConnConfig.RuntimeParams
	p["search_path"] = "join"
	p["lock_timeout"] = "2s"
	p["statement_timeout"] = "5s"
	p["idle_in_transaction_session_timeout"] = "10s"
	p["default_transaction_isolation"] = "read committed"
	// Postgres keeps a statement's plan. One made while a table was empty scans it
	// from end to end until the next ANALYZE, and a fleet may come in before that.
	p["enable_seqscan"] = "off"
	if o.MaxConns > 0 {
		cfg.MaxConns = o.MaxConns
	}
	if cfg.ConnConfig.ConnectTimeout == 0 {
		cfg.ConnConfig.ConnectTimeout = time.Second
	}
	return pgxpool.NewWithConfig(ctx, cfg)
}

// Compatible refuses a schema that this release does not know, and a database
// that may forget what it committed.
func Compatible(ctx context.Context, pool *pgxpool.Pool) error {
	var minReader int
	var sync string
	err := pool.QueryRow(ctx, `SELECT min_reader, current_setting('synchronous_commit') FROM schema_compat`).Scan(&minReader, &sync)
	switch {
	case err != nil:
		return fmt.Errorf("read the schema's version (has the manager migrated it?): %w", err)
	case minReader > reader:
		return fmt.Errorf("%w: it wants a reader of version %d, this is %d", ErrTooOld, minReader, reader)
	case sync == "off":
		return ErrForgetful
	}
	return nil
}
