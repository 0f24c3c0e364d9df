package joinsvc_test

import (
	"context"
	"crypto/rand"
	"crypto/x509"
	"math/big"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/test/pgtest"
)

// confirms signs what a machine says once it stored its certificate.
func (r *replica) confirms(m *machine, leaf []byte) error {
	signature, err := wire.SignStatement(m.key, wire.ConfirmStatement(leaf))
	r.sys.must(err)
	return r.Confirm(context.Background(), &wire.Confirm{Certificate: leaf, Signature: signature})
}

func TestAMachineThatConfirmsIsActive(t *testing.T) {
	s := newSystem(t)
	first, second := s.replica(), s.replica()
	m := newMachine(t)
	a := first.joins(m, s.token())
	leaf := leafOf(t, a).Raw
	for _, r := range []*replica{second, first, second} { // it may be sent again
		s.must(r.confirms(m, leaf))
	}
	if n := one[int](s, `SELECT count(*) FROM nodes n JOIN node_certs c ON c.node_id = n.id WHERE n.id = $1 AND n.state = 'active' AND n.last_seen_at IS NOT NULL AND c.used_at IS NOT NULL`, a.NodeID); n != 1 {
		t.Error("the node is not active, or its certificate not used")
	}
	if n := one[int](s, `SELECT count(*) FROM events WHERE type = 'node.active' AND node_id = $1 AND tenant = 'factory'`, a.NodeID); n != 1 {
		t.Errorf("%d events", n)
	}
}

func TestAConfirmationIsTakenForTheServicesOwnRowAlone(t *testing.T) {
	s := newSystem(t)
	r := s.replica()
	token := s.token(uses(10))
	join := func() (*machine, []byte, string) {
		m := newMachine(t)
		a := r.joins(m, token)
		return m, leafOf(t, a).Raw, a.NodeID
	}
	m, leaf, node := join()
	refusal(t, r.confirms(newMachine(t), leaf), "confirm:signature")
	// One that no row has, with a serial number that a row has, and with another.
	for _, serial := range []*big.Int{leafOf(t, r.joins(newMachine(t), token)).SerialNumber, big.NewInt(7)} {
		template := &x509.Certificate{SerialNumber: serial}
		stranger, err := x509.CreateCertificate(rand.Reader, template, template, m.key.Public(), m.key)
		s.must(err)
		refusal(t, r.confirms(m, stranger), "confirm:unknown")
	}
	s.exec(`UPDATE node_certs SET revoked_at = join_now(), revocation = 'test' WHERE node_id = $1`, node)
	got := refusal(t, r.confirms(m, leaf), "confirm:revoked")
	if got.Refusal.Tenant != tenant || got.CSRSHA256 != [32]byte(m.csrSum()) {
		t.Errorf("%+v", got)
	}
	m, leaf, node = join()
	s.exec(`UPDATE nodes SET state = 'retired', retired_at = join_now() WHERE id = $1`, node)
	refusal(t, r.confirms(m, leaf), "confirm:node-retired")
	m, leaf, node = join()
	s.exec(`DELETE FROM nodes WHERE id = $1`, node)
	refusal(t, r.confirms(m, leaf), "confirm:node-deleted")
	m, leaf, node = join()
	s.exec(`UPDATE node_certs SET not_after = join_now() WHERE node_id = $1`, node)
	refusal(t, r.confirms(m, leaf), "confirm:expired")
}

// What the service may not do in the database, it cannot do.
func TestTheServicesRoleCannotDecide(t *testing.T) {
	s := newSystem(t)
	conn, err := pgx.Connect(t.Context(), s.db.URL(pgtest.Service))
	s.must(err)
	defer conn.Close(context.Background())
	for _, sql := range []string{
		`UPDATE join_requests SET verdict = 'Approved'`, `UPDATE join_requests SET decided_by = '{}'`, `UPDATE join_requests SET object_uid = 'x'`,
		`INSERT INTO join_requests (id, verdict) VALUES ('aaaaaaaaaaaaaaaa', 'Approved')`, `DELETE FROM join_requests`,
		`INSERT INTO join_tokens (id) VALUES ('x')`, `UPDATE join_tokens SET revoked_at = NULL`, `INSERT INTO pools (tenant) VALUES ('x')`,
		`UPDATE pools SET require_approval = false`, `UPDATE tenants SET state = 'active'`, `DELETE FROM nodes`, `UPDATE nodes SET tenant = 'x'`,
		`UPDATE nodes SET pool = 'x'`, `DELETE FROM node_certs`, `UPDATE node_certs SET der = ''`, `DELETE FROM attestation_uses`, `UPDATE audit_log SET actor = 'x'`,
		`DELETE FROM events`, `CREATE TABLE x (y int)`, `SET ROLE join_schema`,
	} {
		if _, err := conn.Exec(t.Context(), sql); err == nil {
			t.Errorf("allowed: %s", sql)
		}
	}
}
