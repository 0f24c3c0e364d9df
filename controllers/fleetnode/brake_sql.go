package fleetnode

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"k8s.io/apimachinery/pkg/types"
)

const (
	// Reconcilers of one tenant count one after the other.
	lockBrakeSQL = `SELECT pg_advisory_xact_lock(hashtextextended('join/brake/' || $1::text, 0))`

	readBrakeSQL = `SELECT burst FROM node_brakes WHERE tenant = $1`

	storeBrakeSQL = `INSERT INTO node_brakes (tenant, burst) VALUES ($1, $2)`

	releaseBrakeSQL = `DELETE FROM node_brakes WHERE tenant = $1`

	trippedSQL = `SELECT tenant FROM node_brakes`

	doneSQL = `SELECT count(*) FROM audit_log WHERE tenant = $1 AND at > join_now() - interval '` + brakeWindow + `'
	  AND action IN ('node.retire', 'node.delete') AND NOT detail ? '` + confirmedKey + `'`

	// No more rows are counted than matter.
	leftSQL = `SELECT count(*) FROM (SELECT FROM nodes WHERE tenant = $1 AND state IN ('adopting', 'active') LIMIT $2) AS n`
)

// outcome is what became of a deletion or retirement.
type outcome struct {
	verdict verdict
	// brake is what holds the node, and tripped is true where it did so first now.
	brake   *tripped
	tripped bool
}

// braked does what is wanted of a node unless the brake holds it, all in one
// transaction. wanted counts the tenant's nodes that are to go; it is asked only
// where it matters.
func braked(ctx context.Context, db *pgxpool.Pool, key types.NamespacedName, annotation string, crdGoing bool,
	wanted func() (int64, error), do func(ctx context.Context, tx pgx.Tx, key types.NamespacedName, confirmed bool) error,
) (outcome, error) {
	var out outcome
	err := pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, lockBrakeSQL, key.Namespace); err != nil {
			return err
		}
		s := situation{annotation: annotation, crdGoing: crdGoing}
		var burst string
		switch err := tx.QueryRow(ctx, readBrakeSQL, key.Namespace).Scan(&burst); {
		case errors.Is(err, pgx.ErrNoRows):
			if err := count(ctx, tx, key.Namespace, &s, wanted); err != nil {
				return err
			}
		case err != nil:
			return err
		default:
			s.brake = &tripped{burst}
		}
		out.verdict, out.brake = decide(s, newBurst)
		if out.tripped = out.brake != nil && s.brake == nil; out.tripped {
			if _, err := tx.Exec(ctx, storeBrakeSQL, key.Namespace, out.brake.burst); err != nil {
				return err
			}
		}
		if out.verdict == goOn || out.verdict == goOnConfirmed {
			return do(ctx, tx, key, out.verdict == goOnConfirmed)
		}
		return nil
	})
	if err != nil {
		return outcome{}, fmt.Errorf("take node %s out: %w", key, err)
	}
	return out, nil
}

func count(ctx context.Context, tx pgx.Tx, tenant string, s *situation, wanted func() (int64, error)) error {
	var err error
	if s.wanted, err = wanted(); err != nil {
		return err
	}
	if err := tx.QueryRow(ctx, doneSQL, tenant).Scan(&s.done); err != nil {
		return err
	}
	n := s.done + s.wanted
	if n <= brakeCount {
		return nil
	}
	return tx.QueryRow(ctx, leftSQL, tenant, n*brakeShare+1).Scan(&s.left)
}

// releaseBrake ends a hold: nothing is left of the burst.
func releaseBrake(ctx context.Context, db *pgxpool.Pool, tenant string) error {
	if _, err := db.Exec(ctx, releaseBrakeSQL, tenant); err != nil {
		return fmt.Errorf("release the brake of %s: %w", tenant, err)
	}
	return nil
}

func trippedBrakes(ctx context.Context, db *pgxpool.Pool) ([]string, error) {
	rows, err := db.Query(ctx, trippedSQL)
	if err != nil {
		return nil, fmt.Errorf("read the brakes: %w", err)
	}
	tenants, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("read the brakes: %w", err)
	}
	return tenants, nil
}
