package attestors

import (
	"context"
	"crypto"
	"time"
)

// PrepareContext is what a verifier may know before the join's transaction.
type PrepareContext struct {
	Role      Role
	CSRSHA256 [32]byte
	PublicKey crypto.PublicKey
	Claims    Claims
}

// JoinContext is what a verifier may know and use inside the join's transaction.
type JoinContext struct {
	// Role is what the machine asks to join as; the attestor lists it.
	Role Role
	// CSRSHA256 is SHA-256 of the CSR's DER. Evidence that can be bound to a
	// join must be bound to this.
	CSRSHA256 [32]byte
	// PublicKey is the CSR's key, whose possession the CSR's signature proved.
	PublicKey crypto.PublicKey
	// PublicKeySHA256 is SHA-256 of its SubjectPublicKeyInfo (RFC 5280 section 4.1.2.7).
	PublicKeySHA256 [32]byte
	// Token is the text of the sealed token; empty where none was sent.
	Token  string
	Claims Claims
	// Now is the database's time, by which revocation and uses are judged.
	Now time.Time
	// FirstSeen is when this attestor type, subject and CSR were first seen
	// (Now in a first round): windows and expiries are judged by it, so that an
	// approval or a lost answer never comes too late.
	FirstSeen func(subject []byte) time.Time
	// Prepared is what Prepare returned.
	Prepared any
	// Tx is the join's own transaction.
	Tx Tx
	// Tokens looks a join token up in the join's transaction.
	Tokens TokenStore
}

// Tx is the part of a transaction that a verifier may use. It cannot commit.
type Tx interface {
	// Exec runs a statement and returns the number of rows that it changed.
	Exec(ctx context.Context, sql string, args ...any) (int64, error)
	Query(ctx context.Context, sql string, args ...any) (Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) Row
}

// Rows is a result set; it must be closed.
type Rows interface {
	Next() bool
	Scan(dest ...any) error
	Err() error
	Close()
}

// Row is a result of at most one row.
type Row interface {
	Scan(dest ...any) error
}

// TokenStore finds join tokens. Tokens of a join's own sealed part have already
// been read with the transaction's first statements, so a look-up costs no
// round trip.
type TokenStore interface {
	// Token returns the token with that id, or nil where there is none.
	Token(ctx context.Context, id string) (*TokenRow, error)
}

// TokenRow is a join token as the database keeps it: everything but its secret.
type TokenRow struct {
	ID string
	// Tenant and Name are the namespace and the name of its JoinToken.
	Tenant, Name string
	// SecretSHA256 is over "bcjt/v1" NUL namespace NUL id NUL secret.
	SecretSHA256 [32]byte
	Role         Role
	Pool, Site   string
	// ExpiresAt is zero where the token does not expire.
	ExpiresAt time.Time
	// RevokedAt is zero while the token is in force.
	RevokedAt time.Time
	// CreatedAt is when its row was made.
	CreatedAt    time.Time
	Expect       Expect
	AllowReclaim bool
}

// Expect binds a token to one machine, by what the machine claims of itself
// (which guards against mistakes, not thieves) and by a trusted hardware key.
// All values are normalised.
type Expect struct {
	ProductUUID       string `json:"productUUID,omitempty"`
	SerialNumber      string `json:"serialNumber,omitempty"`
	MACAddress        string `json:"macAddress,omitempty"`
	HardwareKeySHA256 string `json:"hardwareKeySHA256,omitempty"`
}

// IsZero reports whether nothing is expected.
func (e Expect) IsZero() bool { return e == Expect{} }
