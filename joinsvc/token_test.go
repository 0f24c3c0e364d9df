package joinsvc_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/attestors"
	"github.com/better-compute/join-operator/attestors/jointoken"
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

// Each of these is refused, and learns nothing; the reason stays here.
func TestATokenThatDoesNotOpenTheDoorIsRefused(t *testing.T) {
	s := newSystem(t)
	r := s.replica()
	elsewhere := s.token(func(row *tokenRow) { row.tenant = "nowhere" })
	for name, c := range map[string]struct {
		text   func(token issued) string
		opts   []tokenOption
		before func(token issued)
		reason string
		// tenant is whose stream the event lands in: "" where nothing authenticated one.
		tenant string
	}{
		"none":             {text: func(issued) string { return "" }, reason: "missing"},
		"unknown":          {text: func(issued) string { return jointoken.Generate().Text() }, reason: "unknown"},
		"another's secret": {text: func(token issued) string { return swapID(s.token().text, token.id) }, reason: "unknown"},
		"flipped":          {text: func(token issued) string { return flip(token.text) }, reason: "malformed"},
		"space before":     {text: func(token issued) string { return " " + token.text }, reason: "malformed"},
		"space after":      {text: func(token issued) string { return token.text + " " }, reason: "malformed"},
		"line feed after":  {text: func(token issued) string { return token.text + "\n" }, reason: "malformed"},
		"NUL after":        {text: func(token issued) string { return token.text + "\x00" }, reason: "malformed"},
		"NUL inside":       {text: func(token issued) string { return token.text[:20] + "\x00" + token.text[21:] }, reason: "malformed"},
		"capitals":         {text: func(token issued) string { return strings.ToUpper(token.text) }, reason: "malformed"},
		"capital secret": {text: func(token issued) string {
			return token.text[:18] + strings.ToUpper(token.text[18:50]) + token.text[50:]
		}, reason: "malformed"},
		"too long":          {text: func(token issued) string { return token.text + strings.Repeat("a", 100_000) }, reason: "malformed"},
		"expired":           {opts: []tokenOption{expiring(-time.Second)}, reason: "expired", tenant: tenant},
		"revoked":           {before: func(token issued) { s.exec(`UPDATE join_tokens SET revoked_at = join_now() WHERE id = $1`, token.id) }, reason: "revoked", tenant: tenant},
		"spent":             {before: func(token issued) { s.exec(`UPDATE join_token_slots SET uses_left = 0 WHERE token_id = $1`, token.id) }, reason: "spent", tenant: tenant},
		"for another role":  {opts: []tokenOption{forRole("site")}, reason: "role", tenant: tenant},
		"of a missing pool": {opts: []tokenOption{intoPool("nothing")}, reason: "pool-missing", tenant: tenant},
		"of no tenant":      {text: func(issued) string { return elsewhere.text }, reason: "tenant-unknown", tenant: "nowhere"},
	} {
		t.Run(name, func(t *testing.T) {
			token := s.token(c.opts...)
			if c.before != nil {
				c.before(token)
			}
			text := token.text
			if c.text != nil {
				text = c.text(token)
			}
			before := one[int](s, `SELECT count(*) FROM nodes`)
			_, err := r.Join(t.Context(), s.envelope(newMachine(t), "", wire.RoleNode, &wire.Sealed{Token: text}), here)
			got := refusal(t, err, "join-token:"+c.reason)
			if got.Refusal.Tenant != c.tenant {
				t.Errorf("the refusal speaks of tenant %q, want %q", got.Refusal.Tenant, c.tenant)
			}
			if secret := token.text[18:50]; strings.Contains(err.Error(), secret) {
				t.Error("the error quotes the secret")
			}
			if after := one[int](s, `SELECT count(*) FROM nodes`); after != before {
				t.Error("a node was entered")
			}
			if c.before == nil && s.usesLeft(token) != 1 {
				t.Error("a use was spent")
			}
		})
	}
}

func swapID(text, id string) string {
	body := "bcjt_" + id + text[17:50]
	return fmt.Sprintf("%s_%08x", body, crc32.ChecksumIEEE([]byte(body)))
}

func flip(text string) string {
	b := []byte(text)
	if b[30] == 'a' {
		b[30] = 'b'
	} else {
		b[30] = 'a'
	}
	return string(b)
}

// The reason names the object and what mends it.
func TestARefusalTellsTheOperatorWhatToMend(t *testing.T) {
	s := newSystem(t)
	r := s.replica()
	token := s.token()
	r.joins(newMachine(t), token)
	_, err := r.token(newMachine(t), token)
	want := "JoinToken factory/token-" + token.id + " has no uses left: raise its spec.uses, or make another one"
	if got := refusal(t, err, "join-token:spent"); got.Refusal.Detail != want {
		t.Errorf("detail %q, want %q", got.Refusal.Detail, want)
	}
}

func TestASealedPartOpensForItsOwnJoinAlone(t *testing.T) {
	s := newSystem(t)
	other := scripted(t, "other", func(context.Context, attestors.Evidence, *attestors.JoinContext) (attestors.Outcome, error) {
		return nil, attestors.Refuse("reached")
	})
	r := s.replica(withAttestors(other))
	token := s.token(uses(100))
	good := func(m *machine) *wire.Join { return s.envelope(m, "", wire.RoleNode, &wire.Sealed{Token: token.text}) }
	plaintext := func(m *machine, text string) *wire.Join {
		j := good(m)
		j.Sealed = s.seal(wire.SealAAD("", wire.RoleNode, m.csr), []byte(text))
		return j
	}
	for name, c := range map[string]struct {
		spoil  func(m *machine) *wire.Join
		reason string
		code   wire.Code
	}{
		"to an unknown key":            {spoil: func(m *machine) *wire.Join { j := good(m); j.KeyID = "0123456789abcdef"; return j }, code: wire.StaleBundle},
		"for another CSR":              {spoil: func(m *machine) *wire.Join { j := good(newMachine(t)); j.CSR = m.csr; return j }, reason: "join-token:sealed"},
		"for another role":             {spoil: func(m *machine) *wire.Join { j := good(m); j.Role = wire.RoleSite; return j }, reason: "join-token:sealed"},
		"for another attestor":         {spoil: func(m *machine) *wire.Join { j := good(m); j.Attestor = "other"; return j }, reason: "other:sealed"},
		"for the attestor spelled out": {spoil: func(m *machine) *wire.Join { j := good(m); j.Attestor = "join-token"; return j }, reason: "join-token:sealed"},
		"flipped":                      {spoil: func(m *machine) *wire.Join { j := good(m); j.Sealed[len(j.Sealed)-1] ^= 1; return j }, reason: "join-token:sealed"},
		"cut":                          {spoil: func(m *machine) *wire.Join { j := good(m); j.Sealed = j.Sealed[:100]; return j }, reason: "join-token:sealed"},
		"empty":                        {spoil: func(m *machine) *wire.Join { j := good(m); j.Sealed = nil; return j }, reason: "join-token:sealed"},
		"garbage":                      {spoil: func(m *machine) *wire.Join { j := good(m); rand.Read(j.Sealed); return j }, reason: "join-token:sealed"},
		"missing":                      {spoil: func(m *machine) *wire.Join { return &wire.Join{Role: wire.RoleNode, CSR: m.csr} }, reason: "join-token:missing"},
		"with an unknown field":        {spoil: func(m *machine) *wire.Join { return plaintext(m, `{"token": "x", "more": 1}`) }, reason: "join-token:sealed-form"},
		"with a doubled field":         {spoil: func(m *machine) *wire.Join { return plaintext(m, `{"token": "x", "token": "y"}`) }, reason: "join-token:sealed-form"},
		"not JSON":                     {spoil: func(m *machine) *wire.Join { return plaintext(m, `token`) }, reason: "join-token:sealed-form"},
		"with evidence": {spoil: func(m *machine) *wire.Join {
			return s.envelope(m, "", wire.RoleNode, &wire.Sealed{Token: token.text, Evidence: []byte("x")})
		}, reason: "join-token:evidence"},
		"with a state of no round": {spoil: func(m *machine) *wire.Join { j := good(m); j.State = []byte("state"); return j }, reason: "join-token:state"},
		"CSR that is none":         {spoil: func(m *machine) *wire.Join { j := good(m); j.CSR = j.CSR[1:]; return j }, code: wire.InvalidInput},
		"CSR with a bad signature": {spoil: func(m *machine) *wire.Join {
			j := good(m)
			j.CSR = bytes.Clone(j.CSR)
			j.CSR[len(j.CSR)-1] ^= 1
			return j
		}, code: wire.InvalidInput},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := r.Join(t.Context(), c.spoil(newMachine(t)), here)
			if c.code != "" {
				problem(t, err, c.code)
				return
			}
			if got := refusal(t, err, c.reason); got.Refusal.Tenant != "" {
				t.Errorf("the refusal speaks of tenant %q though nothing authenticated it", got.Refusal.Tenant)
			}
		})
	}
	if left := s.usesLeft(token); left != 100 {
		t.Errorf("%d uses left", left)
	}
	r.joins(newMachine(t), token) // and the token was good all the time
}

// A join names its attestor, empty means join-token; what is checked first is
// answered first.
func TestR03_TheAttestorIsFoundAndItsRolesAreCheckedBeforeItsVerifierRuns(t *testing.T) {
	s := newSystem(t)
	ran := false
	nodesOnly, err := attestors.Define(attestors.Spec{ID: "nodes-only", Version: "1", Roles: []attestors.Role{attestors.RoleNode},
		Verify: func(context.Context, attestors.Evidence, *attestors.JoinContext) (attestors.Outcome, error) {
			ran = true
			return nil, attestors.Refuse("ran")
		}})
	s.must(err)
	r := s.replica(withAttestors(nodesOnly))
	m := newMachine(t)
	j := s.envelope(m, "tmp", wire.RoleNode, &wire.Sealed{})
	j.KeyID = "unknown" // later in the order
	_, err = r.Join(t.Context(), j, here)
	problem(t, err, wire.Unsupported)
	j.CSR = []byte("x") // earlier
	_, err = r.Join(t.Context(), j, here)
	problem(t, err, wire.InvalidInput)

	j = s.envelope(m, "nodes-only", wire.RoleSite, &wire.Sealed{})
	j.KeyID = "unknown"
	_, err = r.Join(t.Context(), j, here)
	refusal(t, err, "nodes-only:role-not-listed")
	if ran {
		t.Error("the verifier ran for a role that it does not list")
	}
	_, err = r.Join(t.Context(), s.envelope(m, "nodes-only", wire.RoleNode, &wire.Sealed{}), here)
	refusal(t, err, "nodes-only:ran")

	named := newMachine(t)
	token := s.token(uses(2))
	for _, id := range []string{"", "join-token"} {
		if _, err := r.Join(t.Context(), s.envelope(named, id, wire.RoleNode, &wire.Sealed{Token: token.text}), here); err != nil {
			t.Errorf("attestor %q: %v", id, err)
		}
	}
}

// A token is for whoever it says; spelling is no difference, placeholders match nobody.
func TestR07_ATokenAdmitsOnlyTheMachineThatItExpects(t *testing.T) {
	s := newSystem(t)
	r := s.replica()
	m := newMachine(t)
	for name, c := range map[string]struct {
		expect attestors.Expect
		claims wire.Claims
		reason string
	}{
		"UUID in another spelling":   {expect: attestors.Expect{ProductUUID: "{4C4C4544-0035-4B10-8052-B7C04F4A4E32}"}, claims: wire.Claims{ProductUUID: "4c4c454400354b108052b7c04f4a4e32"}},
		"another UUID":               {expect: attestors.Expect{ProductUUID: "4c4c4544-0035-4b10-8052-b7c04f4a4e32"}, claims: wire.Claims{ProductUUID: "4c4c4544-0035-4b10-8052-b7c04f4a4e33"}, reason: "expect-uuid"},
		"no UUID":                    {expect: attestors.Expect{ProductUUID: "4c4c4544-0035-4b10-8052-b7c04f4a4e32"}, reason: "expect-uuid"},
		"serial with spaces":         {expect: attestors.Expect{SerialNumber: " 7xkpq2"}, claims: wire.Claims{SerialNumber: "7XKPQ2 "}},
		"another serial":             {expect: attestors.Expect{SerialNumber: "7XKPQ2"}, claims: wire.Claims{SerialNumber: "7XKPQ3"}, reason: "expect-serial"},
		"placeholder serial":         {expect: attestors.Expect{SerialNumber: "To be filled by O.E.M."}, claims: wire.Claims{SerialNumber: "To be filled by O.E.M."}, reason: "expect-serial"},
		"second MAC":                 {expect: attestors.Expect{MACAddress: "52-54-00-AB-CD-EF"}, claims: wire.Claims{MACAddresses: []string{"52:54:00:00:00:01", "5254.00ab.cdef"}}},
		"no such MAC":                {expect: attestors.Expect{MACAddress: "52:54:00:ab:cd:ef"}, claims: wire.Claims{MACAddresses: []string{"52:54:00:00:00:01"}}, reason: "expect-mac"},
		"its own key":                {expect: attestors.Expect{HardwareKeySHA256: m.publicKeySHA256()}, claims: wire.Claims{HardwareKeySHA256: m.publicKeySHA256()}},
		"a key that is only claimed": {expect: attestors.Expect{HardwareKeySHA256: hexSum([]byte("ek"))}, claims: wire.Claims{HardwareKeySHA256: hexSum([]byte("ek"))}, reason: "expect-hardware-key"},
	} {
		t.Run(name, func(t *testing.T) {
			token := s.token(expecting(c.expect))
			who := newMachine(t)
			if c.claims.HardwareKeySHA256 == m.publicKeySHA256() {
				who = m
			}
			who.claims = c.claims
			_, err := r.token(who, token)
			if c.reason == "" {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			if got := refusal(t, err, "join-token:"+c.reason); got.Refusal.Tenant != tenant {
				t.Errorf("in tenant %q", got.Refusal.Tenant)
			}
			if s.usesLeft(token) != 1 {
				t.Error("a use was spent")
			}
		})
	}
}

// A hardware key that is enrolled enters its node again, through a token only if
// that says so, and the node stays what it is.
func TestR07_AnEnrolledHardwareKeyReclaimsItsNode(t *testing.T) {
	s := newSystem(t)
	s.pool("gpu", false)
	r := s.replica()
	m := newMachine(t)
	m.claims.HardwareKeySHA256 = m.publicKeySHA256()
	first := r.joins(m, s.token(atSite("hall-1")))

	again := m.again(t)
	_, err := r.token(again, s.token(atSite("hall-1")))
	refusal(t, err, "join-token:enrolled")

	for reason, token := range map[string]issued{
		"reclaim-pool": s.token(atSite("hall-1"), reclaiming(), intoPool("gpu")),
		"reclaim-site": s.token(atSite("hall-2"), reclaiming()),
	} {
		_, err = r.token(again, token)
		got := refusal(t, err, "join-token:"+reason)
		if got.Reclaim == nil || got.Reclaim.NodeID != first.NodeID || got.Reclaim.Wanted == got.Reclaim.Has {
			t.Errorf("%s: %+v", reason, got.Reclaim)
		}
		if s.usesLeft(token) != 1 {
			t.Errorf("%s: a use was spent", reason)
		}
		r.RecordRefusal(t.Context(), got)
	}
	_, err = r.Join(t.Context(), s.envelope(again, "", wire.RoleSite, &wire.Sealed{Token: s.token(atSite("hall-1"), reclaiming(), forRole("site")).text}), here)
	refusal(t, err, "join-token:reclaim-role")
	eventually(t, "both refusals are shown on the node", func() bool {
		return one[int](s, `SELECT count(*) FROM events WHERE type = 'node.reclaim-refused' AND node_id = $1 AND tenant = 'factory' AND data->'wanted' IS NOT NULL`, first.NodeID) == 2
	})

	s.exec(`INSERT INTO tenants (name, uid, state) VALUES ('other', 'uid-2', 'active')`)
	s.exec(`INSERT INTO pools SELECT 'other', name, lifetime, ramdisk_lifetime, on_conflict, allowed_kinds, require_approval, object_uid, 1 FROM pools WHERE name = 'general'`)
	_, err = r.token(again, s.token(func(row *tokenRow) { row.tenant = "other" }, atSite("hall-1"), reclaiming()))
	got := refusal(t, err, "join-token:enrolled-in-another-tenant")
	if strings.Contains(got.Refusal.Detail, first.NodeID) || strings.Contains(got.Refusal.Detail, tenant) {
		t.Errorf("another tenant learns of the node: %s", got.Refusal.Detail)
	}

	second := r.joins(again, s.token(atSite("hall-1"), reclaiming()))
	if second.NodeID != first.NodeID {
		t.Errorf("entered as %s, was %s", second.NodeID, first.NodeID)
	}
	if n := one[int](s, `SELECT count(*) FROM node_certs WHERE node_id = $1 AND generation = 1 AND revocation = 'rekeyed'`, first.NodeID); n != 1 {
		t.Error("the earlier certificate was not revoked")
	}
	if n := one[int](s, `SELECT count(*) FROM events WHERE type = 'node.joined' AND node_id = $1 AND (data->>'reclaimed')::boolean`, first.NodeID); n != 1 {
		t.Error("no event says that the node was reclaimed")
	}
	// The CSR that was answered before is only ever answered again or refused.
	_, err = r.token(m, s.token(atSite("hall-1"), reclaiming()))
	refusal(t, err, "join-token:csr-of-another-subject")
}

// A ramdisk is the role of a certificate: the node that it enters is a node.
func TestARamdiskEntersANode(t *testing.T) {
	s := newSystem(t)
	r := s.replica()
	m := newMachine(t)
	m.claims.HardwareKeySHA256 = m.publicKeySHA256()
	ramdisk, err := r.Join(t.Context(), s.envelope(m, "", wire.RoleRamdisk, &wire.Sealed{Token: s.token(forRole("ramdisk")).text}), here)
	s.must(err)
	if role := one[string](s, `SELECT role FROM nodes WHERE id = $1`, ramdisk.NodeID); role != "node" || ramdisk.Role != wire.RoleRamdisk {
		t.Errorf("node %s, certificate %s", role, ramdisk.Role)
	}
	if life := ramdisk.NotAfter.Sub(ramdisk.IssuedAt); life > 25*time.Hour {
		t.Errorf("the ramdisk's certificate lives %s", life)
	}
	system := r.joins(m.again(t), s.token(reclaiming()))
	if system.NodeID != ramdisk.NodeID || system.Role != wire.RoleNode {
		t.Errorf("the installed system entered %s as %s, the ramdisk %s", system.NodeID, system.Role, ramdisk.NodeID)
	}
}

func TestTheCSROfANodeThatIsGoneStaysRefused(t *testing.T) {
	s := newSystem(t)
	r := s.replica()
	token := s.token(uses(10))
	retired, deleted, revoked := newMachine(t), newMachine(t), newMachine(t)
	s.exec(`UPDATE nodes SET state = 'retired', retired_at = join_now() WHERE id = $1`, r.joins(retired, token).NodeID)
	s.exec(`DELETE FROM nodes WHERE id = $1`, r.joins(deleted, token).NodeID)
	s.exec(`UPDATE node_certs SET revoked_at = join_now(), revocation = 'test' WHERE node_id = $1`, r.joins(revoked, token).NodeID)
	for m, reason := range map[*machine]string{retired: "csr-of-retired-node", deleted: "csr-of-deleted-node", revoked: "csr-revoked"} {
		_, err := r.token(m, token)
		refusal(t, err, "join-token:"+reason)
	}
	if left := s.usesLeft(token); left != 7 {
		t.Errorf("%d uses left", left)
	}
}

// Expiry is judged when a machine was first seen, revocation now.
func TestALostAnswerNeverComesTooLateUnlessTheTokenWasRevoked(t *testing.T) {
	s := newSystem(t)
	s.db.SetNow(t, time.Now().UTC().Truncate(time.Second))
	r := s.replica()
	token := s.token(expiring(time.Hour), uses(2))
	m := newMachine(t)
	a := r.joins(m, token)
	s.db.Advance(t, 2*time.Hour)
	if b := r.joins(m, token); b.Certificates[0] != a.Certificates[0] {
		t.Error("another certificate")
	}
	_, err := r.token(newMachine(t), token)
	refusal(t, err, "join-token:expired")
	s.exec(`UPDATE join_tokens SET revoked_at = join_now() WHERE id = $1`, token.id)
	_, err = r.token(m, token)
	refusal(t, err, "join-token:revoked")
}

func TestATenantThatIsNoneNowAdmitsNobody(t *testing.T) {
	s := newSystem(t)
	r := s.replica()
	token := s.token(uses(3))
	m := newMachine(t)
	r.joins(m, token)
	for _, state := range []string{"unlabelled", "blocked", "gone"} {
		s.exec(`UPDATE tenants SET state = $2 WHERE name = $1`, tenant, state)
		_, err := r.token(newMachine(t), token)
		refusal(t, err, "join-token:tenant-"+state)
		_, err = r.token(m, token)
		refusal(t, err, "join-token:tenant-"+state)
	}
	s.exec(`UPDATE tenants SET state = 'active' WHERE name = $1`, tenant)
	r.joins(m, token)
	r.joins(newMachine(t), token)
}
