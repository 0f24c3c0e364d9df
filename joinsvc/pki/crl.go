package pki

import (
	"context"
	"crypto/rand"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"math/big"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	// crlLifetime is for how long a revocation list may be relied on, and crlRenew
	// when it is signed anew though nothing was revoked: who fetches it then
	// survives an outage of the difference.
	crlLifetime = 24 * time.Hour
	crlRenew    = 6 * time.Hour
	// crlKeepExpired is for how long a revoked certificate stays listed after its
	// end: in one list signed after it at least (RFC 5280 section 3.3).
	crlKeepExpired = 2 * crlLifetime
)

const (
	// One replica at a time signs; the others find that it is done.
	crlLockSQL = `SELECT pg_try_advisory_xact_lock(hashtextextended('join/crl', 0)), join_now()`

	crlStoredSQL = `SELECT number, next_update, this_update, CASE WHEN number = $2 THEN NULL ELSE der END FROM crls WHERE ski = $1`

	// The fingerprint of a list can be had from its rows and from its entries: their
	// count, and the last 64 bits of all serials XORed.
	crlFingerprintSQL = `SELECT count(*), coalesce(bit_xor(('x' || right(repeat('0', 16) || encode(serial, 'hex'), 16))::bit(64)::bigint), 0)
	  FROM node_certs WHERE issuer_ski = $1 AND revoked_at IS NOT NULL AND not_after > $2`

	crlEntriesSQL = `SELECT serial, revoked_at, revocation
	  FROM node_certs WHERE issuer_ski = $1 AND revoked_at IS NOT NULL AND not_after > $2 ORDER BY revoked_at, serial`

	crlStoreSQL = `INSERT INTO crls (ski, number, der, this_update, next_update) VALUES ($1, $2, $3, $4, $5)
	  ON CONFLICT (ski) DO UPDATE SET number = excluded.number, der = excluded.der, this_update = excluded.this_update, next_update = excluded.next_update
	  WHERE crls.number < excluded.number`

	crlReadSQL = `SELECT der FROM crls WHERE ski = $1`
)

// crlState is what is known of a stored list.
type crlState struct {
	number      int64
	fingerprint fingerprint
}

type fingerprint struct{ count, xor int64 }

// signLists signs the list of each CA's key where there is none, something was
// revoked, or it has grown old, if no other replica is at it.
func (k *Keeper) signLists(ctx context.Context, loaded *set) error {
	tx, err := k.db.Begin(ctx)
	if err != nil {
		return fmt.Errorf("sign revocation lists: %w", err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	var mine bool
	var now time.Time
	if err := tx.QueryRow(ctx, crlLockSQL).Scan(&mine, &now); err != nil {
		return fmt.Errorf("sign revocation lists: lock: %w", err)
	}
	if !mine {
		return nil
	}
	for _, i := range loaded.keys() {
		if !i.valid(now) || !i.signsLists() {
			continue
		}
		if err := k.signList(ctx, tx, i, now); err != nil {
			return fmt.Errorf("sign the revocation list of %s: %w", i.name, err)
		}
	}
	return tx.Commit(ctx)
}

func (k *Keeper) signList(ctx context.Context, tx pgx.Tx, i *issuer, now time.Time) error {
	ski := string(i.cert.SubjectKeyId)
	known := k.crls[ski]
	var number int64
	var next, this time.Time
	var der []byte
	exists := true
	switch err := tx.QueryRow(ctx, crlStoredSQL, i.cert.SubjectKeyId, known.number).Scan(&number, &next, &this, &der); {
	case errors.Is(err, pgx.ErrNoRows):
		exists = false
	case err != nil:
		return err
	}
	if exists && der != nil { // another replica signed it
		list, err := x509.ParseRevocationList(der)
		if err != nil {
			exists = false
		} else {
			known = crlState{number, fingerprintOf(list)}
			k.crls[ski] = known
		}
	}
	keepFrom := now.Add(-crlKeepExpired)
	var rows fingerprint
	if err := tx.QueryRow(ctx, crlFingerprintSQL, i.cert.SubjectKeyId, keepFrom).Scan(&rows.count, &rows.xor); err != nil {
		return err
	}
	k.crlAge.WithLabelValues(i.name).Set(float64(next.Unix()))
	if exists && rows == known.fingerprint && now.Before(this.Add(crlRenew)) {
		return nil
	}
	entries, err := revoked(ctx, tx, i, keepFrom)
	if err != nil {
		return err
	}
	this, next = now.Add(-backdate), now.Add(crlLifetime)
	signed, err := i.signList(number+1, this, next, entries)
	if err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, crlStoreSQL, i.cert.SubjectKeyId, number+1, signed.Raw, this, next); err != nil {
		return err
	}
	// Whether this commits or not, the next look compares numbers first.
	k.crls[ski] = crlState{number + 1, fingerprintOf(signed)}
	k.crlAge.WithLabelValues(i.name).Set(float64(next.Unix()))
	return nil
}

func revoked(ctx context.Context, tx pgx.Tx, i *issuer, keepFrom time.Time) ([]x509.RevocationListEntry, error) {
	rows, err := tx.Query(ctx, crlEntriesSQL, i.cert.SubjectKeyId, keepFrom)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (x509.RevocationListEntry, error) {
		var serial []byte
		var at time.Time
		var why string
		err := row.Scan(&serial, &at, &why)
		return x509.RevocationListEntry{SerialNumber: new(big.Int).SetBytes(serial), RevocationTime: at.UTC(), ReasonCode: reasonCode(why)}, err
	})
}

// reasonCode is the CRLReason (RFC 5280 section 5.3.1) of what a row says.
func reasonCode(why string) int {
	switch why {
	case "rekeyed", "superseded", "abandoned":
		return 4 // superseded
	case "retired", "deleted":
		return 5 // cessationOfOperation
	case "conflict":
		return 1 // keyCompromise: two machines hold it
	default:
		return 0 // unspecified, which is not written
	}
}

func (i *issuer) signList(number int64, this, next time.Time, entries []x509.RevocationListEntry) (*x509.RevocationList, error) {
	der, err := x509.CreateRevocationList(rand.Reader, &x509.RevocationList{
		Number: big.NewInt(number), ThisUpdate: this, NextUpdate: next, RevokedCertificateEntries: entries,
	}, i.cert, i.key)
	if err != nil {
		return nil, err
	}
	list, err := x509.ParseRevocationList(der)
	if err != nil {
		return nil, err
	}
	return list, list.CheckSignatureFrom(i.cert)
}

// fingerprintOf is what crlFingerprintSQL makes of the rows of a list.
func fingerprintOf(list *x509.RevocationList) fingerprint {
	f := fingerprint{count: int64(len(list.RevokedCertificateEntries))}
	for _, e := range list.RevokedCertificateEntries {
		var last [8]byte
		raw := e.SerialNumber.Bytes()
		copy(last[max(0, 8-len(raw)):], raw[max(0, len(raw)-8):])
		f.xor ^= int64(binary.BigEndian.Uint64(last[:]))
	}
	return f
}

// ErrNoCRL is returned for a CA that has no revocation list.
var ErrNoCRL = errors.New("no revocation list of this CA")

// CRL reads the newest revocation list (RFC 5280 section 5) of the CA with that
// subject key identifier, in DER.
func (k *Keeper) CRL(ctx context.Context, ski []byte) ([]byte, error) {
	var der []byte
	switch err := k.db.QueryRow(ctx, crlReadSQL, ski).Scan(&der); {
	case errors.Is(err, pgx.ErrNoRows):
		return nil, ErrNoCRL
	case err != nil:
		return nil, fmt.Errorf("read a revocation list: %w", err)
	}
	return der, nil
}
