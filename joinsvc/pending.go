package joinsvc

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"maps"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/api/wire"
)

// decidedFor is how long an approval waits to be used, and how long a rejection is
// remembered.
const decidedFor = 7 * 24 * time.Hour

// approved reports whether a person let the machine in, and not too long ago.
func (q *request) approved() bool {
	return q.verdict == v1alpha1.VerdictApproved && q.sinceDecided < decidedFor
}

// rejected reports whether a person turned the machine away, and not too long ago.
func (q *request) rejected() bool {
	return q.verdict == v1alpha1.VerdictRejected && q.sinceDecided < decidedFor
}

func (q *request) undecided() bool { return q.verdict == "" }

// lapsed reports whether the request was decided so long ago that it no longer
// means anything.
func (q *request) lapsed() bool { return !q.undecided() && q.sinceDecided >= decidedFor }

// endsAs is what a request becomes that is neither consumed nor waits any longer.
func (q *request) endsAs() string {
	if q.lapsed() {
		return "Expired"
	}
	return "Superseded"
}

// asks reports whether the machine asks for exactly what the request says: the
// attestor's type, the subject and the CSR are its key.
func (q *request) asks(ad *admission) bool {
	facts, err := stableFacts(ad)
	return err == nil && q.role == string(ad.Role) && q.tenant == ad.asked.Tenant && q.pool == ad.asked.Pool && q.site == ad.asked.Site &&
		bytes.Equal(q.facts, facts[:])
}

// leadsTo reports whether the machine would enter the node that the request named:
// the same one again, or a new one.
func (q *request) leadsTo(ad *admission) bool {
	if ad.target == nil {
		return q.nodeName == ""
	}
	return q.nodeName == ad.target.id
}

// redirect sends the machine where the person who approved it sent it.
func (q *request) redirect(ad *admission) {
	if q.decidedTenant != "" {
		ad.Tenant = q.decidedTenant
	}
	if q.decidedPool != "" {
		ad.Pool = q.decidedPool
	}
}

// stableFacts is the hash of what was proved and does not change from one round
// to the next.
func stableFacts(ad *admission) ([32]byte, error) {
	b, err := json.Marshal(struct {
		Facts       map[string]string `json:"facts,omitempty"`
		HardwareKey []byte            `json:"hardwareKey,omitempty"`
		NodeKeyURI  string            `json:"nodeKeyURI,omitempty"`
	}{ad.Facts, ad.trustedKey, ad.NodeKeyURI})
	return sha256.Sum256(b), err
}

func (r *round) rejected(ad *admission) error {
	return r.refuse(ad, "rejected", "a person rejected this machine's JoinRequest; that is remembered for 7 days")
}

// pending has the machine wait for a person, or consumes that person's approval.
func (r *round) pending(ctx context.Context, ad *admission, q *request) (*wire.Answer, error) {
	switch {
	case q == nil:
	case q.rejected():
		return nil, r.rejected(ad)
	case q.approved() && q.asks(ad) && q.leadsTo(ad):
		if ad.Tenant == "" || ad.Pool == "" {
			return nil, r.refuse(ad, "unassigned", "JoinRequest %s was approved without a tenant or a pool", objectName(q.id))
		}
		return r.enter(ctx, ad, q)
	case q.undecided() && q.asks(ad) && q.leadsTo(ad):
		return r.wait(ctx, q)
	default:
		ad.obsolete = q // what was asked then is not what is asked now
	}
	return r.askPerson(ctx, ad)
}

// wait answers a poll that finds its request undecided. It writes nothing: when
// the machine last asked is noted later, together with others.
func (r *round) wait(ctx context.Context, q *request) (*wire.Answer, error) {
	if err := r.tx.commit(ctx, &pgx.Batch{}); err != nil {
		return nil, err
	}
	if q.sinceAsked > askedEvery {
		r.after = func() { r.seen.add(q.id) }
	}
	return r.waitAnswer(q.id, r.now.Sub(q.firstSeenAt)), nil
}

func (r *round) waitAnswer(id string, age time.Duration) *wire.Answer {
	a := r.answer(wire.OutcomePending)
	a.JoinRequest = objectName(id)
	a.RetryAfterSeconds = int(retryAfter(age, r.waiting.undecided()) / time.Second)
	return a
}

const (
	minRetry = 15 * time.Second
	maxRetry = 10 * time.Minute
	// pollsPerSecond is what all machines that wait may ask together.
	pollsPerSecond = 150
)

// retryAfter is when a machine that waits comes again: later the longer it waits,
// and so late that all together stay below [pollsPerSecond].
func retryAfter(age time.Duration, waiting int64) time.Duration {
	d := max(minRetry, age/20, time.Duration(waiting)*time.Second/pollsPerSecond)
	return min(d, maxRetry).Truncate(time.Second)
}

// caps is what a new request is held against.
type caps struct {
	tenant, source, token, usesLeft, total int
	rejected                               bool
}

// capped reports whether a request waits without an object.
func (l Limits) capped(c caps, byToken bool) bool {
	switch {
	case c.total >= l.Total && c.tenant >= l.Reserved:
	case c.tenant >= l.PerTenant:
	case c.source >= l.PerSource:
	case byToken && c.token >= l.TokenFactor*c.usesLeft:
	default:
		return false
	}
	return true
}

// askPerson enters a new request.
func (r *round) askPerson(ctx context.Context, ad *admission) (*wire.Answer, error) {
	namespace := ad.Tenant
	if namespace == "" {
		namespace = r.cfg.RootTenant
	}
	c, err := r.caps(ctx, ad, namespace)
	if err != nil {
		return nil, err
	}
	if c.rejected {
		return nil, r.rejected(ad)
	}
	spec := r.spec(ad)
	canonical, err := spec.Canonical()
	if err != nil {
		return nil, err
	}
	facts, err := stableFacts(ad)
	if err != nil {
		return nil, err
	}
	id, hash, capped := newRequestID(), sha256.Sum256(canonical), r.limits.capped(c, ad.token != nil)
	firstSeen := r.now
	var b pgx.Batch
	if ad.obsolete != nil {
		if !ad.obsolete.lapsed() {
			firstSeen = ad.obsolete.firstSeenAt
		}
		b.Queue(endRequestSQL, ad.obsolete.id, ad.obsolete.endsAs())
	}
	if ad.SubjectProved {
		b.Queue(supersedeSQL, r.attestor.Type(), ad.subject[:], r.csr.SHA256[:])
	}
	b.Queue(insertRequestSQL, id, r.attestor.Type(), r.attestor.ID(), ad.subject[:], ad.SubjectProved, r.csr.SHA256[:], string(ad.Role), namespace,
		ad.asked.Tenant, ad.asked.Pool, ad.asked.Site, facts[:], ad.TokenID, r.source, string(canonical), hash[:], capped, firstSeen)
	b.Queue(pendingEventSQL, namespace, id)
	if err := r.tx.commit(ctx, &b); err != nil {
		return nil, err
	}
	r.after = func() {
		r.waiting.add()
		r.notifier.notify()
		if capped {
			r.metrics.capped.Inc()
			return
		}
		if r.cfg.OnPending != nil {
			r.cfg.OnPending(PendingRequest{ID: id, Namespace: namespace, AttestorType: r.attestor.Type(), Spec: *spec})
		}
	}
	return r.waitAnswer(id, r.now.Sub(firstSeen)), nil
}

// caps counts what caps a new request, with the lock on its subject where that is
// proved: of two CSRs that ask at once, the second sees the first.
func (r *round) caps(ctx context.Context, ad *admission, namespace string) (caps, error) {
	var c caps
	live := r.waiting.live()
	var b pgx.Batch
	var reads []func(pgx.Rows) error
	if ad.SubjectProved {
		b.Queue(lockSubjectSQL, subjectLock(r.attestor.Type(), ad.subject))
		reads = append(reads, nil)
	}
	b.Queue(capsSQL, namespace, r.limits.PerTenant, r.source, r.limits.PerSource, ad.TokenID, r.limits.Total,
		ad.SubjectProved, r.attestor.Type(), ad.subject[:], decidedFor)
	reads = append(reads, func(rows pgx.Rows) error {
		return rows.Scan(&c.tenant, &c.source, &c.token, &c.usesLeft, &c.total, &c.rejected)
	})
	if live >= int64(r.limits.Rows)*3/4 {
		// The replica's own count may be old: near the limit it is counted anew.
		b.Queue(liveRowsSQL, r.limits.Rows)
		reads = append(reads, func(rows pgx.Rows) error { return rows.Scan(&live) })
	}
	if err := r.tx.send(ctx, &b, reads...); err != nil {
		return c, err
	}
	if r.source == "" {
		c.source = 0
	}
	if live >= int64(r.limits.Rows) {
		return c, &Problem{Code: wire.RateLimited, Detail: "too many machines wait for approval", RetryAfter: maxRetry}
	}
	return c, nil
}

// subjectLock is the key of the advisory lock on a proved subject.
func subjectLock(attestorType string, subject [32]byte) int64 {
	sum := sha256.Sum256(append([]byte(attestorType+"\x00"), subject[:]...))
	return int64(binary.BigEndian.Uint64(sum[:8]))
}

// spec is what a person is shown.
func (r *round) spec(ad *admission) *v1alpha1.JoinRequestAsk {
	ask := &v1alpha1.JoinRequestAsk{
		Attestor: r.attestor.ID(), AttestorVersion: r.attestor.Version(), Role: v1alpha1.Role(ad.Role),
		Pool: ad.asked.Pool, Site: ad.asked.Site,
		CSRSHA256: hex.EncodeToString(r.csr.SHA256[:]), PublicKeySHA256: hex.EncodeToString(r.csr.PublicKeySHA256[:]),
		SubjectSHA256: hex.EncodeToString(ad.subject[:]), HardwareKeySHA256: hex.EncodeToString(ad.trustedKey),
		Claims: claims(r.sealed.Claims),
	}
	if ad.target != nil {
		ask.NodeName = ad.target.id
	}
	if len(ad.Facts) > 0 {
		ask.Facts = make(map[string]v1alpha1.PrintableValue, len(ad.Facts))
		for k, v := range maps.All(ad.Facts) {
			ask.Facts[k] = v1alpha1.PrintableValue(v)
		}
	}
	return ask
}

// claims is what the machine says of itself, made fit for a terminal.
func claims(c wire.Claims) map[string]v1alpha1.PrintableValue {
	out := map[string]v1alpha1.PrintableValue{}
	for name, value := range map[string]string{
		"productUUID": c.ProductUUID, "serialNumber": c.SerialNumber,
		"macAddresses": joinUpTo(c.MACAddresses, maxFactValue), "hardwareKeySHA256": c.HardwareKeySHA256,
	} {
		if value != "" {
			out[name] = v1alpha1.PrintableValue(fit(value))
		}
	}
	if len(out) == 0 {
		return nil
	}
	return out
}

// joinUpTo joins values until there is enough to fill n characters.
func joinUpTo(values []string, n int) string {
	var b strings.Builder
	for i, v := range values {
		if b.Len() > n {
			break
		}
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(v)
	}
	return b.String()
}

// fit cuts a value to what an object may hold and replaces what a terminal would
// obey instead of show.
func fit(s string) string {
	if len(s) > maxFactValue {
		s = s[:maxFactValue]
	}
	b := []byte(s)
	for i, c := range b {
		if c < ' ' || c > '~' {
			b[i] = '?'
		}
	}
	return string(b)
}
