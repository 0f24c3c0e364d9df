package outbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Channel is what replicas NOTIFY, coalesced, after they committed.
const Channel = "join_events"

// Event is one committed row of the outbox.
type Event struct {
	// XID and ID are its place: the writing transaction, and the row in it.
	XID uint64
	ID  int64
	// At is the database's time of the writing transaction.
	At time.Time
	// Type is for example "node.joined".
	Type string
	// Tenant is the namespace in whose stream the event lies.
	Tenant string
	// NodeID is empty where no node is meant.
	NodeID string
	// Data is what Type says it is. It never holds a secret or evidence.
	Data json.RawMessage
}

// position is where a follower stands in one database system.
type position struct {
	system string
	xid    uint64
	id     int64
}

// horizon is what the database says of itself: which system it is, and the
// oldest transaction that still runs, below which nothing will be committed any
// more.
type horizon struct {
	system string
	xmin   uint64
}

const (
	horizonSQL = `SELECT system_identifier::text, pg_snapshot_xmin(pg_current_snapshot())::text::bigint FROM pg_control_system()`

	loadCursorSQL = `SELECT system, xid::text::bigint, id FROM cursors WHERE name = $1`

	saveCursorSQL = `INSERT INTO cursors (name, system, xid, id) VALUES ($1, $2, $3::bigint::text::xid8, $4)
	ON CONFLICT (name) DO UPDATE SET system = excluded.system, xid = excluded.xid, id = excluded.id`

	readSQL = `SELECT e.xid::text::bigint, e.id, e.at, e.type, e.tenant, coalesce(e.node_id, ''), e.data FROM events e
	WHERE (e.xid, e.id) > ($1::bigint::text::xid8, $2::bigint) AND e.xid < pg_snapshot_xmin(pg_current_snapshot())
	ORDER BY e.xid, e.id LIMIT $3`

	overtakableSQL = `SELECT EXISTS (SELECT FROM events WHERE xid >= pg_snapshot_xmin(pg_current_snapshot()))`

	// Rows that another system's transactions numbered, and that this one would
	// meet only once its own count gets there.
	dropForeignSQL = `DELETE FROM events WHERE xid >= pg_snapshot_xmax(pg_current_snapshot())`
)

func readHorizon(ctx context.Context, db *pgxpool.Pool) (horizon, error) {
	var h horizon
	if err := db.QueryRow(ctx, horizonSQL).Scan(&h.system, &h.xmin); err != nil {
		return horizon{}, fmt.Errorf("read the database's horizon: %w", err)
	}
	return h, nil
}

// loadCursor returns false where there is none yet.
func loadCursor(ctx context.Context, db *pgxpool.Pool, name string) (position, bool, error) {
	var p position
	err := db.QueryRow(ctx, loadCursorSQL, name).Scan(&p.system, &p.xid, &p.id)
	if errors.Is(err, pgx.ErrNoRows) {
		return position{}, false, nil
	}
	if err != nil {
		return position{}, false, fmt.Errorf("read the outbox cursor: %w", err)
	}
	return p, true, nil
}

func saveCursor(ctx context.Context, db *pgxpool.Pool, name string, p position) error {
	if _, err := db.Exec(ctx, saveCursorSQL, name, p.system, int64(p.xid), p.id); err != nil {
		return fmt.Errorf("store the outbox cursor: %w", err)
	}
	return nil
}

func dropForeign(ctx context.Context, db *pgxpool.Pool) error {
	if _, err := db.Exec(ctx, dropForeignSQL); err != nil {
		return fmt.Errorf("drop events of another database system: %w", err)
	}
	return nil
}

// readEvents returns up to limit events after p that nothing can precede any
// more, in order.
func readEvents(ctx context.Context, db *pgxpool.Pool, p position, limit int) ([]Event, error) {
	rows, err := db.Query(ctx, readSQL, int64(p.xid), p.id, limit)
	if err != nil {
		return nil, fmt.Errorf("read the outbox: %w", err)
	}
	events, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (Event, error) {
		var e Event
		err := row.Scan(&e.XID, &e.ID, &e.At, &e.Type, &e.Tenant, &e.NodeID, (*[]byte)(&e.Data))
		return e, err
	})
	if err != nil {
		return nil, fmt.Errorf("read the outbox: %w", err)
	}
	return events, nil
}

// overtakable reports whether an event is committed that an older one may still
// precede: it will be readable in a moment, without another NOTIFY.
func overtakable(ctx context.Context, db *pgxpool.Pool) (bool, error) {
	var yes bool
	if err := db.QueryRow(ctx, overtakableSQL).Scan(&yes); err != nil {
		return false, fmt.Errorf("read the outbox: %w", err)
	}
	return yes, nil
}
