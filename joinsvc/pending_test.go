package joinsvc_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/attestors"
	"github.com/better-compute/join-operator/joinsvc"
)

// decide does what the manager does with a person's decision.
func (s *system) decide(request, verdict string) {
	s.Helper()
	s.exec(`UPDATE join_requests SET verdict = $2, decided_by = '{"username": "alice"}', decided_at = join_now()
	  WHERE id = $1 AND verdict IS NULL AND ended IS NULL`, strings.TrimPrefix(request, "jr-"), verdict)
}

// waits joins and fails the test unless the machine has to wait.
func waits(tb testing.TB, a *wire.Answer, err error) *wire.Answer {
	tb.Helper()
	if err != nil {
		tb.Fatalf("join: %v", err)
	}
	if a.Outcome != wire.OutcomePending || !strings.HasPrefix(a.JoinRequest, "jr-") || a.RetryAfterSeconds < 15 || a.NodeID != "" || a.Certificates != nil {
		tb.Fatalf("answer %+v, want to wait", a)
	}
	return a
}

func guarded(t testing.TB) (*system, issued) {
	s := newSystem(t)
	s.pool("guarded", true)
	return s, s.token(intoPool("guarded"), uses(2))
}

func TestR14_AMachineWaitsForAPersonAndNothingIsSpent(t *testing.T) {
	s, token := guarded(t)
	var told []joinsvc.PendingRequest
	r := s.replica(func(c *joinsvc.Config) { c.OnPending = func(p joinsvc.PendingRequest) { told = append(told, p) } })
	m := newMachine(t)
	m.claims = wire.Claims{SerialNumber: "7XKPQ2\x1b[31m", MACAddresses: []string{"52:54:00:00:00:01", "52:54:00:00:00:02"}}
	a, err := r.token(m, token)
	waits(t, a, err)
	b, err := s.replica().token(m, token)
	if waits(t, b, err); b.JoinRequest != a.JoinRequest {
		t.Errorf("first %s, then %s", a.JoinRequest, b.JoinRequest)
	}
	if s.usesLeft(token) != 2 || one[int](s, `SELECT (SELECT count(*) FROM nodes) + (SELECT count(*) FROM node_certs) + (SELECT count(*) FROM audit_log)`) != 0 {
		t.Error("a deferral spent or entered something")
	}
	if n := one[int](s, `SELECT count(*) FROM events WHERE type = 'join.pending' AND tenant = 'factory' AND 'jr-' || (data->>'id') = $1`, a.JoinRequest); n != 1 {
		t.Errorf("%d events", n)
	}
	if len(told) != 1 || "jr-"+told[0].ID != a.JoinRequest || told[0].Namespace != tenant || told[0].AttestorType != "join-token" {
		t.Fatalf("told of %+v", told)
	}
	ask := told[0].Spec
	if ask.Pool != "guarded" || ask.Role != "node" || ask.PublicKeySHA256 != m.publicKeySHA256() || ask.CSRSHA256 != hexSum(m.csr) ||
		ask.Claims["serialNumber"] != "7XKPQ2?[31m" || ask.Claims["macAddresses"] != "52:54:00:00:00:01,52:54:00:00:00:02" {
		t.Errorf("asked: %+v", ask)
	}
	// The row holds exactly what the object is made of and hashes to.
	var stored v1alpha1.JoinRequestAsk
	s.must(json.Unmarshal(one[[]byte](s, `SELECT spec FROM join_requests`), &stored))
	hash, err := stored.Hash()
	s.must(err)
	if got := one[[]byte](s, `SELECT spec_sha256 FROM join_requests`); hex.EncodeToString(got) != hex.EncodeToString(hash[:]) {
		t.Error("the row's spec does not hash to its hash")
	}
}

func TestAnApprovedMachineJoinsOnceThoughItsPollsRace(t *testing.T) {
	s, _ := guarded(t)
	replicas := []*replica{s.replica(), s.replica()}
	for range 10 {
		token, m := s.token(intoPool("guarded"), uses(2)), newMachine(t)
		a, err := replicas[0].token(m, token)
		waits(t, a, err)
		s.decide(a.JoinRequest, "Approved")
		results := race(replicas, []*machine{m, m, m, m}, token)
		for _, r := range results {
			if r.err != nil || r.answer.Outcome != wire.OutcomeJoined || r.answer.Certificates[0] != results[0].answer.Certificates[0] {
				t.Fatalf("%+v, %v", r.answer, r.err)
			}
		}
		if left := s.usesLeft(token); left != 1 {
			t.Fatalf("%d uses left", left)
		}
		node := results[0].answer.NodeID
		if n := one[int](s, `SELECT count(*) FROM join_requests WHERE 'jr-' || id = $1 AND ended = 'Joined' AND node_id = $2`, a.JoinRequest, node); n != 1 {
			t.Fatal("the request is not consumed")
		}
		if n := one[int](s, `SELECT count(*) FROM events WHERE type = 'node.joined' AND node_id = $1 AND data->>'joinRequest' = $2`, node, a.JoinRequest); n != 1 {
			t.Fatal("the event does not name the request")
		}
	}
}

func TestARejectedMachineIsRefusedAndThatIsRemembered(t *testing.T) {
	s, token := guarded(t)
	s.db.SetNow(t, time.Now().UTC().Truncate(time.Second))
	r := s.replica()
	m := newMachine(t)
	a, err := r.token(m, token)
	waits(t, a, err)
	s.decide(a.JoinRequest, "Rejected")
	for range 2 {
		_, err = r.token(m, token)
		refusal(t, err, "join-token:rejected")
	}
	b, err := r.token(newMachine(t), token) // another CSR of the same token is another machine
	waits(t, b, err)
	s.db.Advance(t, 7*24*time.Hour+time.Minute)
	c, err := r.token(m, token)
	if waits(t, c, err); c.JoinRequest == a.JoinRequest {
		t.Error("the old request goes on")
	}
}

// Proved subjects are remembered by what they are, whatever CSR they bring.
func TestAProvedSubjectIsRejectedWithEveryCSRAndSupersedesItself(t *testing.T) {
	s := newSystem(t)
	r := s.replica(withAttestors(deferring(t)))
	join := func(m *machine) (*wire.Answer, error) {
		return r.Join(t.Context(), s.envelope(m, "deferring", wire.RoleNode, &wire.Sealed{Evidence: []byte("machine")}), here)
	}
	first, err := join(newMachine(t))
	waits(t, first, err)
	second := newMachine(t)
	b, err := join(second)
	waits(t, b, err)
	ended := func(name string) string {
		return one[string](s, `SELECT coalesce(ended, '') FROM join_requests WHERE 'jr-' || id = $1`, name)
	}
	if ended(first.JoinRequest) != "Superseded" || ended(b.JoinRequest) != "" {
		t.Errorf("the older request is %q, the newer %q", ended(first.JoinRequest), ended(b.JoinRequest))
	}
	s.decide(b.JoinRequest, "Rejected")
	for _, m := range []*machine{second, newMachine(t)} {
		_, err := join(m)
		refusal(t, err, "deferring:rejected")
	}
}

func TestTwoCSRsOfOneProvedSubjectAtOnceLeaveOneRequest(t *testing.T) {
	s := newSystem(t)
	replicas := []*replica{s.replica(withAttestors(deferring(t))), s.replica(withAttestors(deferring(t)))}
	for round := range 10 {
		evidence := []byte(fmt.Sprint("machine ", round))
		results := make([]result, 4)
		ms := machines(t, len(results))
		together(len(results), func(i int) {
			results[i].answer, results[i].err = replicas[i%2].Join(context.Background(), s.envelope(ms[i], "deferring", wire.RoleNode, &wire.Sealed{Evidence: evidence}), here)
		})
		for _, r := range results {
			waits(t, r.answer, r.err)
		}
		subject := sha256.Sum256(evidence)
		if n := one[int](s, `SELECT count(*) FROM join_requests WHERE subject_sha256 = $1 AND ended IS NULL`, subject[:]); n != 1 {
			t.Fatalf("%d requests live", n)
		}
	}
}

// deferring proves its subject, takes facts from behind a "|", and always waits.
func deferring(t testing.TB) *attestors.Attestor {
	return scripted(t, "deferring", func(ctx context.Context, ev attestors.Evidence, jc *attestors.JoinContext) (attestors.Outcome, error) {
		a, err := admitting(ctx, ev, jc)
		if err != nil {
			return nil, err
		}
		subject, facts, _ := strings.Cut(string(ev.Payload), "|")
		a.Subject = []byte(subject)
		if facts != "" {
			a.Facts = map[string]string{"pcr": facts}
		}
		if strings.HasPrefix(subject, "unassigned") {
			a.Tenant, a.Pool = "", ""
		}
		return &attestors.Pending{Would: a}, nil
	})
}

// What is approved is what joins.
func TestAMachineThatIsAnotherThanTheApprovedOneIsAskedAboutAgain(t *testing.T) {
	s := newSystem(t)
	r := s.replica(withAttestors(deferring(t)))
	join := func(m *machine, role wire.Role, evidence string) (*wire.Answer, error) {
		return r.Join(t.Context(), s.envelope(m, "deferring", role, &wire.Sealed{Evidence: []byte(evidence)}), here)
	}
	for name, changed := range map[string]struct {
		role     wire.Role
		evidence string
		before   string
	}{
		"other facts": {wire.RoleNode, "facts|other", ""},
		"facts gone":  {wire.RoleNode, "facts", ""},
		"other role":  {wire.RoleSite, "facts|booted", ""},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			a, err := join(m, wire.RoleNode, "facts|booted")
			waits(t, a, err)
			s.decide(a.JoinRequest, "Approved")
			b, err := join(m, changed.role, changed.evidence)
			if waits(t, b, err); b.JoinRequest == a.JoinRequest {
				t.Fatal("the approved request was not set aside")
			}
			if ended := one[string](s, `SELECT coalesce(ended, '') FROM join_requests WHERE 'jr-' || id = $1`, a.JoinRequest); ended != "Superseded" {
				t.Errorf("the approved request ended as %q", ended)
			}
			s.decide(b.JoinRequest, "Approved")
			c, err := join(m, changed.role, changed.evidence)
			if err != nil || c.Outcome != wire.OutcomeJoined {
				t.Errorf("%+v, %v", c, err)
			}
		})
	}
	if n := one[int](s, `SELECT count(*) FROM nodes`); n != 3 {
		t.Errorf("%d nodes", n)
	}
}

func TestAPersonMaySendAMachineElsewhere(t *testing.T) {
	s, token := guarded(t)
	s.pool("gpu", true)
	r := s.replica(withAttestors(deferring(t)))
	send := func(name, pool, to string) {
		s.exec(`UPDATE join_requests SET decided_pool = nullif($2, ''), decided_tenant = nullif($3, '') WHERE 'jr-' || id = $1`, name, pool, to)
		s.decide(name, "Approved")
	}
	m := newMachine(t)
	a, err := r.token(m, token)
	waits(t, a, err)
	send(a.JoinRequest, "gpu", "")
	if b := r.joins(m, token); b.Pool != "gpu" {
		t.Errorf("joined %s", b.Pool)
	}
	if b := r.joins(m, token); b.Pool != "gpu" {
		t.Errorf("its lost answer says %s", b.Pool)
	}

	missing := newMachine(t)
	a, err = r.token(missing, token)
	waits(t, a, err)
	send(a.JoinRequest, "nothing", "")
	_, err = r.token(missing, token)
	refusal(t, err, "join-token:pool-missing")

	// A machine that no rule assigned waits in the root namespace.
	unassigned := newMachine(t)
	join := func() (*wire.Answer, error) {
		return r.Join(t.Context(), s.envelope(unassigned, "deferring", wire.RoleNode, &wire.Sealed{Evidence: []byte("unassigned machine")}), here)
	}
	a, err = join()
	waits(t, a, err)
	if ns := one[string](s, `SELECT namespace FROM join_requests WHERE 'jr-' || id = $1`, a.JoinRequest); ns != rootTenant {
		t.Errorf("it waits in %s", ns)
	}
	send(a.JoinRequest, "gpu", tenant)
	for range 2 {
		b, err := join()
		s.must(err)
		if b.Outcome != wire.OutcomeJoined || b.Tenant != tenant || b.Pool != "gpu" {
			t.Fatalf("%+v", b)
		}
	}
}

// Windows are judged when a machine was first seen, uses and revocation when it joins.
func TestAnApprovalNeverComesTooLateButUsesAreNotReserved(t *testing.T) {
	s, _ := guarded(t)
	s.db.SetNow(t, time.Now().UTC().Truncate(time.Second))
	token := s.token(intoPool("guarded"), expiring(time.Hour), uses(1))
	r := s.replica()
	ms := machines(t, 2)
	var names []string
	for _, m := range ms {
		a, err := r.token(m, token)
		waits(t, a, err)
		names = append(names, a.JoinRequest)
	}
	s.db.Advance(t, 5*time.Hour)
	for _, name := range names {
		s.decide(name, "Approved")
	}
	r.joins(ms[0], token)
	_, err := r.token(ms[1], token)
	refusal(t, err, "join-token:spent")
	_, err = r.token(newMachine(t), token)
	refusal(t, err, "join-token:expired")
	if n := one[int](s, `SELECT count(*) FROM node_certs WHERE first_seen_at <= join_now() - interval '5 hours'`); n != 1 {
		t.Error("the certificate's row forgot when the machine was first seen")
	}
}

func TestAnApprovalThatNobodyUsedRunsOut(t *testing.T) {
	s, token := guarded(t)
	s.db.SetNow(t, time.Now().UTC().Truncate(time.Second))
	r := s.replica()
	m := newMachine(t)
	a, err := r.token(m, token)
	waits(t, a, err)
	s.decide(a.JoinRequest, "Approved")
	s.db.Advance(t, 8*24*time.Hour)
	b, err := r.token(m, token)
	if waits(t, b, err); a.JoinRequest == b.JoinRequest {
		t.Error("it waits for the old request")
	}
}

// Whoever approved that a machine enters its node again did not approve a new node.
func TestAnApprovedReclaimOfANodeThatIsGoneIsAskedAboutAgain(t *testing.T) {
	s := newSystem(t)
	defers := false
	bound := scripted(t, "bound", func(ctx context.Context, ev attestors.Evidence, jc *attestors.JoinContext) (attestors.Outcome, error) {
		a, err := admitting(ctx, ev, jc)
		if err != nil {
			return nil, err
		}
		a.Bind = sum(ev.Payload)
		if defers {
			return &attestors.Pending{Would: a}, nil
		}
		return a, nil
	})
	r := s.replica(withAttestors(bound))
	join := func(m *machine) (*wire.Answer, error) {
		return r.Join(t.Context(), s.envelope(m, "bound", wire.RoleNode, &wire.Sealed{Evidence: []byte("machine")}), here)
	}
	first, err := join(newMachine(t))
	s.must(err)
	defers = true
	m := newMachine(t)
	a, err := join(m)
	waits(t, a, err)
	if named := one[string](s, `SELECT spec->>'nodeName' FROM join_requests WHERE 'jr-' || id = $1`, a.JoinRequest); named != first.NodeID {
		t.Errorf("the request names %q", named)
	}
	s.decide(a.JoinRequest, "Approved")
	s.exec(`DELETE FROM node_bindings WHERE node_id = $1`, first.NodeID)
	s.exec(`DELETE FROM nodes WHERE id = $1`, first.NodeID)
	b, err := join(m)
	if waits(t, b, err); b.JoinRequest == a.JoinRequest {
		t.Fatal("the old approval still stands")
	}
	s.decide(b.JoinRequest, "Approved")
	c, err := join(m)
	s.must(err)
	if c.Outcome != wire.OutcomeJoined || c.NodeID == first.NodeID {
		t.Errorf("%+v", c)
	}
}

// The request's row is locked before anything else: whoever ends it first wins.
func TestARequestThatEndsUnderItsJoinIsNotConsumed(t *testing.T) {
	s, token := guarded(t)
	r := s.replica()
	m := newMachine(t)
	a, err := r.token(m, token)
	waits(t, a, err)
	s.decide(a.JoinRequest, "Approved")
	end := s.hold(`UPDATE join_requests SET ended = 'Expired', ended_at = join_now() WHERE 'jr-' || id = $1`, a.JoinRequest)
	b, err := r.behind(end, true, func() (*wire.Answer, error) { return r.token(m, token) })
	if waits(t, b, err); b.JoinRequest == a.JoinRequest {
		t.Error("it waits for a request that ended")
	}
	if n := one[int](s, `SELECT count(*) FROM nodes`); n != 0 {
		t.Error("a node was entered")
	}
}

func TestAPollThatFindsItsRequestUndecidedWritesNothing(t *testing.T) {
	s, token := guarded(t)
	r := s.replica()
	m := newMachine(t)
	a, err := r.token(m, token)
	waits(t, a, err)
	version := func() string {
		return one[string](s, `SELECT concat(ctid, xmin, xmax) FROM join_requests WHERE 'jr-' || id = $1`, a.JoinRequest)
	}
	before := version()
	s.writesNothing("a poll", func() {
		b, err := r.token(m, token)
		waits(t, b, err)
	})
	if after := version(); after != before {
		t.Error("the row was written or locked")
	}
}

// When a machine last asked is written now and then, many at once.
func TestThatAMachineStillAsksIsNotedCoarsely(t *testing.T) {
	s, token := guarded(t)
	s.db.SetNow(t, time.Now().UTC().Truncate(time.Second))
	r := s.replica()
	m := newMachine(t)
	a, err := r.token(m, token)
	waits(t, a, err)
	s.db.Advance(t, 20*time.Hour)
	b, err := r.token(m, token)
	waits(t, b, err)
	eventually(t, "the row says when the machine last asked", func() bool {
		return one[bool](s, `SELECT last_asked_at = join_now() FROM join_requests WHERE 'jr-' || id = $1`, a.JoinRequest)
	})
	if b.RetryAfterSeconds <= a.RetryAfterSeconds {
		t.Errorf("retry after %d s, 20 h later after %d s", a.RetryAfterSeconds, b.RetryAfterSeconds)
	}
}

func TestBeyondTheCapsMachinesWaitUnseen(t *testing.T) {
	s := newSystem(t)
	s.pool("guarded", true)
	s.exec(`INSERT INTO tenants (name, uid, state) VALUES ('other', 'uid-2', 'active')`)
	s.exec(`INSERT INTO pools SELECT 'other', name, lifetime, ramdisk_lifetime, on_conflict, allowed_kinds, require_approval, object_uid, 1 FROM pools WHERE name = 'guarded'`)
	var mu sync.Mutex
	told := 0
	r := s.replica(func(c *joinsvc.Config) {
		c.Limits = joinsvc.Limits{PerTenant: 6, PerSource: 4, Total: 8, Reserved: 2, Rows: 16}
		c.OnPending = func(joinsvc.PendingRequest) { mu.Lock(); told++; mu.Unlock() }
	})
	ask := func(token issued, source string) error {
		a, err := r.Join(t.Context(), s.envelope(newMachine(t), "", wire.RoleNode, &wire.Sealed{Token: token.text}), netip.MustParseAddr(source))
		if err == nil {
			waits(t, a, nil)
		}
		return err
	}
	shown := func() int { return one[int](s, `SELECT count(*) FROM join_requests WHERE NOT capped`) }
	expect := func(what string, want int) {
		t.Helper()
		mu.Lock()
		defer mu.Unlock()
		if got := shown(); got != want || told != want {
			t.Fatalf("%s: %d are shown, told of %d, want %d", what, got, told, want)
		}
	}
	one1 := s.token(intoPool("guarded"))
	for range 3 {
		s.must(ask(one1, "192.0.2.1"))
	}
	expect("twice the one use of a token", 2)
	many := s.token(intoPool("guarded"), uses(100))
	for range 3 {
		s.must(ask(many, "192.0.2.1"))
	}
	expect("four of one source", 4)
	for _, source := range []string{"2001:db8::1", "2001:db8::2", "192.0.2.3"} {
		s.must(ask(many, source))
	}
	expect("six of one tenant", 6)
	other := s.token(func(row *tokenRow) { row.tenant = "other" }, intoPool("guarded"), uses(100))
	for _, source := range []string{"192.0.2.11", "192.0.2.12", "192.0.2.13"} {
		s.must(ask(other, source))
	}
	expect("eight in all", 8)
	third := func(row *tokenRow) { row.tenant = "third" }
	s.exec(`INSERT INTO tenants (name, uid, state) VALUES ('third', 'uid-3', 'active')`)
	s.exec(`INSERT INTO pools SELECT 'third', name, lifetime, ramdisk_lifetime, on_conflict, allowed_kinds, require_approval, object_uid, 1 FROM pools WHERE name = 'guarded' AND tenant = 'factory'`)
	reserved := s.token(third, intoPool("guarded"), uses(100))
	for _, source := range []string{"192.0.2.21", "192.0.2.22", "192.0.2.23"} {
		s.must(ask(reserved, source))
	}
	expect("and two of a tenant's own", 10)
	if n := one[int](s, `SELECT count(*) FROM join_requests`); n != 15 {
		t.Fatalf("%d rows", n)
	}
	s.must(ask(reserved, "192.0.2.24"))
	eventually(t, "rows are capped too", func() bool {
		err := ask(reserved, "192.0.2.25")
		if err == nil {
			return false
		}
		if p := problem(t, err, wire.RateLimited); p.RetryAfter <= 0 {
			t.Error("without Retry-After")
		}
		return true
	})
}

// A retired machine comes back only by a person's word, whatever the attestor says,
// and then as a new node.
func TestARetiredMachineWaitsForAPerson(t *testing.T) {
	s := newSystem(t)
	bound := scripted(t, "bound", func(ctx context.Context, ev attestors.Evidence, jc *attestors.JoinContext) (attestors.Outcome, error) {
		a, err := admitting(ctx, ev, jc)
		if err != nil {
			return nil, err
		}
		a.Bind, a.HardwareKey = sum(ev.Payload), sum(append([]byte("ek of "), ev.Payload...))
		return a, nil
	})
	r := s.replica(withAttestors(bound))
	join := func(m *machine) (*wire.Answer, error) {
		return r.Join(t.Context(), s.envelope(m, "bound", wire.RoleNode, &wire.Sealed{Evidence: []byte("machine")}), here)
	}
	first, err := join(newMachine(t))
	s.must(err)
	s.exec(`UPDATE nodes SET state = 'retired', retired_at = join_now() WHERE id = $1`, first.NodeID)
	m := newMachine(t)
	a, err := join(m)
	waits(t, a, err)
	s.decide(a.JoinRequest, "Approved")
	second, err := join(m)
	s.must(err)
	if second.Outcome != wire.OutcomeJoined || second.NodeID == first.NodeID {
		t.Fatalf("%+v", second)
	}
	third, err := join(newMachine(t))
	s.must(err)
	if third.NodeID != second.NodeID {
		t.Error("the machine is not known by its new node")
	}
}
