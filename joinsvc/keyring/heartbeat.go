package keyring

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	// heartbeat is how often a replica says which keys it has.
	heartbeat = 10 * time.Second
	// Alive is for how long after that it counts as running.
	Alive = time.Minute
	// forgetAfter is when the row of a replica that ended without a word goes.
	forgetAfter = time.Hour
)

const (
	reportSQL = `INSERT INTO replicas (id, keys) VALUES ($1, $2)
	  ON CONFLICT (id) DO UPDATE SET keys = excluded.keys, seen_at = excluded.seen_at`
	forgetSQL = `DELETE FROM replicas WHERE seen_at < join_now() - make_interval(secs => $1)`
	leaveSQL  = `DELETE FROM replicas WHERE id = $1`
)

// Report keeps the row of this replica in step with the keys that it has, until ctx
// ends, and then removes it. The keys job waits for that before it lets a new key
// be used. Replicas must have different ids.
func (r *Keyring) Report(ctx context.Context, db *pgxpool.Pool, replica string) {
	tick := time.NewTicker(heartbeat)
	defer tick.Stop()
	failing := false
	for {
		if err := r.report(ctx, db, replica); err != nil && ctx.Err() == nil {
			if !failing {
				r.log.Warn("this replica's keys could not be reported", "error", err)
			}
			failing = true
		} else {
			failing = false
		}
		select {
		case <-ctx.Done():
			leave, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
			defer cancel()
			if _, err := db.Exec(leave, leaveSQL, replica); err != nil {
				r.log.Warn("this replica could not sign off", "error", err)
			}
			return
		case <-tick.C:
		case <-r.changed:
		}
	}
}

func (r *Keyring) report(ctx context.Context, db *pgxpool.Pool, replica string) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if _, err := db.Exec(ctx, reportSQL, replica, r.KeyIDs()); err != nil {
		return fmt.Errorf("report keys: %w", err)
	}
	if _, err := db.Exec(ctx, forgetSQL, forgetAfter.Seconds()); err != nil {
		return fmt.Errorf("forget replicas: %w", err)
	}
	return nil
}
