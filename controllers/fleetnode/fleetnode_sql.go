package fleetnode

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"k8s.io/apimachinery/pkg/types"
)

// node is a node's row with what stands beside it.
type node struct {
	role, pool, site, state string
	attestor                string
	nodeKeyURI              string
	facts                   map[string]string
	createdAt               time.Time
	lastSeenAt              *time.Time
	conflictedAt            *time.Time
	// cert is the newest certificate, nil where there is none.
	cert *certificate
	// reclaimRefused is the newest refusal of a reclaim that would have changed
	// what may not change, nil where the node joined since, or never was refused.
	reclaimRefused json.RawMessage
}

type certificate struct {
	serial, role string
	notAfter     time.Time
}

const (
	readNodeSQL = `SELECT n.role, n.pool, n.site, n.state, n.attestor, coalesce(n.node_key_uri, ''), n.facts,
	  n.created_at, n.last_seen_at, n.conflicted_at, c.serial, c.role, c.not_after, r.data
	FROM nodes n
	LEFT JOIN LATERAL (SELECT serial, role, not_after, issued_at FROM node_certs
	  WHERE node_id = n.id ORDER BY generation DESC LIMIT 1) c ON true
	LEFT JOIN LATERAL (SELECT at, data FROM events
	  WHERE node_id = n.id AND type = 'node.reclaim-refused' ORDER BY id DESC LIMIT 1) r ON c.issued_at IS NULL OR r.at > c.issued_at
	WHERE n.id = $1 AND n.tenant = $2`

	lockNodeSQL = `SELECT state, pool, site FROM nodes WHERE id = $1 AND tenant = $2 FOR UPDATE`

	retireNodeSQL = `UPDATE nodes SET state = 'retired', retired_at = join_now(), changed_at = join_now() WHERE id = $1`

	moveNodeSQL = `UPDATE nodes SET pool = $2, site = $3, changed_at = join_now() WHERE id = $1`

	poolExistsSQL = `SELECT EXISTS (SELECT FROM pools WHERE tenant = $1 AND name = $2)`

	dropBindingsSQL = `DELETE FROM node_bindings WHERE node_id = $1`

	deleteNodeSQL = `DELETE FROM nodes WHERE id = $1`

	revokeCertsSQL = `UPDATE node_certs SET revoked_at = join_now(), revocation = $2 WHERE node_id = $1 AND revoked_at IS NULL`

	eventSQL = `INSERT INTO events (type, tenant, node_id, data) VALUES ($1, $2, $3, $4)`

	auditSQL = `INSERT INTO audit_log (actor, action, tenant, node_id, detail) VALUES ('system:manager', $1, $2, $3, $4)`

	// One page of all nodes, but for those of pools that show none.
	pageSQL = `SELECT n.id, n.tenant FROM nodes n
	WHERE n.id > $1 AND NOT EXISTS (SELECT FROM unnest($2::text[], $3::text[]) AS h (tenant, pool) WHERE h.tenant = n.tenant AND h.pool = n.pool)
	ORDER BY n.id LIMIT $4`
)

// readNode returns nil where the tenant has no node of that id: whether another
// tenant has one is nobody's business.
func readNode(ctx context.Context, db *pgxpool.Pool, key types.NamespacedName) (*node, error) {
	var n node
	var serial []byte
	var certRole *string
	var notAfter *time.Time
	var facts []byte
	err := db.QueryRow(ctx, readNodeSQL, key.Name, key.Namespace).Scan(&n.role, &n.pool, &n.site, &n.state, &n.attestor,
		&n.nodeKeyURI, &facts, &n.createdAt, &n.lastSeenAt, &n.conflictedAt, &serial, &certRole, &notAfter, (*[]byte)(&n.reclaimRefused))
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read node %s: %w", key, err)
	}
	if serial != nil {
		n.cert = &certificate{serial: hex.EncodeToString(serial), role: *certRole, notAfter: *notAfter}
	}
	// Facts that are no flat map of texts are not shown.
	_ = json.Unmarshal(facts, &n.facts)
	return &n, nil
}

// errNoPool is returned for a move into a pool that does not exist.
var errNoPool = errors.New("the pool does not exist")

// move puts a node into another pool or site.
func move(ctx context.Context, db *pgxpool.Pool, key types.NamespacedName, pool, site string) error {
	err := pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		was, err := lockNode(ctx, tx, key)
		if err != nil || was == nil || (was.pool == pool && was.site == site) {
			return err
		}
		if was.pool != pool {
			var exists bool
			if err := tx.QueryRow(ctx, poolExistsSQL, key.Namespace, pool).Scan(&exists); err != nil {
				return err
			}
			if !exists {
				return errNoPool
			}
		}
		if _, err := tx.Exec(ctx, moveNodeSQL, key.Name, pool, site); err != nil {
			return err
		}
		return record(ctx, tx, key, "node.moved", "node.move", map[string]any{"pool": was.pool, "site": was.site, "toPool": pool, "toSite": site})
	})
	if err != nil {
		return fmt.Errorf("move node %s: %w", key, err)
	}
	return nil
}

type locked struct{ state, pool, site string }

// lockNode returns nil where there is no such node.
func lockNode(ctx context.Context, tx pgx.Tx, key types.NamespacedName) (*locked, error) {
	var l locked
	err := tx.QueryRow(ctx, lockNodeSQL, key.Name, key.Namespace).Scan(&l.state, &l.pool, &l.site)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	return &l, err
}

// retire takes a node out. Its bindings stay: by them its next join is known to
// be a retired machine's, and waits for a person.
func retire(ctx context.Context, tx pgx.Tx, key types.NamespacedName, confirmed bool) error {
	was, err := lockNode(ctx, tx, key)
	if err != nil || was == nil || was.state == "retired" {
		return err
	}
	if _, err := tx.Exec(ctx, retireNodeSQL, key.Name); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, revokeCertsSQL, key.Name, "retired"); err != nil {
		return err
	}
	return record(ctx, tx, key, "node.retired", "node.retire", detail(was, confirmed))
}

// remove forgets a node. Its certificates' rows stay, revoked, so that the CSRs
// that it used stay refused.
func remove(ctx context.Context, tx pgx.Tx, key types.NamespacedName, confirmed bool) error {
	was, err := lockNode(ctx, tx, key)
	if err != nil || was == nil {
		return err
	}
	if _, err := tx.Exec(ctx, dropBindingsSQL, key.Name); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, revokeCertsSQL, key.Name, "deleted"); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, deleteNodeSQL, key.Name); err != nil {
		return err
	}
	return record(ctx, tx, key, "node.deleted", "node.delete", detail(was, confirmed))
}

func detail(was *locked, confirmed bool) map[string]any {
	d := map[string]any{"pool": was.pool, "site": was.site, "state": was.state}
	if confirmed {
		d[confirmedKey] = true
	}
	return d
}

func record(ctx context.Context, tx pgx.Tx, key types.NamespacedName, event, action string, data map[string]any) error {
	if _, err := tx.Exec(ctx, eventSQL, event, key.Namespace, key.Name, data); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, auditSQL, action, key.Namespace, key.Name, data)
	return err
}

// page returns up to limit nodes after an id, without those of hidden pools.
func page(ctx context.Context, db *pgxpool.Pool, after string, hidden []types.NamespacedName, limit int) ([]types.NamespacedName, error) {
	tenants, pools := make([]string, len(hidden)), make([]string, len(hidden))
	for i, h := range hidden {
		tenants[i], pools[i] = h.Namespace, h.Name
	}
	rows, err := db.Query(ctx, pageSQL, after, tenants, pools, limit)
	if err != nil {
		return nil, fmt.Errorf("read the nodes after %q: %w", after, err)
	}
	found, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (types.NamespacedName, error) {
		var k types.NamespacedName
		err := row.Scan(&k.Name, &k.Namespace)
		return k, err
	})
	if err != nil {
		return nil, fmt.Errorf("read the nodes after %q: %w", after, err)
	}
	return found, nil
}
