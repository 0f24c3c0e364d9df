package prune_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/better-compute/join-operator/controllers/internal/controllertest"
	"github.com/better-compute/join-operator/controllers/prune"
	"github.com/better-compute/join-operator/test/pgtest"
)

// world is made of rows of which those named "old" are to go and "new" to stay.
func world(t *testing.T, db *pgxpool.Pool) {
	t.Helper()
	for _, sql := range []string{
		`INSERT INTO attestation_uses (attestor, subject, expires_at) SELECT 'old', sha256(i::text::bytea), now() - interval '1 minute' FROM generate_series(1, 25) AS i`,
		`INSERT INTO attestation_uses (attestor, subject, expires_at) VALUES ('new', sha256('a'), now() + interval '1 minute'), ('new', sha256('b'), NULL)`,
		`INSERT INTO events (type, tenant, at) SELECT 'old', 't', now() - interval '8 days' FROM generate_series(1, 25)`,
		`INSERT INTO events (type, tenant, at) VALUES ('new', 't', now() - interval '6 days')`,
		`INSERT INTO cursors (name, system, xid, id) SELECT 'manager', 's', xid, id FROM events ORDER BY xid DESC, id DESC LIMIT 1`,
		`INSERT INTO events (type, tenant, at) VALUES ('new', 't', now() - interval '9 days')`, // nobody has read it
		`INSERT INTO refusal_windows (attestor, reason, minute) VALUES ('old', 'r', now() - interval '2 hours'), ('new', 'r', now())`,
		`INSERT INTO replicas (id, keys, seen_at) VALUES ('old', '{}', now() - interval '2 days'), ('new', '{}', now())`,
		`INSERT INTO node_certs (serial, node_id, generation, tenant, role, attestor_type, subject_sha256, csr_sha256, der, issuer_sha256, issuer_ski, first_seen_at, not_after)
		 SELECT i::text::bytea, 'n', i, CASE WHEN i < 3 THEN 'old' ELSE 'new' END, 'node', 'x', sha256('s'), sha256(i::text::bytea), 'd', sha256('i'), 'k', now(), now() - make_interval(days => 380 - i) FROM generate_series(1, 3) AS i`,
		`INSERT INTO join_requests (id, attestor_type, attestor, subject_sha256, subject_proved, csr_sha256, role, namespace, facts_sha256, spec, spec_sha256, ended, ended_at)
		 VALUES ('aaaaaaaaaaaaaaaa', 'x', 'old', sha256('s'), false, sha256('1'), 'node', 't', sha256('f'), '{}', sha256('p'), 'Expired', now() - interval '8 days'),
		        ('bbbbbbbbbbbbbbbb', 'x', 'new', sha256('s'), false, sha256('2'), 'node', 't', sha256('f'), '{}', sha256('p'), 'Expired', now()),
		        ('cccccccccccccccc', 'x', 'new', sha256('s'), false, sha256('3'), 'node', 't', sha256('f'), '{}', sha256('p'), NULL, NULL)`,
	} {
		if _, err := db.Exec(t.Context(), sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
}

var tables = map[string]string{
	"attestation_uses": "attestor", "events": "type", "refusal_windows": "attestor", "replicas": "id", "node_certs": "tenant", "join_requests": "attestor",
}

func TestWhatEndedGoesAndNothingElse(t *testing.T) {
	db := pgtest.New(t)
	admin := db.Pool(t, pgtest.Admin)
	world(t, admin)
	p, err := prune.New(db.Pool(t, pgtest.Manager), prune.Options{Batch: 10}, controllertest.Logger(t), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Round(t.Context()); err != nil {
		t.Fatal(err)
	}
	kept := map[string]int{"attestation_uses": 2, "events": 2, "refusal_windows": 1, "replicas": 1, "node_certs": 1, "join_requests": 2}
	for table, column := range tables {
		var old, fresh int
		if err := admin.QueryRow(t.Context(), `SELECT count(*) FILTER (WHERE `+column+` = 'old'), count(*) FILTER (WHERE `+column+` = 'new') FROM `+table).Scan(&old, &fresh); err != nil {
			t.Fatal(err)
		}
		if old != 0 || fresh != kept[table] {
			t.Errorf("%s: %d old rows and %d new ones are left, want 0 and %d", table, old, fresh, kept[table])
		}
	}
}

func TestWhatAJoinHoldsIsSkipped(t *testing.T) {
	db := pgtest.New(t)
	admin := db.Pool(t, pgtest.Admin)
	world(t, admin)
	tx, err := admin.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	if _, err := tx.Exec(t.Context(), `SELECT FROM attestation_uses WHERE attestor = 'old' ORDER BY subject LIMIT 1 FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	p, err := prune.New(db.Pool(t, pgtest.Manager), prune.Options{Batch: 10}, controllertest.Logger(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	start := time.Now()
	if err := p.Round(ctx); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(start); took > time.Second {
		t.Errorf("it waited %s for a row that a join holds", took)
	}
	var left int
	if err := admin.QueryRow(t.Context(), `SELECT count(*) FROM attestation_uses WHERE attestor = 'old'`).Scan(&left); err != nil || left != 1 {
		t.Errorf("%d old rows are left (%v), want the held one", left, err)
	}
}
