package jointoken

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"k8s.io/apimachinery/pkg/types"

	"github.com/better-compute/join-operator/api/v1alpha1"
)

// maxSlots is how many rows the uses of a token are spread over.
const maxSlots = 64

// row is a token as the database has it.
type row struct {
	id           string
	secretSHA256 []byte
	uses         int32
	expiresAt    *time.Time
	revoked      bool
	usesLeft     int32
	lastUsedAt   *time.Time
}

// world is what the database knows that concerns a JoinToken.
type world struct {
	now        time.Time
	poolExists bool
	row        *row // nil where there is none yet
}

const (
	worldSQL = `SELECT join_now(), EXISTS (SELECT FROM pools WHERE tenant = $1 AND name = $2),
	  t.id, t.secret_sha256, t.uses, t.expires_at, t.revoked_at IS NOT NULL, s.uses_left, s.last_used_at
	FROM (VALUES (1)) AS one
	LEFT JOIN join_tokens t ON t.object_uid = $3
	LEFT JOIN LATERAL (SELECT coalesce(sum(uses_left), 0)::integer AS uses_left, max(last_used_at) AS last_used_at
	  FROM join_token_slots WHERE token_id = t.id) s ON t.id IS NOT NULL`

	insertTokenSQL = `INSERT INTO join_tokens (id, tenant, name, object_uid, secret_sha256, role, pool, site, uses, expires_at, expect, allow_reclaim)
	VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12) ON CONFLICT DO NOTHING`

	insertSlotsSQL = `INSERT INTO join_token_slots (token_id, slot, uses_left)
	SELECT $1, s.slot, s.uses FROM unnest($2::smallint[], $3::integer[]) AS s (slot, uses)`

	lockTokenSQL = `SELECT uses FROM join_tokens WHERE id = $1 AND revoked_at IS NULL FOR UPDATE`

	countSlotsSQL = `SELECT count(*)::integer FROM join_token_slots WHERE token_id = $1`

	growSlotSQL = `UPDATE join_token_slots s SET uses_left = s.uses_left + g.uses
	FROM (SELECT slot, uses FROM unnest($2::smallint[], $3::integer[]) AS u (slot, uses) ORDER BY slot) g
	WHERE s.token_id = $1 AND s.slot = g.slot`

	growTokenSQL = `UPDATE join_tokens SET uses = $2 WHERE id = $1`

	moveExpirySQL = `UPDATE join_tokens SET expires_at = $2 WHERE id = $1 AND expires_at IS DISTINCT FROM $2`

	// Tokens of this name and of any object but the one that lives now.
	revokeSQL = `UPDATE join_tokens SET revoked_at = join_now()
	WHERE tenant = $1 AND name = $2 AND object_uid <> $3 AND revoked_at IS NULL RETURNING id`

	orphansSQL = `SELECT EXISTS (SELECT FROM join_tokens WHERE tenant = $1 AND name = $2 AND object_uid <> $3 AND revoked_at IS NULL)`

	inForceSQL = `SELECT tenant, name FROM join_tokens WHERE revoked_at IS NULL`

	auditSQL = `INSERT INTO audit_log (actor, action, tenant, detail) VALUES ('system:manager', $1, $2, $3)`
)

func readWorld(ctx context.Context, db *pgxpool.Pool, t *v1alpha1.JoinToken) (world, error) {
	var w world
	var id *string
	var uses, left *int32
	var revoked *bool
	var r row
	err := db.QueryRow(ctx, worldSQL, t.Namespace, t.Spec.Pool, string(t.UID)).
		Scan(&w.now, &w.poolExists, &id, &r.secretSHA256, &uses, &r.expiresAt, &revoked, &left, &r.lastUsedAt)
	if err != nil {
		return world{}, fmt.Errorf("read the row of JoinToken %s/%s: %w", t.Namespace, t.Name, err)
	}
	if id != nil {
		r.id, r.uses, r.revoked, r.usesLeft = *id, *uses, *revoked, *left
		w.row = &r
	}
	return w, nil
}

// errIDTaken is returned where another JoinToken has or had the same token id.
var errIDTaken = errors.New("the token id is another JoinToken's")

// insert puts the token into force.
func insert(ctx context.Context, db *pgxpool.Pool, t *v1alpha1.JoinToken, id string, secretSHA256 []byte, expiresAt *time.Time) error {
	var expect []byte
	if t.Spec.Expect != nil {
		var err error
		if expect, err = json.Marshal(t.Spec.Expect); err != nil {
			return err
		}
	}
	return pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, insertTokenSQL, id, t.Namespace, t.Name, string(t.UID), secretSHA256,
			string(role(t)), t.Spec.Pool, t.Spec.Site, uses(t), expiresAt, expect, t.Spec.AllowReclaim)
		if err != nil {
			return fmt.Errorf("store token %s: %w", id, err)
		}
		if tag.RowsAffected() == 0 {
			return errIDTaken
		}
		slots, shares := spread(uses(t), 0, min(int(uses(t)), maxSlots))
		if _, err := tx.Exec(ctx, insertSlotsSQL, id, slots, shares); err != nil {
			return fmt.Errorf("store the uses of token %s: %w", id, err)
		}
		return audit(ctx, tx, "token.create", t.Namespace, map[string]any{"tokenID": id, "joinToken": t.Name, "uses": uses(t), "pool": t.Spec.Pool})
	})
}

// grow raises a token's uses to what is wanted: new slots take their share
// first, the old ones the rest.
func grow(ctx context.Context, db *pgxpool.Pool, id string, wanted int32) error {
	return pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		var has int32
		if err := tx.QueryRow(ctx, lockTokenSQL, id).Scan(&has); err != nil {
			if errors.Is(err, pgx.ErrNoRows) {
				return nil // revoked in between
			}
			return fmt.Errorf("lock token %s: %w", id, err)
		}
		more := wanted - has
		if more <= 0 {
			return nil
		}
		var old int
		if err := tx.QueryRow(ctx, countSlotsSQL, id).Scan(&old); err != nil {
			return fmt.Errorf("count the slots of token %s: %w", id, err)
		}
		all := max(old, min(int(wanted), maxSlots))
		fresh := min(all-old, int(more))
		toFresh := more
		if old > 0 {
			toFresh = int32(int64(more) * int64(fresh) / int64(all))
			toFresh = max(toFresh, int32(fresh))
		}
		if fresh == 0 {
			toFresh = 0
		}
		if fresh > 0 {
			slots, shares := spread(toFresh, old, fresh)
			if _, err := tx.Exec(ctx, insertSlotsSQL, id, slots, shares); err != nil {
				return fmt.Errorf("store more uses of token %s: %w", id, err)
			}
		}
		if rest := more - toFresh; rest > 0 {
			slots, shares := spread(rest, 0, min(old, int(rest)))
			if _, err := tx.Exec(ctx, growSlotSQL, id, slots, shares); err != nil {
				return fmt.Errorf("raise the uses of token %s: %w", id, err)
			}
		}
		if _, err := tx.Exec(ctx, growTokenSQL, id, wanted); err != nil {
			return fmt.Errorf("raise the uses of token %s: %w", id, err)
		}
		return nil
	})
}

// spread deals uses over n slots from first on, as evenly as it goes.
func spread(uses int32, first, n int) (slots []int16, shares []int32) {
	for i := range n {
		share := uses / int32(n)
		if int32(i) < uses%int32(n) {
			share++
		}
		slots = append(slots, int16(first+i))
		shares = append(shares, share)
	}
	return slots, shares
}

func moveExpiry(ctx context.Context, db *pgxpool.Pool, id string, to *time.Time) error {
	if _, err := db.Exec(ctx, moveExpirySQL, id, to); err != nil {
		return fmt.Errorf("move the expiry of token %s: %w", id, err)
	}
	return nil
}

// revokeAllBut revokes the tokens of a name, but for the one of the object with
// the given uid; an empty uid spares none. Doing it again changes nothing.
func revokeAllBut(ctx context.Context, db *pgxpool.Pool, name types.NamespacedName, uid types.UID) error {
	err := pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, revokeSQL, name.Namespace, name.Name, string(uid))
		if err != nil {
			return err
		}
		ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			return err
		}
		for _, id := range ids {
			if err := audit(ctx, tx, "token.revoke", name.Namespace, map[string]any{"tokenID": id, "joinToken": name.Name}); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("revoke the tokens of JoinToken %s: %w", name, err)
	}
	return nil
}

// hasOrphans reports whether revokeAllBut would revoke anything.
func hasOrphans(ctx context.Context, db *pgxpool.Pool, name types.NamespacedName, uid types.UID) (bool, error) {
	var yes bool
	if err := db.QueryRow(ctx, orphansSQL, name.Namespace, name.Name, string(uid)).Scan(&yes); err != nil {
		return false, fmt.Errorf("look for tokens without JoinToken %s: %w", name, err)
	}
	return yes, nil
}

// inForce returns the JoinTokens that have a row which is not revoked.
func inForce(ctx context.Context, db *pgxpool.Pool) ([]types.NamespacedName, error) {
	rows, err := db.Query(ctx, inForceSQL)
	if err != nil {
		return nil, fmt.Errorf("read the tokens in force: %w", err)
	}
	found, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (types.NamespacedName, error) {
		var k types.NamespacedName
		err := row.Scan(&k.Namespace, &k.Name)
		return k, err
	})
	if err != nil {
		return nil, fmt.Errorf("read the tokens in force: %w", err)
	}
	return found, nil
}

func audit(ctx context.Context, tx pgx.Tx, action, tenant string, detail map[string]any) error {
	if _, err := tx.Exec(ctx, auditSQL, action, tenant, detail); err != nil {
		return fmt.Errorf("audit %s: %w", action, err)
	}
	return nil
}
