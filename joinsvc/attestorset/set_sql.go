package attestorset

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	// What is known already is not sent again.
	readSQL = `SELECT c.name, c.version, p.at, CASE WHEN k.version = c.version AND k.at = p.at THEN NULL ELSE c.spec END
	FROM attestor_configs c CROSS JOIN LATERAL (SELECT (extract(epoch FROM c.published_at) * 1000000)::bigint AS at) p
	LEFT JOIN unnest($1::text[], $2::bigint[], $3::bigint[]) AS k (name, version, at) ON k.name = c.name
	ORDER BY c.name`

	// The row is the keyring's to make and to take away; it writes nothing where
	// nothing changed.
	reportSQL = `UPDATE replicas SET attestors = $2 WHERE id = $1 AND attestors IS DISTINCT FROM $2`
)

// config is a published configuration. spec is nil where the version is known.
type config struct {
	name                 string
	version, publishedAt int64
	spec                 []byte
}

func readConfigs(ctx context.Context, db *pgxpool.Pool, known map[string]entry) ([]config, error) {
	names, versions, times := make([]string, 0, len(known)), make([]int64, 0, len(known)), make([]int64, 0, len(known))
	for name, e := range known {
		names, versions, times = append(names, name), append(versions, e.published), append(times, e.publishedAt)
	}
	rows, err := db.Query(ctx, readSQL, names, versions, times)
	if err != nil {
		return nil, fmt.Errorf("read the configurations of attestors: %w", err)
	}
	read, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (config, error) {
		var c config
		err := row.Scan(&c.name, &c.version, &c.publishedAt, &c.spec)
		return c, err
	})
	if err != nil {
		return nil, fmt.Errorf("read the configurations of attestors: %w", err)
	}
	return read, nil
}

// standing is what a replica says of one configuration.
type standing struct {
	Version int64 `json:"version"`
	// Failed is the version that it could not build, and Error why.
	Failed int64  `json:"failed,omitempty"`
	Error  string `json:"error,omitempty"`
}

// report lets the manager know by what this replica decides.
func report(ctx context.Context, db *pgxpool.Pool, replica string, entries map[string]entry) error {
	all := make(map[string]standing, len(entries))
	for name, e := range entries {
		all[name] = standing{Version: e.inForce}
		if e.err != "" {
			all[name] = standing{e.inForce, e.published, e.err}
		}
	}
	text, err := json.Marshal(all)
	if err != nil {
		return err
	}
	if _, err := db.Exec(ctx, reportSQL, replica, text); err != nil {
		return fmt.Errorf("report the configurations of attestors: %w", err)
	}
	return nil
}
