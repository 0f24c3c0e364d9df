package keys

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/better-compute/join-operator/joinsvc/keyring"
)

const (
	lockSQL   = `SELECT pg_try_advisory_lock(hashtextextended('join/keys', 0))`
	unlockSQL = `SELECT pg_advisory_unlock(hashtextextended('join/keys', 0))`
	nowSQL    = `SELECT join_now()`

	// Of certificates of one CA key the newest speaks; of CAs the newest comes first.
	nodeCAsSQL = `SELECT der FROM (
	    SELECT DISTINCT ON (ski) name, der, not_after FROM issuers WHERE not_after > join_now() ORDER BY ski, not_after DESC
	  ) newest ORDER BY length(name) DESC, name DESC, not_after DESC`

	// A replica that has not said anything for so long does not run.
	replicasSQL = `SELECT id, keys FROM replicas WHERE seen_at > join_now() - make_interval(secs => $1) ORDER BY id`

	historySQL = `SELECT payload, created_at FROM bundles ORDER BY generation DESC LIMIT 64`

	publishSQL = `INSERT INTO bundles (generation, payload, jws) VALUES ($1, $2, $3)`
	eventSQL   = `INSERT INTO events (type, tenant, data) VALUES ('bundle.published', $1, $2)`
	auditSQL   = `INSERT INTO audit_log (actor, action, tenant, detail) VALUES ('system:keys', 'keys.rotate', $1, $2)`
	notifySQL  = `SELECT pg_notify('join_events', '')`
)

// ErrBusy is returned while another run is under way.
var ErrBusy = errors.New("another run of the keys job is under way")

// lock keeps other runs away until unlock is called.
func lock(ctx context.Context, db *pgxpool.Pool) (unlock func(), err error) {
	conn, err := db.Acquire(ctx)
	if err != nil {
		return nil, fmt.Errorf("connect to the database: %w", err)
	}
	var mine bool
	if err := conn.QueryRow(ctx, lockSQL).Scan(&mine); err != nil || !mine {
		conn.Release()
		if err == nil {
			err = ErrBusy
		}
		return nil, err
	}
	return func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer cancel()
		if _, err := conn.Exec(ctx, unlockSQL); err != nil {
			_ = conn.Conn().Close(ctx) // which unlocks as well
		}
		conn.Release()
	}, nil
}

func databaseTime(ctx context.Context, db *pgxpool.Pool) (now time.Time, err error) {
	if err := db.QueryRow(ctx, nowSQL).Scan(&now); err != nil {
		return now, fmt.Errorf("read the database's time: %w", err)
	}
	return now, nil
}

func nodeCAs(ctx context.Context, db *pgxpool.Pool) ([][]byte, error) {
	rows, err := db.Query(ctx, nodeCAsSQL)
	if err != nil {
		return nil, fmt.Errorf("read the node CAs: %w", err)
	}
	ders, err := pgx.CollectRows(rows, pgx.RowTo[[]byte])
	if err != nil {
		return nil, fmt.Errorf("read the node CAs: %w", err)
	}
	return ders, nil
}

// lacking is which running replicas do not have all of the keys.
func lacking(ctx context.Context, db *pgxpool.Pool, kids []string) ([]string, error) {
	rows, err := db.Query(ctx, replicasSQL, keyring.Alive.Seconds())
	if err != nil {
		return nil, fmt.Errorf("read the replicas: %w", err)
	}
	var id string
	var has []string
	var out []string
	_, err = pgx.ForEachRow(rows, []any{&id, &has}, func() error {
		for _, kid := range kids {
			if !slices.Contains(has, kid) {
				out = append(out, id)
				break
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the replicas: %w", err)
	}
	return out, nil
}

// readHistory is the newest generations, newest first.
func readHistory(ctx context.Context, db *pgxpool.Pool) ([]generation, error) {
	rows, err := db.Query(ctx, historySQL)
	if err != nil {
		return nil, fmt.Errorf("read the bundles: %w", err)
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (generation, error) {
		var g generation
		var payload []byte
		if err := row.Scan(&payload, &g.publishedAt); err != nil {
			return g, err
		}
		if err := json.Unmarshal(payload, &g.bundle); err != nil {
			return g, fmt.Errorf("a published bundle cannot be read: %w", err)
		}
		return g, nil
	})
}

// audit leaves what was done to keys.
func audit(ctx context.Context, db *pgxpool.Pool, tenant string, detail map[string]any) error {
	raw, err := json.Marshal(detail)
	if err != nil {
		return err
	}
	if _, err := db.Exec(ctx, auditSQL, tenant, raw); err != nil {
		return fmt.Errorf("audit: %w", err)
	}
	return nil
}

// publish stores a generation with its event. A generation is never replaced.
func publish(ctx context.Context, db *pgxpool.Pool, tenant string, number int, payload []byte, jws string) error {
	event, err := json.Marshal(map[string]any{"generation": number})
	if err != nil {
		return err
	}
	err = pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, publishSQL, number, payload, jws); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, eventSQL, tenant, event); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, notifySQL)
		return err
	})
	var pg *pgconn.PgError
	if errors.As(err, &pg) && pg.Code == "23505" { // unique_violation
		return fmt.Errorf("generation %d of the bundle is there already: %w", number, err)
	}
	if err != nil {
		return fmt.Errorf("store generation %d of the bundle: %w", number, err)
	}
	return nil
}
