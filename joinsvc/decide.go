package joinsvc

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/attestors"
)

// decide runs the transaction, and runs it again where it lost a race.
func (s *Service) decide(ctx context.Context, a *ask) (*wire.Answer, error) {
	careful := false
	for try := 1; ; try++ {
		answer, err := s.attempt(ctx, a, careful)
		switch {
		case errors.Is(err, errContended):
			// Every slot of the token is in somebody's hands: this time wait for one.
			careful = true
			try--
		case err == nil || !retryable(err):
			return answer, err
		case try == attempts:
			return nil, unavailable(fmt.Errorf("lost the race %d times: %w", attempts, err))
		default:
			s.metrics.retries.Inc()
		}
	}
}

// errContended says that uses are left, but that all of them are locked.
var errContended = errors.New("every slot with uses left is locked")

// attempt is the transaction, once.
func (s *Service) attempt(ctx context.Context, a *ask, careful bool) (*wire.Answer, error) {
	if err := s.health.err(); err != nil {
		return nil, unavailable(err)
	}
	conn, err := s.acquire(ctx)
	if err != nil {
		return nil, unavailable(fmt.Errorf("connect to the database: %w", err))
	}
	defer conn.Release()
	// From here on a machine that hangs up changes nothing: its join is finished,
	// and the answer waits for it in the rows.
	ctx, cancel := s.health.context(context.WithoutCancel(ctx), attemptTimeout)
	defer cancel()
	r := &round{Service: s, ask: a, tx: &transaction{conn: conn, answered: s.health.lives}, careful: careful}
	answer, err := r.run(ctx)
	if err != nil {
		r.tx.rollback(ctx)
		var refused *RefusedJoin
		if !errors.As(err, &refused) && (outage(err) || conn.Conn().IsClosed() || ctx.Err() != nil) {
			return nil, unavailable(err)
		}
		return nil, err
	}
	r.committed()
	return answer, nil
}

// acquire waits for a connection. One that takes too long to make is tried anew:
// a busy database is not a dead one.
func (s *Service) acquire(ctx context.Context) (*pgxpool.Conn, error) {
	ctx, cancel := s.health.context(ctx, acquireTimeout)
	defer cancel()
	for {
		conn, err := s.db.Acquire(ctx)
		if err == nil || ctx.Err() != nil || !pgconn.Timeout(err) {
			return conn, err
		}
	}
}

// round is one attempt at one round of a join.
type round struct {
	*Service
	*ask
	tx      *transaction
	careful bool

	now      time.Time
	token    *token       // nil where there is none of the sealed id
	answered *certificate // nil where the CSR was never answered
	requests []*request   // those of the CSR that live

	// after is what is left to do once the transaction is committed.
	after func()
}

func (r *round) committed() {
	if r.after != nil {
		r.after()
	}
}

func (r *round) run(ctx context.Context) (*wire.Answer, error) {
	if err := r.read(ctx); err != nil {
		return nil, err
	}
	out, err := r.verify(ctx, r.ask, r.joinContext())
	if err != nil {
		return nil, err
	}
	if err := r.tx.intact(); err != nil {
		return nil, failure(r.ask, err)
	}
	switch o := out.(type) {
	case *attestors.Challenge:
		return r.challenge(ctx, o)
	case *attestors.Pending:
		if o.Would == nil {
			return nil, failure(r.ask, errors.New("a Pending without what approval would admit"))
		}
		return r.admit(ctx, o.Would, true)
	case *attestors.Admit:
		return r.admit(ctx, o, false)
	}
	return nil, failure(r.ask, fmt.Errorf("an outcome of type %T", out))
}

// read takes the lock on the CSR and reads all that a token join needs. A CSR that
// is known already costs a round trip more.
func (r *round) read(ctx context.Context) error {
	known := false
	var ts tokenScan
	var b pgx.Batch
	b.Queue("BEGIN")
	b.Queue(lockCSRSQL, csrLock(r.csr.SHA256))
	b.Queue(readSQL, r.csr.SHA256[:], r.tokenID)
	err := r.tx.begin(ctx, &b, nil, nil, func(rows pgx.Rows) error {
		return rows.Scan(append([]any{&r.now, &known}, ts.fields()...)...)
	})
	if err != nil {
		return err
	}
	if r.token, err = ts.value(r.tokenID); err != nil || !known {
		return err
	}
	var k pgx.Batch
	k.Queue(answeredSQL, r.csr.SHA256[:])
	k.Queue(requestsSQL, r.csr.SHA256[:])
	return r.tx.send(ctx, &k,
		func(rows pgx.Rows) error {
			r.answered = &certificate{}
			return rows.Scan(r.answered.fields()...)
		},
		func(rows pgx.Rows) error {
			q, err := scanRequest(rows)
			r.requests = append(r.requests, q)
			return err
		})
}

func (r *round) joinContext() *attestors.JoinContext {
	return &attestors.JoinContext{
		Role: r.wire.Role, CSRSHA256: r.csr.SHA256, PublicKey: r.csr.PublicKey, PublicKeySHA256: r.csr.PublicKeySHA256,
		Token: r.sealed.Token, Claims: r.sealed.Claims, Now: r.now, FirstSeen: r.firstSeen, Prepared: r.prepared,
		Tx: attestorTx{r.tx.conn.Conn()}, Tokens: tokenStore{r},
	}
}

// firstSeen is when this attestor type, subject and CSR were first seen.
func (r *round) firstSeen(subject []byte) time.Time {
	sum := sha256.Sum256(subject)
	if c := r.answered; c != nil && c.attestorType == r.attestor.Type() && bytes.Equal(c.subject, sum[:]) {
		return c.firstSeenAt
	}
	if q := r.request(sum); q != nil && !q.lapsed() {
		return q.firstSeenAt
	}
	return r.now
}

// request finds the live request of this attestor type and subject.
func (r *round) request(subject [32]byte) *request {
	for _, q := range r.requests {
		if q.attestorType == r.attestor.Type() && bytes.Equal(q.subject, subject[:]) {
			return q
		}
	}
	return nil
}

// tokenStore looks tokens up in the join's transaction.
type tokenStore struct{ r *round }

// Token costs nothing for the token that the machine sealed.
func (s tokenStore) Token(ctx context.Context, id string) (*attestors.TokenRow, error) {
	t, err := s.r.findToken(ctx, id)
	if err != nil || t == nil {
		return nil, err
	}
	row := t.TokenRow
	return &row, nil
}

func (r *round) findToken(ctx context.Context, id string) (*token, error) {
	if id == r.tokenID {
		return r.token, nil
	}
	var ts tokenScan
	var b pgx.Batch
	b.Queue(tokenSQL, id)
	if err := r.tx.send(ctx, &b, func(rows pgx.Rows) error { return rows.Scan(ts.fields()...) }); err != nil {
		return nil, err
	}
	return ts.value(id)
}

// challenge answers a first round that writes no row.
func (r *round) challenge(ctx context.Context, c *attestors.Challenge) (*wire.Answer, error) {
	state, err := r.cfg.Keys.SealState(challengePurpose, stateAAD(r.ask), c.State)
	if err != nil {
		return nil, unavailable(fmt.Errorf("seal the state of a challenge: %w", err))
	}
	// Nothing of this round is kept: any replica may finish the join.
	r.tx.rollback(ctx)
	a := r.answer(wire.OutcomeChallenge)
	a.Attestor, a.Challenge, a.State = r.attestor.ID(), wire.EncodeBase64(c.Data), wire.EncodeBase64(state)
	return a, nil
}

func (r *round) answer(o wire.Outcome) *wire.Answer {
	return &wire.Answer{
		Protocol: wire.Protocol, CSRSHA256: hex.EncodeToString(r.csr.SHA256[:]), Outcome: o, IssuedAt: r.now.UTC().Truncate(time.Second),
	}
}

// again answers a CSR that was answered before: with the same certificate, for as
// long as it is the newest of its node, or not at all. It spends nothing.
func (r *round) again(ctx context.Context, ad *admission) (*wire.Answer, error) {
	c := r.answered
	refuse := func(reason, format string, args ...any) error {
		return r.ask.refuse(attestors.Refuse(reason).InTenant(ad.Tenant).Because(format, args...))
	}
	switch {
	case c.state == "":
		return nil, refuse("csr-of-deleted-node", "the CSR is that of the deleted node %s: the machine needs a new key (bcd reset)", c.nodeID)
	case c.state == retired:
		return nil, refuse("csr-of-retired-node", "the CSR is that of the retired node %s: the machine needs a new key (bcd reset)", c.nodeID)
	case c.attestorType != r.attestor.Type() || !bytes.Equal(c.subject, ad.subject[:]) || c.tokenID != ad.TokenID:
		return nil, refuse("csr-of-another-subject", "the CSR joined before by other evidence, as node %s", c.nodeID)
	case c.tenant != ad.Tenant:
		return nil, refuse("csr-of-another-tenant", "the CSR joined before in another tenant")
	case c.role != string(ad.Role):
		return nil, refuse("csr-of-another-role", "the CSR joined before with the role %s, as node %s", c.role, c.nodeID)
	case c.revoked:
		return nil, refuse("csr-revoked", "the certificate of this CSR was revoked (node %s)", c.nodeID)
	case c.outdated:
		return nil, refuse("csr-outdated", "node %s has a newer certificate than the one of this CSR", c.nodeID)
	case c.issuer == nil:
		return nil, fmt.Errorf("the issuer of node %s's certificate has no row", c.nodeID)
	}
	var b pgx.Batch
	if err := r.tx.commit(ctx, &b); err != nil {
		return nil, err
	}
	return r.joined(c.nodeID, Place{c.tenant, wire.Role(c.role), c.pool, c.site}, c.der, c.issuer, c.allowedKinds, c.notAfter), nil
}

func (r *round) joined(nodeID string, at Place, leaf, issuer []byte, kinds []string, notAfter time.Time) *wire.Answer {
	a := r.answer(wire.OutcomeJoined)
	a.NodeID, a.Tenant, a.Site, a.Pool, a.Role = nodeID, at.Tenant, at.Site, at.Pool, at.Role
	a.Certificates = []string{wire.EncodeBase64(leaf), wire.EncodeBase64(issuer)}
	if kinds != nil {
		a.AllowedKinds = &kinds
	}
	notAfter = notAfter.UTC()
	a.NotAfter = &notAfter
	return a
}
