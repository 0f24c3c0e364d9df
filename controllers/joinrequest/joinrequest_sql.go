package joinrequest

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"k8s.io/apimachinery/pkg/types"

	"github.com/better-compute/join-operator/api/v1alpha1"
)

const (
	readSQL = `SELECT r.id, r.namespace, r.attestor_type, r.spec, r.spec_sha256, r.capped, coalesce(r.object_uid, ''), r.last_asked_at,
	    coalesce(r.verdict, ''), coalesce(r.decided_by->>'username', ''), coalesce(r.decided_at, 'epoch'), coalesce(r.decided_pool, ''), coalesce(r.decided_tenant, ''),
	    coalesce(r.ended, ''), coalesce(r.ended_at, 'epoch'), coalesce(r.node_id, ''), coalesce(n.tenant, ''), join_now(),
	    CASE WHEN r.subject_proved THEN 0
	      WHEN r.token_id IS NOT NULL THEN (SELECT count(*) FROM join_requests o
	        WHERE o.token_id = r.token_id AND o.id <> r.id AND o.verdict IS NULL AND o.ended IS NULL)
	      ELSE (SELECT count(*) FROM join_requests o
	        WHERE o.attestor_type = r.attestor_type AND o.subject_sha256 = r.subject_sha256 AND o.id <> r.id AND o.verdict IS NULL AND o.ended IS NULL)
	    END
	FROM join_requests r LEFT JOIN nodes n ON n.id = r.node_id WHERE r.id = $1`

	// The conditions stand in the statement, so that a machine which asks or joins
	// in the same moment wins or loses as a whole. The times are those of row.go.
	expireSQL = `UPDATE join_requests SET ended = 'Expired', ended_at = join_now()
	WHERE id = $1 AND ended IS NULL
	  AND CASE WHEN verdict IS NULL THEN last_asked_at <= join_now() - $2::interval ELSE decided_at <= join_now() - $3::interval END`

	adoptSQL  = `UPDATE join_requests SET object_uid = $2 WHERE id = $1`
	forgetSQL = `UPDATE join_requests SET object_uid = NULL WHERE id = $1 AND object_uid = $2`

	recordSQL = `UPDATE join_requests SET verdict = $4, decided_by = $5, decision_message = $6,
	    decided_pool = nullif($7, ''), decided_tenant = nullif($8, ''), decided_at = join_now()
	WHERE id = $1 AND verdict IS NULL AND ended IS NULL AND spec_sha256 = $2 AND object_uid = $3
	RETURNING namespace`

	decidedEventSQL = `INSERT INTO events (type, tenant, data)
	VALUES ('join.decided', $1, jsonb_build_object('id', $2::text, 'verdict', $3::text, 'by', $4::text))`

	auditSQL = `INSERT INTO audit_log (actor, action, tenant, detail) VALUES ($1, $2, $3, $4)`

	// All live requests, for a look at everything.
	liveSQL = `SELECT id, namespace FROM join_requests WHERE ended IS NULL AND (verdict IS NOT NULL OR NOT capped)`

	// What somebody has to look at: no object yet, come to its deadline, just
	// ended, or shown for long enough. The times are those of row.go.
	dueSQL = `SELECT id, namespace FROM join_requests WHERE ended IS NULL AND (
	      (verdict IS NULL AND NOT capped AND object_uid IS NULL)
	   OR (verdict IS NULL AND last_asked_at <= join_now() - $1::interval)
	   OR (verdict IS NOT NULL AND decided_at <= join_now() - $2::interval)
	   OR (verdict = 'Rejected' AND object_uid IS NOT NULL AND decided_at <= join_now() - $3::interval))
	UNION ALL
	SELECT id, namespace FROM join_requests WHERE ended IS NOT NULL AND object_uid IS NOT NULL
	  AND (ended_at > join_now() - interval '1 minute' OR ended_at <= join_now() - $3::interval)`

	namedSQL = `SELECT id, namespace FROM join_requests WHERE id = ANY($1)`

	cappedSQL = `SELECT id, namespace, source, coalesce(token_id, '') FROM join_requests
	WHERE verdict IS NULL AND ended IS NULL AND capped ORDER BY first_seen_at LIMIT 5000`

	shownSQL = `SELECT id, namespace, source, coalesce(token_id, '') FROM join_requests
	WHERE verdict IS NULL AND ended IS NULL AND NOT capped`

	usesLeftSQL = `SELECT token_id, sum(uses_left) FROM join_token_slots WHERE token_id = ANY($1) GROUP BY token_id`

	uncapSQL = `UPDATE join_requests SET capped = false WHERE id = ANY($1) AND verdict IS NULL AND ended IS NULL`
)

// read returns a request's row, or nil where there is none.
func read(ctx context.Context, db *pgxpool.Pool, id string) (*row, error) {
	var r row
	err := db.QueryRow(ctx, readSQL, id).Scan(&r.id, &r.namespace, &r.attestorType, &r.spec, &r.specSHA256, &r.capped, &r.objectUID, &r.lastAskedAt,
		&r.verdict, &r.decidedBy, &r.decidedAt, &r.decidedPool, &r.decidedTenant,
		&r.ended, &r.endedAt, &r.nodeID, &r.nodeTenant, &r.now, &r.others)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read request %s: %w", id, err)
	}
	return &r, nil
}

// expire ends a request that came to its deadline.
func expire(ctx context.Context, db *pgxpool.Pool, id string) error {
	if _, err := db.Exec(ctx, expireSQL, id, undecidedFor, decidedFor); err != nil {
		return fmt.Errorf("expire request %s: %w", id, err)
	}
	return nil
}

// adopt writes down which object stands for a request.
func adopt(ctx context.Context, db *pgxpool.Pool, id string, uid types.UID) error {
	if _, err := db.Exec(ctx, adoptSQL, id, string(uid)); err != nil {
		return fmt.Errorf("adopt the object of request %s: %w", id, err)
	}
	return nil
}

// forget takes an object off its request before it is deleted, so that the next
// one counts even for who was killed in between.
func forget(ctx context.Context, db *pgxpool.Pool, id, uid string) error {
	if _, err := db.Exec(ctx, forgetSQL, id, uid); err != nil {
		return fmt.Errorf("forget the object of request %s: %w", id, err)
	}
	return nil
}

// write records a decision with its event and its audit row. It reports false
// where the row is not what was decided, or no longer undecided.
func write(ctx context.Context, db *pgxpool.Pool, r *row, jr *v1alpha1.JoinRequest) (bool, error) {
	d := jr.Spec.Decision
	action := "request.approve"
	if d.Verdict == v1alpha1.VerdictRejected {
		action = "request.reject"
	}
	recorded := false
	err := pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		var tenant string
		err := tx.QueryRow(ctx, recordSQL, r.id, r.specSHA256, string(jr.UID), d.Verdict, d.DecidedBy, d.Message, d.Pool, d.Tenant).Scan(&tenant)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		if err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, decidedEventSQL, tenant, r.id, d.Verdict, d.DecidedBy.Username); err != nil {
			return err
		}
		detail := map[string]any{"joinRequest": jr.Name, "message": d.Message, "pool": jr.Spec.Pool, "decidedBy": d.DecidedBy}
		if d.Pool != "" {
			detail["pool"] = d.Pool
		}
		if d.Tenant != "" {
			detail["tenant"] = d.Tenant
		}
		recorded = true
		_, err = tx.Exec(ctx, auditSQL, d.DecidedBy.Username, action, tenant, detail)
		return err
	})
	if err != nil {
		return false, fmt.Errorf("record the decision of request %s: %w", r.id, err)
	}
	return recorded, nil
}

// keys runs a query of (id, namespace).
func keys(ctx context.Context, db *pgxpool.Pool, sql string, args ...any) ([]types.NamespacedName, error) {
	rows, err := db.Query(ctx, sql, args...)
	if err != nil {
		return nil, fmt.Errorf("read the requests: %w", err)
	}
	found, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (types.NamespacedName, error) {
		var id string
		var k types.NamespacedName
		err := row.Scan(&id, &k.Namespace)
		k.Name = nameOf(id)
		return k, err
	})
	if err != nil {
		return nil, fmt.Errorf("read the requests: %w", err)
	}
	return found, nil
}

// waiting runs a query of requests with what the caps count them by.
func waiting(ctx context.Context, db *pgxpool.Pool, sql string) ([]waiter, error) {
	rows, err := db.Query(ctx, sql)
	if err != nil {
		return nil, fmt.Errorf("count the requests: %w", err)
	}
	found, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (waiter, error) {
		var w waiter
		err := row.Scan(&w.id, &w.namespace, &w.source, &w.token)
		return w, err
	})
	if err != nil {
		return nil, fmt.Errorf("count the requests: %w", err)
	}
	return found, nil
}

func usesLeft(ctx context.Context, db *pgxpool.Pool, tokens []string) (map[string]int, error) {
	rows, err := db.Query(ctx, usesLeftSQL, tokens)
	if err != nil {
		return nil, fmt.Errorf("count the uses of tokens: %w", err)
	}
	left := map[string]int{}
	var token string
	var n int
	if _, err := pgx.ForEachRow(rows, []any{&token, &n}, func() error { left[token] = n; return nil }); err != nil {
		return nil, fmt.Errorf("count the uses of tokens: %w", err)
	}
	return left, nil
}

func uncap(ctx context.Context, db *pgxpool.Pool, ids []string) error {
	if _, err := db.Exec(ctx, uncapSQL, ids); err != nil {
		return fmt.Errorf("uncap requests: %w", err)
	}
	return nil
}
