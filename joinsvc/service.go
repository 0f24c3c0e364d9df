package joinsvc

import (
	"errors"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/attestors"
	"github.com/better-compute/join-operator/joinsvc/pki"
)

// Issuer signs leaves. It may also be a [NodeKeyProver].
type Issuer interface {
	Issue(pki.Leaf) (*pki.Issued, error)
}

// NodeKeyProver says which statements about a node's key can be proved anew at
// each renewal. A crypto that does not say knows none.
type NodeKeyProver interface {
	ProvesNodeKey(uri string) bool
}

// Keys opens what machines sealed, and seals what goes through their hands.
type Keys interface {
	Knows(kid string) bool
	Open(kid string, aad, sealed []byte) ([]byte, error)
	SealState(purpose string, aad, plaintext []byte) ([]byte, error)
	OpenState(purpose string, aad, sealed []byte) ([]byte, error)
}

// Attestors finds the attestor that a machine names; empty names
// [attestors.DefaultID]. What it finds may change from one join to the next: a
// round ends with the attestor that it began with.
type Attestors interface {
	Find(id string) (*attestors.Attestor, bool)
}

// metered finds attestors whose verifications the metrics see.
type metered struct {
	Attestors
	meter attestors.Meter
}

func (m metered) Find(id string) (*attestors.Attestor, bool) {
	a, known := m.Attestors.Find(id)
	if !known {
		return nil, false
	}
	return attestors.Metered(a, m.meter), true
}

// Config is what a [Service] is made of. Limits, Metrics and the hooks are optional.
type Config struct {
	// DB connects as join_service, through rows.Open.
	DB        *pgxpool.Pool
	Attestors Attestors
	Issuer    Issuer
	Keys      Keys
	// TrustDomain is that of the SPIFFE ids.
	TrustDomain string
	// RootTenant is the operator's own namespace: what names no tenant lands there.
	RootTenant string
	Limits     Limits
	Logger     *slog.Logger
	Metrics    prometheus.Registerer
	// OnPending is told of each new pending row that may have an object, after its
	// commit. It must not block: the manager's sweep makes what it misses.
	OnPending func(PendingRequest)
	// OnRefusal is told of each refusal; it must not block.
	OnRefusal func(attestor, reason string)
}

// Limits bound what machines that wait or are refused may cost. A zero field takes
// the one of [DefaultLimits].
type Limits struct {
	// PerTenant and PerSource cap the undecided requests with an object of one
	// tenant and of one address (IPv4, or IPv6 /64).
	PerTenant, PerSource int
	// Total caps those of all, of which each tenant has Reserved for itself.
	Total, Reserved int
	// TokenFactor times the uses that a token has left caps those of one token.
	TokenFactor int
	// Rows caps the live rows; beyond them machines are told RATE_LIMITED.
	Rows int
	// RefusalsPerMinute bounds the recorded refusals of one attestor and reason,
	// over all replicas.
	RefusalsPerMinute int
}

// DefaultLimits are those of the design.
var DefaultLimits = Limits{
	PerTenant: 500, PerSource: 500, Total: 5000, Reserved: 50, TokenFactor: 2, Rows: 100_000, RefusalsPerMinute: 60,
}

func (l Limits) withDefaults() Limits {
	for _, f := range []struct {
		field *int
		value int
	}{
		{&l.PerTenant, DefaultLimits.PerTenant}, {&l.PerSource, DefaultLimits.PerSource},
		{&l.Total, DefaultLimits.Total}, {&l.Reserved, DefaultLimits.Reserved},
		{&l.TokenFactor, DefaultLimits.TokenFactor}, {&l.Rows, DefaultLimits.Rows},
		{&l.RefusalsPerMinute, DefaultLimits.RefusalsPerMinute},
	} {
		if *f.field == 0 {
			*f.field = f.value
		}
	}
	return l
}

// PendingRequest is a new row of join_requests: all that its JoinRequest object
// is made of.
type PendingRequest struct {
	ID, Namespace string
	AttestorType  string
	Spec          v1alpha1.JoinRequestAsk
}

// Service decides joins. Its methods may be called by many goroutines.
type Service struct {
	cfg      Config
	registry Attestors // metered
	db       *pgxpool.Pool
	limits   Limits
	log      *slog.Logger
	metrics  *metrics
	issuers  issuerRows
	seen     askedLog
	waiting  waitingCount
	refusals refusalLog
	notifier notifier
	health   health
}

// New makes a service. [Service.Run] must run beside it.
func New(cfg Config) (*Service, error) {
	switch {
	case cfg.DB == nil, cfg.Attestors == nil, cfg.Issuer == nil, cfg.Keys == nil, cfg.Logger == nil:
		return nil, errors.New("joinsvc: DB, Attestors, Issuer, Keys and Logger are required")
	case cfg.TrustDomain == "" || cfg.RootTenant == "":
		return nil, errors.New("joinsvc: TrustDomain and RootTenant are required")
	}
	m, err := newMetrics(cfg.Metrics)
	if err != nil {
		return nil, err
	}
	s := &Service{cfg: cfg, db: cfg.DB, limits: cfg.Limits.withDefaults(), log: cfg.Logger, metrics: m}
	s.registry = metered{cfg.Attestors, m}
	s.refusals.init()
	s.notifier.init()
	s.health.init()
	return s, nil
}

const (
	// prepareTimeout bounds an attestor's I/O, before any transaction.
	prepareTimeout = 5 * time.Second
	// verifyTimeout bounds a verifier, which does SQL and computation only.
	verifyTimeout = 3 * time.Second
	// acquireTimeout bounds the wait for a connection.
	acquireTimeout = 3 * time.Second
	// attemptTimeout bounds one transaction; the database's own timeouts (lock 2 s,
	// statement 5 s) end it earlier.
	attemptTimeout = 8 * time.Second
	// attempts is how often a transaction that lost a race starts again.
	attempts = 3
)
