package joinsvc_test

import (
	"encoding/json"
	"testing"

	"github.com/better-compute/join-operator/api/wire"
)

// A join leaves the node, its certificate, its event and its audit row, all at once.
func TestR08_AJoinEntersTheNodeWithItsCertificateEventAndAuditRow(t *testing.T) {
	s := newSystem(t)
	r := s.replica()
	token := s.token(atSite("hall-2"))
	m := newMachine(t)
	a := r.joins(m, token)

	if a.Tenant != tenant || a.Pool != "general" || a.Site != "hall-2" || a.Role != wire.RoleNode || a.CSRSHA256 != hexSum(m.csr) || a.AllowedKinds != nil {
		t.Errorf("answer: %+v", a)
	}
	leaf := leafOf(t, a)
	if want := "spiffe://" + trustDomain + "/tenant/factory/node/" + a.NodeID; len(leaf.URIs) != 1 || leaf.URIs[0].String() != want {
		t.Errorf("the leaf names %v, want %s", leaf.URIs, want)
	}
	if state := one[string](s, `SELECT state FROM nodes WHERE id = $1 AND tenant = 'factory' AND pool = 'general' AND site = 'hall-2' AND role = 'node'`, a.NodeID); state != "adopting" {
		t.Errorf("the node is %s", state)
	}
	if n := one[int](s, `SELECT count(*) FROM node_certs WHERE node_id = $1 AND generation = 1 AND der = $2 AND csr_sha256 = $3 AND token_id = $4`,
		a.NodeID, leaf.Raw, sum(m.csr), token.id); n != 1 {
		t.Errorf("%d certificate rows", n)
	}
	var event struct {
		Attestor, NodeKey, Serial, TokenID string
		Reclaimed                          bool
	}
	if err := json.Unmarshal(one[[]byte](s, `SELECT data FROM events WHERE type = 'node.joined' AND tenant = 'factory' AND node_id = $1`, a.NodeID), &event); err != nil {
		t.Fatal(err)
	}
	if event.Attestor != "join-token" || event.NodeKey != "unattested" || event.TokenID != token.id || event.Reclaimed || event.Serial == "" {
		t.Errorf("event: %+v", event)
	}
	if n := one[int](s, `SELECT count(*) FROM audit_log WHERE action = 'node.join' AND actor = 'attestor:join-token' AND tenant = 'factory' AND node_id = $1`, a.NodeID); n != 1 {
		t.Errorf("%d audit rows", n)
	}
	if left := s.usesLeft(token); left != 0 {
		t.Errorf("%d uses left", left)
	}
}

func TestAJoinedMachineGetsTheSameCertificateAgain(t *testing.T) {
	s := newSystem(t)
	first, second := s.replica(), s.replica()
	token := s.token()
	m := newMachine(t)
	a := first.joins(m, token)
	b := second.joins(m, token)
	if a.Certificates[0] != b.Certificates[0] || a.Certificates[1] != b.Certificates[1] || a.NodeID != b.NodeID || !a.NotAfter.Equal(*b.NotAfter) {
		t.Errorf("first %+v, then %+v", a, b)
	}
	if n := one[int](s, `SELECT count(*) FROM nodes`); n != 1 {
		t.Errorf("%d nodes", n)
	}
	_, err := first.token(newMachine(t), token)
	r := refusal(t, err, "join-token:spent")
	if r.Refusal.Tenant != tenant || r.TokenID != token.id {
		t.Errorf("%+v", r)
	}
}
