package joinsvc

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/better-compute/join-operator/attestors"
)

// transaction is one attempt at a join: a connection on which BEGIN and COMMIT
// travel with the statements beside them, so that neither costs a round trip.
type transaction struct {
	conn *pgxpool.Conn
	open bool
	// answered is told of each round trip that the database answered.
	answered func()
}

// send sends statements in one round trip and reads what each answers; reads[i]
// belongs to the i-th statement and may be nil.
func (tx *transaction) send(ctx context.Context, b *pgx.Batch, reads ...func(pgx.Rows) error) error {
	results := tx.conn.SendBatch(ctx, b)
	for i := range b.Len() {
		var read func(pgx.Rows) error
		if i < len(reads) {
			read = reads[i]
		}
		if err := readResult(results, read); err != nil {
			_ = results.Close() // the first error is the one to tell
			return err
		}
	}
	err := results.Close()
	if err == nil {
		tx.answered()
	}
	return err
}

func readResult(results pgx.BatchResults, read func(pgx.Rows) error) error {
	if read == nil {
		_, err := results.Exec()
		return err
	}
	rows, err := results.Query()
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := read(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}

// begin opens the transaction with its first statements.
func (tx *transaction) begin(ctx context.Context, b *pgx.Batch, reads ...func(pgx.Rows) error) error {
	tx.open = true
	return tx.send(ctx, b, reads...)
}

// commit sends the last statements and COMMIT. After an error nobody knows
// whether it was committed.
func (tx *transaction) commit(ctx context.Context, b *pgx.Batch, reads ...func(pgx.Rows) error) error {
	b.Queue("COMMIT")
	if err := tx.send(ctx, b, reads...); err != nil {
		return err
	}
	if tx.conn.Conn().PgConn().TxStatus() != 'I' {
		return errors.New("the transaction did not end with its COMMIT")
	}
	tx.open = false
	return nil
}

// rollback ends a transaction that is still open. What it cannot end, the pool
// does by closing the connection.
func (tx *transaction) rollback(ctx context.Context) {
	if tx.open && tx.conn.Conn().PgConn().TxStatus() != 'I' {
		_, _ = tx.conn.Exec(ctx, "ROLLBACK")
	}
}

// intact reports whether the transaction that began is still the one that runs:
// an attestor cannot commit, but it might try with a statement.
func (tx *transaction) intact() error {
	switch status := tx.conn.Conn().PgConn().TxStatus(); status {
	case 'T':
		return nil
	case 'E':
		return errors.New("the attestor left a failed statement behind and returned no error")
	default:
		return fmt.Errorf("the attestor ended the transaction (status %q)", status)
	}
}

// attestorTx is what of a transaction an attestor may use.
type attestorTx struct{ conn *pgx.Conn }

func (t attestorTx) Exec(ctx context.Context, sql string, args ...any) (int64, error) {
	tag, err := t.conn.Exec(ctx, sql, args...)
	return tag.RowsAffected(), err
}

func (t attestorTx) Query(ctx context.Context, sql string, args ...any) (attestors.Rows, error) {
	return t.conn.Query(ctx, sql, args...) //nolint:sqlclosecheck // whoever asked closes them
}

func (t attestorTx) QueryRow(ctx context.Context, sql string, args ...any) attestors.Row {
	return t.conn.QueryRow(ctx, sql, args...)
}

// errRace is a lost race that only starting again settles.
var errRace = errors.New("what was read is no longer so")

// retryable reports whether an attempt lost a race and may win it the next time:
// a deadlock, a serialisation failure, a node, binding or CSR that another join
// entered in the meantime.
func retryable(err error) bool {
	if errors.Is(err, errRace) {
		return true
	}
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		return false
	}
	switch pg.Code {
	case "40001", "40P01":
		return true
	case "23505":
		return pg.ConstraintName != usesKey
	}
	return false
}

// usesKey is the key of attestation_uses: its violation is a refusal, not a race.
const usesKey = "attestation_uses_pkey"

func reused(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && pg.Code == "23505" && pg.ConstraintName == usesKey
}

// outage reports whether an error says that the database cannot be used now: the
// machine comes again. Errors of a broken connection are told by the connection.
func outage(err error) bool {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		switch pg.Code[:2] {
		case "08", // connection exception
			"25", // read-only after a failover, idle in transaction
			"53", // out of connections, memory or disk
			"57", // shut down, cannot connect now, cancelled by a timeout
			"58": // system error
			return true
		}
		return pg.Code == "55P03" // lock timeout
	}
	return false
}
