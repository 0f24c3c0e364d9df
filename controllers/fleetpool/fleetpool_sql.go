package fleetpool

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"k8s.io/apimachinery/pkg/types"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/controllers/outbox"
)

const (
	// A generation is published once: an older one, read from a cache that lags,
	// never replaces a newer one of the same object.
	publishSQL = `INSERT INTO pools (tenant, name, lifetime, ramdisk_lifetime, on_conflict, allowed_kinds, require_approval, object_uid, object_generation)
	VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)
	ON CONFLICT (tenant, name) DO UPDATE SET lifetime = excluded.lifetime, ramdisk_lifetime = excluded.ramdisk_lifetime,
	  on_conflict = excluded.on_conflict, allowed_kinds = excluded.allowed_kinds, require_approval = excluded.require_approval,
	  object_uid = excluded.object_uid, object_generation = excluded.object_generation, published_at = join_now()
	WHERE pools.object_uid <> excluded.object_uid OR pools.object_generation < excluded.object_generation`

	withdrawSQL = `DELETE FROM pools WHERE tenant = $1 AND name = $2`

	publishedSQL = `SELECT tenant, name FROM pools`

	countSQL = `SELECT state, count(*) FROM nodes WHERE tenant = $1 AND pool = $2 GROUP BY state`

	poolsOfNodesSQL = `SELECT DISTINCT tenant, pool FROM nodes WHERE id = ANY($1)`
)

func publish(ctx context.Context, db *pgxpool.Pool, p *v1alpha1.FleetPool) error {
	var kinds []string // NULL allows all, an empty array none
	if p.Spec.AllowedKinds != nil {
		kinds = append([]string{}, *p.Spec.AllowedKinds...)
	}
	_, err := db.Exec(ctx, publishSQL, p.Namespace, p.Name, lifetime(p), ramdiskLifetime(p),
		string(onConflict(p)), kinds, p.Spec.RequireApproval, string(p.UID), p.Generation)
	if err != nil {
		return fmt.Errorf("publish pool %s/%s: %w", p.Namespace, p.Name, err)
	}
	return nil
}

func withdraw(ctx context.Context, db *pgxpool.Pool, key types.NamespacedName) error {
	if _, err := db.Exec(ctx, withdrawSQL, key.Namespace, key.Name); err != nil {
		return fmt.Errorf("withdraw pool %s: %w", key, err)
	}
	return nil
}

// published returns the pools that have a row.
func published(ctx context.Context, db *pgxpool.Pool) ([]types.NamespacedName, error) {
	return keys(db.Query(ctx, publishedSQL))
}

// count reads the index on (tenant, pool, state) and no row.
func count(ctx context.Context, db *pgxpool.Pool, key types.NamespacedName) (v1alpha1.NodeCounts, error) {
	var n v1alpha1.NodeCounts
	rows, err := db.Query(ctx, countSQL, key.Namespace, key.Name)
	if err != nil {
		return n, fmt.Errorf("count the nodes of pool %s: %w", key, err)
	}
	var state string
	var c int64
	_, err = pgx.ForEachRow(rows, []any{&state, &c}, func() error {
		switch state {
		case "adopting":
			n.Adopting = c
		case "active":
			n.Active = c
		case "retired":
			n.Retired = c
		}
		return nil
	})
	if err != nil {
		return n, fmt.Errorf("count the nodes of pool %s: %w", key, err)
	}
	return n, nil
}

// poolsOf returns the pools whose counts events may have changed: that of each
// node, and the one that an event names since the node left it.
func poolsOf(ctx context.Context, db *pgxpool.Pool, events []outbox.Event) ([]types.NamespacedName, error) {
	var ids []string
	var pools []types.NamespacedName
	for _, e := range events {
		if e.NodeID == "" {
			continue
		}
		ids = append(ids, e.NodeID)
		var d struct {
			Pool string `json:"pool"`
		}
		if json.Unmarshal(e.Data, &d) == nil && d.Pool != "" {
			pools = append(pools, types.NamespacedName{Namespace: e.Tenant, Name: d.Pool})
		}
	}
	if len(ids) == 0 {
		return nil, nil
	}
	found, err := keys(db.Query(ctx, poolsOfNodesSQL, ids))
	return append(pools, found...), err
}

func keys(rows pgx.Rows, err error) ([]types.NamespacedName, error) {
	if err != nil {
		return nil, fmt.Errorf("read pools: %w", err)
	}
	found, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (types.NamespacedName, error) {
		var k types.NamespacedName
		err := row.Scan(&k.Namespace, &k.Name)
		return k, err
	})
	if err != nil {
		return nil, fmt.Errorf("read pools: %w", err)
	}
	return found, nil
}
