package tenant

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	tenantsSQL = `SELECT name FROM tenants WHERE state <> 'gone'`

	lockSQL = `SELECT uid, state, root FROM tenants WHERE name = $1 FOR UPDATE`

	// Nodes of a tenant stay when its namespace goes; so does what they hold.
	leftSQL = `SELECT EXISTS (SELECT FROM nodes WHERE tenant = $1 AND state <> 'retired')
	    OR EXISTS (SELECT FROM node_certs WHERE tenant = $1 AND not_after > join_now())`

	putSQL = `INSERT INTO tenants (name, uid, state, root) VALUES ($1, $2, $3, $4)
	ON CONFLICT (name) DO UPDATE SET uid = excluded.uid, state = excluded.state, root = excluded.root, changed_at = join_now()`

	// There is one root tenant.
	dethroneSQL = `UPDATE tenants SET root = false WHERE root AND name <> $1`

	// Whoever waited in a namespace that is gone waits for nobody; a person of the
	// namespace that comes after it under the same name does not decide for it.
	endRequestsSQL = `UPDATE join_requests SET ended = 'Expired', ended_at = join_now()
	WHERE ended IS NULL AND (namespace = $1 OR tenant = $1 OR decided_tenant = $1)`
)

func tenants(ctx context.Context, db *pgxpool.Pool) ([]string, error) {
	rows, err := db.Query(ctx, tenantsSQL)
	if err != nil {
		return nil, fmt.Errorf("read the tenants: %w", err)
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("read the tenants: %w", err)
	}
	return names, nil
}

// settle brings the row of a name to what next says, in one transaction, and
// returns it as it was and as it is.
func settle(ctx context.Context, db *pgxpool.Pool, name string, ns namespace) (before, after *row, err error) {
	err = pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		if before, err = lock(ctx, tx, name); err != nil {
			return err
		}
		old := false
		another := before != nil && ns.uid != "" && before.uid != ns.uid
		if another {
			if err := tx.QueryRow(ctx, leftSQL, name).Scan(&old); err != nil {
				return fmt.Errorf("look for what is left: %w", err)
			}
		}
		after = next(ns, before, old)
		if after == nil || (before != nil && *before == *after) {
			return nil
		}
		if after.state == gone || another {
			if _, err := tx.Exec(ctx, endRequestsSQL, name); err != nil {
				return fmt.Errorf("end its join requests: %w", err)
			}
		}
		if after.root {
			if _, err := tx.Exec(ctx, dethroneSQL, name); err != nil {
				return fmt.Errorf("make it the one root tenant: %w", err)
			}
		}
		_, err := tx.Exec(ctx, putSQL, name, after.uid, after.state, after.root)
		return err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("settle tenant %s: %w", name, err)
	}
	return before, after, nil
}

func lock(ctx context.Context, tx pgx.Tx, name string) (*row, error) {
	var r row
	err := tx.QueryRow(ctx, lockSQL, name).Scan(&r.uid, &r.state, &r.root)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("lock the row: %w", err)
	}
	return &r, nil
}
