package joinsvc

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/attestors"
)

// The statements of a join that every machine runs. All of them are prepared by
// the driver at their first use on a connection.
const (
	lockCSRSQL = `SELECT pg_advisory_xact_lock($1)`

	// All that a token join has to know, in one row: whether the CSR was answered
	// before or waits (what then, is read apart), and the token with the tenant and
	// the pool that it leads to.
	readSQL = `SELECT join_now(),
	  EXISTS (SELECT FROM node_certs WHERE csr_sha256 = $1) OR EXISTS (SELECT FROM join_requests WHERE csr_sha256 = $1 AND ended IS NULL),
	  t.id IS NOT NULL, ` + tokenColumns + `
	FROM (VALUES (1)) AS one
	LEFT JOIN join_tokens t ON t.id = $2
	LEFT JOIN tenants te ON te.name = t.tenant
	LEFT JOIN pools p ON p.tenant = t.tenant AND p.name = t.pool`

	// What a CSR was answered with before, and what became of that node.
	answeredSQL = `SELECT c.node_id, c.role, c.attestor_type, c.subject_sha256, c.token_id, c.der, c.allowed_kinds,
	  c.not_after, c.first_seen_at, c.revoked_at IS NOT NULL,
	  EXISTS (SELECT FROM node_certs newer WHERE newer.node_id = c.node_id AND newer.generation > c.generation),
	  i.der, n.tenant, n.pool, n.site, n.state
	FROM node_certs c
	LEFT JOIN nodes n ON n.id = c.node_id
	LEFT JOIN issuers i ON i.cert_sha256 = c.issuer_sha256
	WHERE c.csr_sha256 = $1`

	tokenColumns = `t.tenant, t.name, t.secret_sha256, t.role, t.pool, t.site, t.expires_at, t.revoked_at, t.created_at, t.expect, coalesce(t.allow_reclaim, false), coalesce(t.uses, 0),
	  EXISTS (SELECT FROM join_token_slots s WHERE s.token_id = t.id AND s.uses_left > 0),
	  te.state, p.name IS NOT NULL, coalesce(p.lifetime, '0'), coalesce(p.ramdisk_lifetime, '0'), coalesce(p.require_approval, false)`

	// A token that an attestor asks for by itself.
	tokenSQL = `SELECT true, ` + tokenColumns + `
	FROM join_tokens t
	LEFT JOIN tenants te ON te.name = t.tenant
	LEFT JOIN pools p ON p.tenant = t.tenant AND p.name = t.pool
	WHERE t.id = $1`

	// The requests of this CSR that live: one for each attestor type and subject.
	requestsSQL = `SELECT id, attestor_type, subject_sha256, role, namespace, coalesce(tenant, ''), pool, site, facts_sha256, spec_sha256,
	  coalesce(spec->>'nodeName', ''), first_seen_at, join_now() - last_asked_at, coalesce(verdict, ''), coalesce(decided_pool, ''), coalesce(decided_tenant, ''),
	  coalesce(join_now() - decided_at, interval '0')
	FROM join_requests WHERE csr_sha256 = $1 AND ended IS NULL`

	// The same for a tenant and pool that no token named.
	destinationSQL = `SELECT te.state, p.name IS NOT NULL, coalesce(p.lifetime, '0'), coalesce(p.ramdisk_lifetime, '0'), coalesce(p.require_approval, false)
	FROM (VALUES (1)) AS one
	LEFT JOIN tenants te ON te.name = $1
	LEFT JOIN pools p ON p.tenant = $1 AND p.name = $2`

	// The nodes that evidence leads to: by id, by hardware key, by binding.
	candidatesSQL = `SELECT 'id', ` + nodeColumns + ` FROM nodes n WHERE n.id = $1
	UNION ALL SELECT 'hardware', ` + nodeColumns + ` FROM nodes n WHERE n.hardware_key = $2
	UNION ALL SELECT 'binding', ` + nodeColumns + ` FROM node_bindings b JOIN nodes n ON n.id = b.node_id WHERE b.attestor_type = $3 AND b.subject = $4`

	nodeColumns = `n.id, n.tenant, n.role, n.pool, n.site, n.state, n.attestor_type, n.hardware_key, coalesce(n.node_key_uri, ''), n.conflicted_at IS NOT NULL`

	usedSQL = `SELECT FROM attestation_uses WHERE attestor = $1 AND subject = $2`

	// Locks, in the order of the package's documentation.
	lockRequestSQL  = `SELECT 1 FROM join_requests WHERE id = $1 AND verdict = 'Approved' AND ended IS NULL FOR UPDATE`
	lockSlotSQL     = `SELECT slot FROM join_token_slots WHERE token_id = $1 AND uses_left > 0 ORDER BY slot LIMIT 1 FOR UPDATE SKIP LOCKED`
	awaitSlotSQL    = `SELECT slot FROM join_token_slots WHERE token_id = $1 AND uses_left > 0 ORDER BY slot LIMIT 1 FOR UPDATE`
	lockNodeSQL     = `SELECT ` + nodeColumns + ` FROM nodes n WHERE n.id = $1 FOR UPDATE`
	lockBindingsSQL = `SELECT node_id FROM node_bindings WHERE attestor_type = $1 AND subject = $2 FOR UPDATE`

	// A new node by a token takes one statement: a slot that nobody else holds, and
	// everything else only if there was one. The search begins at a random slot, so
	// that machines with one token do not stand in line.
	spendAndEnterSQL = `WITH slot AS (
	  SELECT slot FROM (SELECT slot FROM join_token_slots WHERE token_id = $14 AND slot >= $25 AND uses_left > 0 ORDER BY slot LIMIT 1 FOR UPDATE SKIP LOCKED) AS above
	  UNION ALL
	  SELECT slot FROM (SELECT slot FROM join_token_slots WHERE token_id = $14 AND slot < $25 AND uses_left > 0 ORDER BY slot LIMIT 1 FOR UPDATE SKIP LOCKED) AS below
	  LIMIT 1
	), allowed AS (
	  UPDATE join_token_slots s SET uses_left = s.uses_left - 1, last_used_at = join_now() FROM slot
	  WHERE s.token_id = $14 AND s.slot = slot.slot RETURNING 1
	), ` + enterNode + `, ` + firstCert + ` SELECT count(*) FROM cert`

	// The same without a token, or with a slot that is locked and spent already.
	enterSQL = `WITH allowed AS (SELECT 1), ` + enterNode + `, ` + firstCert + ` SELECT count(*) FROM cert`

	// A node that is re-keyed: it is locked, and its earlier certificates end.
	rekeySQL = `WITH node AS (
	  UPDATE nodes SET state = 'adopting', attestor = $6, attestor_type = $7, hardware_key = coalesce($8::bytea, hardware_key),
	    node_key_uri = nullif($9, ''), facts = $10::jsonb, changed_at = join_now()
	  WHERE id = $1 AND tenant = $2 AND role = $3 AND pool = $4 AND site = $5 AND state <> 'retired' RETURNING id
	), ` + nextCert + ` SELECT count(*) FROM cert`

	enterNode = `node AS (
	  INSERT INTO nodes (id, tenant, role, pool, site, state, attestor, attestor_type, hardware_key, node_key_uri, facts)
	  SELECT $1::text, $2::text, $3::text, $4::text, $5::text, 'adopting', $6::text, $7::text, $8::bytea, nullif($9::text, ''), $10::jsonb FROM allowed
	  RETURNING id
	)`

	firstCert = insertCert + `1` + certValues
	nextCert  = insertCert + `(SELECT coalesce(max(generation), 0) + 1 FROM node_certs WHERE node_id = $1)` + certValues

	insertCert = `cert AS (
	  INSERT INTO node_certs (serial, node_id, generation, tenant, role, attestor_type, subject_sha256, token_id, csr_sha256, der,
	    issuer_sha256, issuer_ski, allowed_kinds, node_key_uri, first_seen_at, not_after)
	  SELECT $11::bytea, node.id, `

	certValues = `, $2, $12::text, $7, $13::bytea, $14::text, $15::bytea, $16::bytea, $17::bytea, $18::bytea, $19::text[], nullif($9, ''),
	    $20::timestamptz, $21::timestamptz
	  FROM node RETURNING 1
	), event AS (
	  INSERT INTO events (type, tenant, node_id, data) SELECT 'node.joined', $2, $1, $22::jsonb FROM cert
	), audit AS (
	  INSERT INTO audit_log (actor, action, tenant, node_id, detail) SELECT $23::text, 'node.join', $2, $1, $24::jsonb FROM cert
	)`

	consumeRequestSQL = `UPDATE join_requests SET ended = 'Joined', ended_at = join_now(), node_id = $2 WHERE id = $1`

	spendSlotSQL = `UPDATE join_token_slots SET uses_left = uses_left - 1, last_used_at = join_now() WHERE token_id = $1 AND slot = $2`

	// A retired node lets go of what its machine is known by, once a person let the
	// machine in again as another node.
	releaseKeySQL = `UPDATE nodes SET hardware_key = NULL, changed_at = join_now() WHERE id = $1 AND state = 'retired'`

	bindSQL   = `INSERT INTO node_bindings (attestor_type, subject, node_id) VALUES ($1, $2, $3)`
	rebindSQL = `UPDATE node_bindings SET node_id = $3, bound_at = join_now() WHERE attestor_type = $1 AND subject = $2`

	useSQL = `INSERT INTO attestation_uses (attestor, subject, node_id, expires_at) VALUES ($1, $2, $3, $4)`

	endCertsSQL = `UPDATE node_certs SET revoked_at = join_now(), revocation = 'rekeyed' WHERE node_id = $1 AND revoked_at IS NULL`

	issuerSQL = `INSERT INTO issuers (cert_sha256, name, ski, der, not_after) VALUES ($1, $2, $3, $4, $5) ON CONFLICT DO NOTHING`
)

// csrLock is the key of the advisory lock on a CSR.
func csrLock(csr [32]byte) int64 { return int64(binary.BigEndian.Uint64(csr[:8])) }

// text and moment scan a column that may be NULL, which is the zero value.
func text(s *string) any      { return (*zeronull.Text)(s) }
func moment(t *time.Time) any { return (*zeronull.Timestamptz)(t) }

// certificate is the row of a CSR that was answered before.
type certificate struct {
	nodeID, role          string
	attestorType          string
	subject               []byte
	tokenID               string
	der, issuer           []byte
	allowedKinds          []string
	notAfter, firstSeenAt time.Time
	revoked, outdated     bool

	// The node as it is now; state is empty where it was deleted.
	tenant, pool, site, state string
}

func (c *certificate) fields() []any {
	return []any{
		&c.nodeID, &c.role, &c.attestorType, &c.subject, text(&c.tokenID), &c.der, &c.allowedKinds, &c.notAfter, &c.firstSeenAt, &c.revoked, &c.outdated,
		&c.issuer, text(&c.tenant), text(&c.pool), text(&c.site), text(&c.state),
	}
}

// request is a row of join_requests that lives.
type request struct {
	id, attestorType  string
	subject           []byte
	role              string
	namespace, tenant string
	pool, site        string
	facts, spec       []byte
	nodeName          string // the node to reclaim
	firstSeenAt       time.Time
	sinceAsked        time.Duration
	verdict           v1alpha1.Verdict
	// decidedPool and decidedTenant are where a person sent the machine instead.
	decidedPool, decidedTenant string
	sinceDecided               time.Duration
}

func scanRequest(rows pgx.Rows) (*request, error) {
	var r request
	err := rows.Scan(&r.id, &r.attestorType, &r.subject, &r.role, &r.namespace, &r.tenant, &r.pool, &r.site, &r.facts, &r.spec,
		&r.nodeName, &r.firstSeenAt, &r.sinceAsked, &r.verdict, &r.decidedPool, &r.decidedTenant, &r.sinceDecided)
	return &r, err
}

// destination is where a join leads: the tenant's state and the pool's policy.
type destination struct {
	tenantState string // empty where there is no such tenant
	poolExists  bool
	// lifetime and ramdiskLifetime of certificates.
	lifetime, ramdiskLifetime time.Duration
	requireApproval           bool
}

func (d *destination) fields() []any {
	return []any{text(&d.tenantState), &d.poolExists, &d.lifetime, &d.ramdiskLifetime, &d.requireApproval}
}

// token is a join token with what it leads to.
type token struct {
	attestors.TokenRow
	uses        int
	usesLeft    bool
	destination destination
}

// someSlot is where to begin to look for a use, so that machines with one token do
// not stand in line. Not every slot need have uses left.
func (t *token) someSlot() int16 {
	return int16(rand.IntN(min(max(t.uses, 1), maxSlots))) //nolint:gosec // spreads load, keeps no secret
}

// maxSlots is how many rows the uses of a token lie in, at most.
const maxSlots = 64

// tokenScan reads tokenColumns after whether there is a token.
type tokenScan struct {
	token
	exists         bool
	secret, expect []byte
}

func (s *tokenScan) fields() []any {
	t := &s.token
	return append([]any{
		&s.exists, text(&t.Tenant), text(&t.Name), &s.secret, text((*string)(&t.Role)), text(&t.Pool), text(&t.Site),
		moment(&t.ExpiresAt), moment(&t.RevokedAt), moment(&t.CreatedAt), &s.expect, &t.AllowReclaim, &t.uses, &t.usesLeft,
	}, t.destination.fields()...)
}

func (s *tokenScan) value(id string) (*token, error) {
	if !s.exists {
		return nil, nil
	}
	t := s.token
	t.ID = id
	if copy(t.SecretSHA256[:], s.secret) != len(t.SecretSHA256) {
		return nil, fmt.Errorf("token %s has a hash of %d bytes", id, len(s.secret))
	}
	if s.expect != nil {
		if err := json.Unmarshal(s.expect, &t.Expect); err != nil {
			return nil, fmt.Errorf("what token %s expects: %w", id, err)
		}
	}
	return &t, nil
}

// node is a row of nodes.
type node struct {
	id, tenant   string
	role         string
	pool, site   string
	state        string
	attestorType string
	hardwareKey  []byte
	nodeKeyURI   string
	conflicted   bool
}

const retired = "retired"

func (n *node) fields() []any {
	return []any{&n.id, &n.tenant, &n.role, &n.pool, &n.site, &n.state, &n.attestorType, &n.hardwareKey, &n.nodeKeyURI, &n.conflicted}
}
