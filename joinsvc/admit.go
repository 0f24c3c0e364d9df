package joinsvc

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"

	"github.com/jackc/pgx/v5"

	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/attestors"
	"github.com/better-compute/join-operator/attestors/hardware"
)

// admission is what an attestor would admit, as far as the service has checked it.
type admission struct {
	attestors.Admit
	subject [32]byte
	// asked is where the attestor sends the machine; a person may send it elsewhere.
	asked Place
	token *token // set where TokenID is
	// trustedKey is a hardware key that was proved, nil where there is none.
	trustedKey []byte
	// target is the node to reclaim, nil for a new one.
	target *node
	// former are retired nodes of the same machine: a person lets it in again.
	former []*node
	// bound is true where the subject to bind is known, be it of a retired node.
	bound bool
	dest  destination
	// obsolete is a live request that ends with this join though it is not consumed.
	obsolete *request
}

func (ad *admission) place() Place { return Place{ad.Tenant, ad.Role, ad.Pool, ad.Site} }

// nodeRole is the role of the node that a certificate's role leads to: ramdisk is
// the role of a certificate only.
func nodeRole(r wire.Role) wire.Role {
	if r == wire.RoleRamdisk {
		return wire.RoleNode
	}
	return r
}

// admit checks what the attestor would admit, and lets the machine in, or has it
// wait where the attestor or the pool wants a person's word.
func (r *round) admit(ctx context.Context, would *attestors.Admit, deferred bool) (*wire.Answer, error) {
	if err := r.wellFormed(would); err != nil {
		return nil, failure(r.ask, err)
	}
	if (would.Tenant == "" || would.Pool == "") && !deferred {
		return nil, failure(r.ask, errors.New("an Admit without a tenant or a pool"))
	}
	ad := &admission{Admit: *would, subject: sha256.Sum256(would.Subject)}
	ad.asked = ad.place()
	if err := r.checkStatement(ad); err != nil {
		return nil, err
	}
	if err := r.checkToken(ctx, ad); err != nil {
		return nil, err
	}
	q := r.request(ad.subject)
	if q != nil && q.approved() && q.asks(ad) {
		q.redirect(ad)
	}
	if c := r.answered; c != nil {
		if ad.Tenant == "" {
			ad.Tenant = c.tenant // where a person sent the machine
		}
		if err := r.checkTenant(ctx, ad); err != nil {
			return nil, err
		}
		return r.again(ctx, ad)
	}
	if err := r.checkTenant(ctx, ad); err != nil {
		return nil, err
	}
	if ad.Pool != "" && !ad.dest.poolExists {
		return nil, r.refuse(ad, "pool-missing", "there is no FleetPool %s/%s: create it, or send the machine elsewhere", ad.Tenant, ad.Pool)
	}
	if ad.token != nil && !ad.token.usesLeft {
		return nil, r.spent(ad)
	}
	if err := r.checkUse(ctx, ad); err != nil {
		return nil, err
	}
	if err := r.findTarget(ctx, ad); err != nil {
		return nil, err
	}
	if deferred || ad.dest.requireApproval || len(ad.former) > 0 {
		return r.pending(ctx, ad, q)
	}
	if q != nil {
		switch {
		case q.rejected():
			return nil, r.rejected(ad)
		case q.approved() && q.asks(ad) && q.leadsTo(ad):
			return r.enter(ctx, ad, q)
		}
		ad.obsolete = q // the pool asks nobody any more
	}
	return r.enter(ctx, ad, nil)
}

// refuse refuses what the evidence authenticated the tenant of.
func (r *round) refuse(ad *admission, reason, format string, args ...any) *RefusedJoin {
	return r.ask.refuse(attestors.Refuse(reason).InTenant(ad.Tenant).Because(format, args...))
}

func (r *round) spent(ad *admission) error {
	return r.refuse(ad, "spent", "JoinToken %s/%s has no uses left: raise its spec.uses, or make another one", ad.token.Tenant, ad.token.Name)
}

var (
	kindPattern      = regexp.MustCompile(`^[a-z0-9]+([.-][a-z0-9]+)*(\.\*)?$`)
	statementPattern = regexp.MustCompile(`^urn:bc:tpm-ak:[0-9a-f]{64}$`)
)

const (
	maxFacts     = 32
	maxFactValue = 256
	hashLength   = sha256.Size
)

// wellFormed finds what no attestor may return: bugs of its own.
func (r *round) wellFormed(a *attestors.Admit) error {
	switch {
	case len(a.Subject) == 0:
		return errors.New("an Admit without a subject")
	case a.Role != r.wire.Role:
		return fmt.Errorf("an Admit with the role %q where %q was asked for", a.Role, r.wire.Role)
	case a.Bind != nil && len(a.Bind) != hashLength:
		return fmt.Errorf("a subject to bind of %d bytes", len(a.Bind))
	case a.HardwareKey != nil && len(a.HardwareKey) != hashLength:
		return fmt.Errorf("a hardware key of %d bytes", len(a.HardwareKey))
	case a.Use != nil && len(a.Use.Subject) != hashLength:
		return fmt.Errorf("a use with a subject of %d bytes", len(a.Use.Subject))
	case len(a.Facts) > maxFacts:
		return fmt.Errorf("%d facts", len(a.Facts))
	}
	for k, v := range a.Facts {
		if len(k) > maxFactValue || len(v) > maxFactValue || !printable(k) || !printable(v) {
			return errors.New("a fact that is too long or not printable")
		}
	}
	for _, k := range a.AllowedKinds {
		if !kindPattern.MatchString(k) {
			return errors.New("an allowed kind that is neither a kind nor prefix.*")
		}
	}
	return nil
}

func printable(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}

// checkStatement refuses a statement that nobody could prove at renewal.
func (r *round) checkStatement(ad *admission) error {
	if ad.NodeKeyURI == "" {
		return nil
	}
	prover, ok := r.cfg.Issuer.(NodeKeyProver)
	if ok && statementPattern.MatchString(ad.NodeKeyURI) && prover.ProvesNodeKey(ad.NodeKeyURI) {
		return nil
	}
	refused := r.refuse(ad, "node-key-statement", "the statement about the node's key could not be proved at renewal")
	refused.Attestor = "join"
	return refused
}

// checkToken holds the machine against what its token expects.
func (r *round) checkToken(ctx context.Context, ad *admission) error {
	ad.trustedKey = ad.HardwareKey
	if claimed, ok := hardware.KeyHash(r.sealed.Claims.HardwareKeySHA256); ok && ad.trustedKey == nil && claimed == hex.EncodeToString(r.csr.PublicKeySHA256[:]) {
		ad.trustedKey = r.csr.PublicKeySHA256[:]
	}
	if ad.TokenID == "" {
		return nil
	}
	t, err := r.findToken(ctx, ad.TokenID)
	if err != nil {
		return err
	}
	if t == nil || t.Tenant != ad.Tenant {
		return failure(r.ask, errors.New("an Admit by a token that does not exist in its tenant"))
	}
	ad.token = t
	if m := hardware.Match(t.Expect, r.sealed.Claims, ad.trustedKey); m != "" {
		return r.refuse(ad, string(m), "JoinToken %s/%s is for another machine: compare its spec.expect with what the machine says of itself", t.Tenant, t.Name)
	}
	return nil
}

// checkTenant finds where the join leads. The tenant must be one, now.
func (r *round) checkTenant(ctx context.Context, ad *admission) error {
	switch {
	case ad.Tenant == "":
		return nil // unassigned: a person will say
	case ad.token != nil && ad.token.Tenant == ad.Tenant && ad.token.Pool == ad.Pool:
		ad.dest = ad.token.destination
	default:
		ad.dest = destination{}
		var b pgx.Batch
		b.Queue(destinationSQL, ad.Tenant, ad.Pool)
		if err := r.tx.send(ctx, &b, func(rows pgx.Rows) error { return rows.Scan(ad.dest.fields()...) }); err != nil {
			return err
		}
	}
	if ad.dest.tenantState != "active" {
		state := ad.dest.tenantState
		if state == "" {
			state = "unknown"
		}
		return r.refuse(ad, "tenant-"+state, "the namespace %s is no tenant that machines may join now (%s)", ad.Tenant, state)
	}
	return nil
}

// checkUse refuses evidence that was used; whoever uses it in this very moment is
// found out by the row's key.
func (r *round) checkUse(ctx context.Context, ad *admission) error {
	if ad.Use == nil {
		return nil
	}
	used := false
	var b pgx.Batch
	b.Queue(usedSQL, r.attestor.Type(), ad.Use.Subject)
	err := r.tx.send(ctx, &b, func(pgx.Rows) error { used = true; return nil })
	if err == nil && used {
		return r.reused(ad)
	}
	return err
}

func (r *round) reused(ad *admission) error {
	return r.refuse(ad, "reused", "the evidence admitted a machine before")
}

// findTarget finds the node that the machine is already, by the id that the
// attestor named, by its hardware key, and by what is bound, and refuses what
// would make it another.
func (r *round) findTarget(ctx context.Context, ad *admission) error {
	if ad.NodeID == "" && ad.trustedKey == nil && ad.Bind == nil {
		return nil
	}
	found := map[string]*node{}
	var b pgx.Batch
	b.Queue(candidatesSQL, ad.NodeID, ad.trustedKey, r.attestor.Type(), ad.Bind)
	err := r.tx.send(ctx, &b, func(rows pgx.Rows) error {
		var by string
		var n node
		if err := rows.Scan(append([]any{&by}, n.fields()...)...); err != nil {
			return err
		}
		found[by] = &n
		return nil
	})
	if err != nil {
		return err
	}
	if ad.NodeID != "" && found["id"] == nil {
		return r.refuse(ad, "node-unknown", "there is no node %s", ad.NodeID)
	}
	ad.bound = found["binding"] != nil
	known := map[string]bool{}
	for _, by := range []string{"id", "hardware", "binding"} {
		n := found[by]
		switch {
		case n == nil || known[n.id]:
			continue
		case n.state == retired:
			if by == "id" {
				return r.refuse(ad, "node-retired", "node %s is retired", n.id)
			}
			ad.former = append(ad.former, n)
		case ad.target == nil:
			ad.target = n
		case by == "binding":
			return r.refuse(ad, "bound-elsewhere", "what the evidence proves is bound to node %s, not %s", n.id, ad.target.id)
		default:
			return r.refuse(ad, "enrolled-elsewhere", "the hardware key is that of node %s, not %s", n.id, ad.target.id)
		}
		known[n.id] = true
	}
	if ad.target == nil {
		return nil
	}
	if ad.Tenant == "" { // an unassigned machine that is known: it is where its node is
		ad.Tenant, ad.Pool, ad.Site = ad.target.tenant, ad.target.pool, ad.target.site
		if err := r.checkTenant(ctx, ad); err != nil {
			return err
		}
	}
	if h := found["hardware"]; h == ad.target || (h != nil && h.id == ad.target.id) {
		if err := r.checkEnrolled(ad); err != nil {
			return err
		}
	}
	return r.checkReclaim(ad, ad.target)
}

// checkEnrolled says who may reclaim a node by its hardware key.
func (r *round) checkEnrolled(ad *admission) error {
	n := ad.target
	if ad.token != nil {
		if ad.token.AllowReclaim {
			return nil
		}
		return r.refuse(ad, "enrolled", "the machine's hardware key is enrolled already: JoinToken %s/%s does not say allowReclaim", ad.token.Tenant, ad.token.Name)
	}
	if n.attestorType != r.attestor.Type() {
		return r.refuse(ad, "enrolled", "the machine's hardware key was enrolled by the attestor %s, not %s", n.attestorType, r.attestor.Type())
	}
	return nil
}

// checkReclaim holds a node against the machine that proved to be it: a node
// never changes its tenant, role, pool or site by a join, and what was proved of
// its key is proved again.
func (r *round) checkReclaim(ad *admission, n *node) error {
	wanted, has := ad.place(), Place{n.tenant, wire.Role(n.role), n.pool, n.site}
	wanted.Role = nodeRole(ad.Role)
	if n.tenant != ad.Tenant {
		// Whose node it is, is nobody's business in this tenant.
		return r.refuse(ad, "enrolled-in-another-tenant", "the machine is a node of another tenant")
	}
	for _, c := range []struct{ what, wanted, has string }{
		{"role", string(wanted.Role), n.role}, {"pool", wanted.Pool, n.pool}, {"site", wanted.Site, n.site},
	} {
		if c.wanted != c.has {
			refused := r.refuse(ad, "reclaim-"+c.what, "node %s has the %s %q, the machine would join with %q", n.id, c.what, c.has, c.wanted)
			refused.Reclaim = &ReclaimRefused{NodeID: n.id, Tenant: n.tenant, Wanted: wanted, Has: has}
			return refused
		}
	}
	switch {
	case n.state == retired:
		return errRace
	case n.conflicted:
		return r.refuse(ad, "conflicted", "two machines hold the identity of node %s: resolve its condition Conflicted first", n.id)
	case n.hardwareKey != nil && !bytes.Equal(n.hardwareKey, ad.trustedKey):
		return r.refuse(ad, "weaker-proof", "node %s is known by a hardware key, which was not proved", n.id)
	case n.nodeKeyURI != "" && n.nodeKeyURI != ad.NodeKeyURI:
		return r.refuse(ad, "weaker-proof", "node %s is known by a statement about its key, which was not proved", n.id)
	}
	return nil
}
