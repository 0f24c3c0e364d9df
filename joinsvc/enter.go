package joinsvc

import (
	"context"
	"crypto/rand"
	"encoding/base32"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/joinsvc/pki"
)

// enter lets the machine in: it takes what locks are missing, signs the
// certificate and commits it with the node, its event and its audit row. q is the
// approved request that is consumed, or nil.
func (r *round) enter(ctx context.Context, ad *admission, q *request) (*wire.Answer, error) {
	// What only tokens, and new nodes without a history, need no locks for is
	// taken with the statement that writes.
	plain := ad.token != nil && q == nil && ad.obsolete == nil && ad.target == nil && len(ad.former) == 0 && ad.Bind == nil && ad.Use == nil && !r.careful
	var slot int16
	if plain {
		slot = ad.token.someSlot()
	} else {
		var err error
		if slot, err = r.lock(ctx, ad, q); err != nil {
			return nil, err
		}
	}
	nodeID := newNodeID()
	if ad.target != nil {
		nodeID = ad.target.id
	}
	lifetime := ad.dest.lifetime
	if ad.Role == wire.RoleRamdisk {
		lifetime = ad.dest.ramdiskLifetime
	}
	leaf, err := r.cfg.Issuer.Issue(pki.Leaf{
		PublicKey: r.csr.PublicKey, TrustDomain: r.cfg.TrustDomain, Tenant: ad.Tenant, Role: ad.Role, NodeID: nodeID,
		Now: r.now, Lifetime: lifetime, NodeKeyURI: ad.NodeKeyURI,
	})
	if errors.Is(err, pki.ErrNoIssuer) {
		return nil, unavailable(err)
	}
	if err != nil {
		return nil, fmt.Errorf("issue a certificate: %w", err)
	}
	if err := r.write(ctx, ad, q, plain, slot, nodeID, leaf); err != nil {
		return nil, err
	}
	r.after = func() {
		r.issuers.committed(leaf)
		r.notifier.notify()
	}
	return r.joined(nodeID, ad.place(), leaf.DER, leaf.IssuerDER, ad.AllowedKinds, leaf.NotAfter), nil
}

// lock takes the locks of the request, the token's slot and the node, in this
// order, and holds what was read against what is locked.
func (r *round) lock(ctx context.Context, ad *admission, q *request) (slot int16, err error) {
	slot = -1
	lockedRequest := q == nil
	var lockedNode *node
	var b pgx.Batch
	var reads []func(pgx.Rows) error
	if q != nil {
		b.Queue(lockRequestSQL, q.id)
		reads = append(reads, func(pgx.Rows) error { lockedRequest = true; return nil })
	}
	if ad.token != nil {
		b.Queue(lockSlotSQL, ad.TokenID)
		reads = append(reads, func(rows pgx.Rows) error { return rows.Scan(&slot) })
	}
	if b.Len() > 0 {
		if err := r.tx.send(ctx, &b, reads...); err != nil {
			return 0, err
		}
	}
	if !lockedRequest {
		return 0, errRace
	}
	if ad.token != nil && slot < 0 {
		// Somebody holds every slot that has uses: only now is it worth waiting, and
		// only when nothing is left then, nothing is left.
		var wait pgx.Batch
		wait.Queue(awaitSlotSQL, ad.TokenID)
		if err := r.tx.send(ctx, &wait, func(rows pgx.Rows) error { return rows.Scan(&slot) }); err != nil {
			return 0, err
		}
		if slot < 0 {
			return 0, r.spent(ad)
		}
	}
	if ad.target == nil {
		return slot, nil
	}
	var n pgx.Batch
	n.Queue(lockNodeSQL, ad.target.id)
	err = r.tx.send(ctx, &n, func(rows pgx.Rows) error {
		lockedNode = &node{}
		return rows.Scan(lockedNode.fields()...)
	})
	if err != nil {
		return 0, err
	}
	if lockedNode == nil {
		return 0, errRace
	}
	return slot, r.checkReclaim(ad, lockedNode)
}

// write sends all that a join leaves behind, in the order of the locks, with its
// COMMIT.
func (r *round) write(ctx context.Context, ad *admission, q *request, plain bool, slot int16, nodeID string, leaf *pki.Issued) error {
	args, err := r.entered(ad, q, nodeID, leaf)
	if err != nil {
		return err
	}
	var b pgx.Batch
	var reads []func(pgx.Rows) error
	queue := func(read func(pgx.Rows) error, sql string, args ...any) {
		b.Queue(sql, args...)
		reads = append(reads, read)
	}
	if q != nil {
		queue(nil, consumeRequestSQL, q.id, nodeID)
	}
	if ad.obsolete != nil {
		queue(nil, endRequestSQL, ad.obsolete.id, ad.obsolete.endsAs())
	}
	if ad.token != nil && !plain {
		queue(nil, spendSlotSQL, ad.TokenID, slot)
	}
	for _, f := range ad.former {
		queue(nil, releaseKeySQL, f.id)
	}
	if ad.target != nil {
		queue(nil, endCertsSQL, nodeID)
	}
	certs := 0
	count := func(rows pgx.Rows) error { return rows.Scan(&certs) }
	switch {
	case plain:
		queue(count, spendAndEnterSQL, append(args, slot)...)
	case ad.target != nil:
		queue(count, rekeySQL, args...)
	default:
		queue(count, enterSQL, args...)
	}
	switch {
	case ad.Bind == nil || (ad.bound && len(ad.former) == 0):
	case ad.bound:
		queue(nil, rebindSQL, r.attestor.Type(), ad.Bind, nodeID)
	default:
		queue(nil, bindSQL, r.attestor.Type(), ad.Bind, nodeID)
	}
	if ad.Use != nil {
		var expires any
		if !ad.Use.ExpiresAt.IsZero() {
			expires = ad.Use.ExpiresAt
		}
		queue(nil, useSQL, r.attestor.Type(), ad.Use.Subject, nodeID, expires)
	}
	r.issuers.queue(&b, leaf)
	err = r.tx.commit(ctx, &b, reads...)
	switch {
	case reused(err):
		return r.reused(ad)
	case err != nil:
		return err
	case certs == 0 && plain:
		// Nothing was written, and nothing committed but that.
		return errContended
	case certs != 1:
		return fmt.Errorf("a join wrote %d certificates", certs)
	}
	return nil
}

// joinedEvent is the data of node.joined.
type joinedEvent struct {
	Attestor    string `json:"attestor"`
	NodeKey     string `json:"nodeKey"`
	Serial      string `json:"serial"`
	Pool        string `json:"pool"`
	Reclaimed   bool   `json:"reclaimed"`
	JoinRequest string `json:"joinRequest,omitempty"`
	TokenID     string `json:"tokenID,omitempty"`
}

// joinedAudit is the detail of the audit row of a join.
type joinedAudit struct {
	joinedEvent
	Role      wire.Role `json:"role"`
	Site      string    `json:"site,omitempty"`
	CSRSHA256 string    `json:"csrSHA256"`
	// Source is the machine's address as the gateway saw it.
	Source string `json:"source,omitempty"`
}

// unattested is the node key of a node whose certificate makes no statement.
const unattested = "unattested"

// entered is the parameters that the statements which enter a node share.
func (r *round) entered(ad *admission, q *request, nodeID string, leaf *pki.Issued) ([]any, error) {
	event := joinedEvent{
		Attestor: r.attestor.ID(), NodeKey: unattested, Serial: hex.EncodeToString(leaf.Serial), Pool: ad.Pool, Reclaimed: ad.target != nil, TokenID: ad.TokenID,
	}
	if ad.NodeKeyURI != "" {
		event.NodeKey = ad.NodeKeyURI
	}
	firstSeen := r.now
	if q != nil {
		event.JoinRequest = objectName(q.id)
		firstSeen = q.firstSeenAt
	}
	data, err := json.Marshal(event)
	if err != nil {
		return nil, err
	}
	detail, err := json.Marshal(joinedAudit{event, ad.Role, ad.Site, hex.EncodeToString(r.csr.SHA256[:]), r.source})
	if err != nil {
		return nil, err
	}
	facts := "{}"
	if len(ad.Facts) > 0 {
		b, err := json.Marshal(ad.Facts)
		if err != nil {
			return nil, err
		}
		facts = string(b)
	}
	var tokenID *string
	if ad.TokenID != "" {
		tokenID = &ad.TokenID
	}
	args := make([]any, 0, 25)
	return append(args,
		nodeID, ad.Tenant, string(nodeRole(ad.Role)), ad.Pool, ad.Site, r.attestor.ID(), r.attestor.Type(), ad.trustedKey, ad.NodeKeyURI, facts,
		leaf.Serial, string(ad.Role), ad.subject[:], tokenID, r.csr.SHA256[:], leaf.DER, leaf.IssuerSHA256[:], leaf.IssuerSKI,
		slices.Clone(ad.AllowedKinds), firstSeen, leaf.NotAfter, string(data), "attestor:"+r.attestor.ID(), string(detail)), nil
}

var lowerBase32 = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// newNodeID makes the name of a node: 100 random bits in a DNS label.
func newNodeID() string { return "n-" + randomText(20) }

// newRequestID makes the id of a request, 80 random bits.
func newRequestID() string { return randomText(16) }

// randomText is n characters of 5 random bits each.
func randomText(n int) string {
	var b [20]byte
	rand.Read(b[:])
	return lowerBase32.EncodeToString(b[:])[:n]
}

// objectName is the name of the JoinRequest of a row.
func objectName(id string) string { return "jr-" + id }
