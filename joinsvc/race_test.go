package joinsvc_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/attestors"
	"github.com/better-compute/join-operator/joinsvc"
	"github.com/better-compute/join-operator/test/pgtest"
)

// together runs f for 0..n-1 at once, from one starting shot.
func together(n int, f func(i int)) {
	start := make(chan struct{})
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			<-start
			f(i)
		})
	}
	close(start)
	wg.Wait()
}

func machines(tb testing.TB, n int) []*machine {
	out := make([]*machine, n)
	for i := range out {
		out[i] = newMachine(tb)
	}
	return out
}

// result of one of several joins at once.
type result struct {
	answer *wire.Answer
	err    error
}

// race joins all machines by one token over several replicas at once. As machines
// do, they come again where the service is overloaded.
func race(replicas []*replica, ms []*machine, token issued) []result {
	out := make([]result, len(ms))
	together(len(ms), func(i int) {
		for try := 0; ; try++ {
			out[i].answer, out[i].err = replicas[(i+try)%len(replicas)].token(ms[i], token)
			var p *joinsvc.Problem
			if !errors.As(out[i].err, &p) || p.Code != wire.Unavailable || try == 10 {
				return
			}
		}
	})
	return out
}

// tally counts who joined; everybody else must have been refused for the reason.
func tally(tb testing.TB, results []result, reason string) (joined int) {
	tb.Helper()
	for _, r := range results {
		if r.err == nil {
			joined++
			continue
		}
		refusal(tb, r.err, reason)
	}
	return joined
}

func TestOfManyMachinesWithAOneUseTokenExactlyOneJoins(t *testing.T) {
	s := newSystem(t)
	replicas := []*replica{s.replica(), s.replica()}
	ms := machines(t, 40)
	for round := range 50 {
		token := s.token()
		if round > 0 { // a CSR that joined is not a new machine
			for i := range ms {
				ms[i] = ms[i].again(t)
			}
		}
		if joined := tally(t, race(replicas, ms, token), "join-token:spent"); joined != 1 {
			t.Fatalf("round %d: %d machines joined", round, joined)
		}
		if n := one[int](s, `SELECT count(*) FROM node_certs WHERE token_id = $1`, token.id); n != 1 {
			t.Fatalf("round %d: %d certificates", round, n)
		}
	}
	if nodes, events := one[int](s, `SELECT count(*) FROM nodes`), one[int](s, `SELECT count(*) FROM events WHERE type = 'node.joined'`); nodes != 50 || events != 50 {
		t.Errorf("%d nodes, %d events", nodes, events)
	}
}

func TestTheLastUseIsNeverFalselyRefused(t *testing.T) {
	s := newSystem(t)
	replicas := []*replica{s.replica(), s.replica()}
	for _, n := range []int{2, 7, 40, 90} {
		token := s.token(uses(n))
		if joined := tally(t, race(replicas, machines(t, n), token), "none"); joined != n {
			t.Errorf("%d of %d joined", joined, n)
		}
		over := s.token(uses(n))
		if joined := tally(t, race(replicas, machines(t, n+9), over), "join-token:spent"); joined != n {
			t.Errorf("%d joined by a token of %d uses", joined, n)
		}
	}
}

func TestTheSameCSRInFlightTwiceJoinsOnce(t *testing.T) {
	s := newSystem(t)
	replicas := []*replica{s.replica(), s.replica()}
	for range 20 {
		token, m := s.token(uses(3)), newMachine(t)
		results := race(replicas, []*machine{m, m, m, m}, token)
		for _, r := range results {
			if r.err != nil {
				t.Fatal(r.err)
			}
			if r.answer.Certificates[0] != results[0].answer.Certificates[0] {
				t.Fatal("two certificates for one CSR")
			}
		}
		if left := s.usesLeft(token); left != 2 {
			t.Fatalf("%d of 3 uses left", left)
		}
	}
}

// A machine that hangs up at any moment comes again and gets what it got.
func TestAClientThatIsGoneCostsNothing(t *testing.T) {
	s := newSystem(t)
	replicas := []*replica{s.replica(), s.replica()}
	for i := range 60 {
		token, m := s.token(), newMachine(t)
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rand.IntN(6000))*time.Microsecond)
		_, err := replicas[i%2].Join(ctx, s.envelope(m, "", wire.RoleNode, &wire.Sealed{Token: token.text}), here)
		cancel()
		if err != nil {
			problem(t, err, wire.Unavailable)
		}
		a := replicas[(i+1)%2].joins(m, token)
		if b := replicas[i%2].joins(m, token); a.Certificates[0] != b.Certificates[0] {
			t.Fatal("two certificates")
		}
		if left := s.usesLeft(token); left != 0 {
			t.Fatalf("%d uses left", left)
		}
		if n := one[int](s, `SELECT count(*) FROM node_certs WHERE token_id = $1`, token.id); n != 1 {
			t.Fatalf("%d certificates", n)
		}
	}
}

// A plain token join takes two round trips to the database.
func TestATokenJoinTakesTwoRoundTrips(t *testing.T) {
	s := newSystem(t)
	var l line
	r := s.replica(s.onLine(&l, 1))
	token := s.token(uses(100))
	for range 10 { // statements are prepared at their first use
		r.joins(newMachine(t), token)
	}
	const joins = 5
	ms := machines(t, joins)
	envelopes := make([]*wire.Join, joins)
	for i, m := range ms {
		envelopes[i] = s.envelope(m, "", wire.RoleNode, &wire.Sealed{Token: token.text})
	}
	fewest := int64(1 << 30)
	for _, j := range envelopes {
		before := l.trips.Load()
		if _, err := r.Join(t.Context(), j, here); err != nil {
			t.Fatal(err)
		}
		fewest = min(fewest, l.trips.Load()-before) // a notification may come in between
	}
	if fewest != 2 {
		t.Errorf("a token join took %d round trips, want 2", fewest)
	}
}

// Whatever moment the connection breaks in, the machine is told to come again,
// and then joins once.
func TestABrokenConnectionLeavesNothingHalfDone(t *testing.T) {
	s := newSystem(t)
	other := s.replica()
	for _, when := range []struct {
		name   string
		marker string
		how    cutting
		// committed is whether the first try was, though nobody heard of it.
		committed bool
	}{
		{"before the reads", "begin", cutBefore, false},
		{"after the reads", "begin", cutAfter, false},
		{"before the commit", "commit", cutBefore, false},
		{"after the commit", "commit", cutAfter, true},
	} {
		t.Run(when.name, func(t *testing.T) {
			var l line
			r := s.replica(s.onLine(&l, 1))
			for range 3 {
				r.joins(newMachine(t), s.token())
			}
			token, m := s.token(), newMachine(t)
			packets := 0
			l.setCut(func(p []byte) cutting {
				if !bytes.Contains(p, m.csrSum()) && !bytes.Contains(p, []byte(token.id)) {
					return keep
				}
				if packets++; (packets == 1) == (when.marker == "begin") {
					return when.how
				}
				return keep
			})
			_, err := r.token(m, token)
			p := problem(t, err, wire.Unavailable)
			if p.RetryAfter <= 0 {
				t.Error("without Retry-After")
			}
			l.setCut(nil)
			want := 0
			if when.committed {
				want = 1
			}
			eventually(t, "what was sent is committed or gone", func() bool {
				return one[int](s, `SELECT count(*) FROM node_certs WHERE token_id = $1`, token.id) == want &&
					one[int](s, `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`) == 0
			})
			a := other.joins(m, token)
			if b := r.joins(m, token); b.Certificates[0] != a.Certificates[0] {
				t.Error("two certificates")
			}
			if n := one[int](s, `SELECT count(*) FROM node_certs WHERE token_id = $1`, token.id); n != 1 || s.usesLeft(token) != 0 {
				t.Errorf("%d certificates, %d uses left", n, s.usesLeft(token))
			}
		})
	}
}

func TestWithoutPostgresEveryJoinIsUnavailableWithinASecond(t *testing.T) {
	server := pgtest.NewServer(t)
	s := newSystem(t, pgtest.OnServer(server))
	var l line
	r := s.replica(s.onLine(&l, 8))
	token, m := s.token(uses(5)), newMachine(t)
	r.joins(newMachine(t), token)
	down := func() {
		t.Helper()
		for range 5 {
			start := time.Now()
			_, err := r.token(newMachine(t), token)
			took := time.Since(start)
			if p := problem(t, err, wire.Unavailable); p.RetryAfter <= 0 {
				t.Error("without Retry-After")
			}
			if took > time.Second {
				t.Errorf("it took %s", took)
			}
		}
	}
	server.Stop()
	down()
	server.Start(t)
	eventually(t, "joins go on by themselves", func() bool {
		_, err := r.token(m, token)
		return err == nil
	})
	// One that hangs is as good as stopped.
	l.setCut(func([]byte) cutting { return swallow })
	down()
	l.setCut(nil)
	eventually(t, "joins go on by themselves", func() bool {
		_, err := r.token(newMachine(t), token)
		return err == nil
	})
}

// hold runs statements in a transaction of its own and returns how to end it.
func (s *system) hold(sql string, args ...any) (end func(commit bool)) {
	s.Helper()
	tx, err := s.admin.Begin(context.Background())
	s.must(err)
	_, err = tx.Exec(context.Background(), sql, args...)
	s.must(err)
	return func(commit bool) {
		s.Helper()
		if commit {
			s.must(tx.Commit(context.Background()))
		} else {
			s.must(tx.Rollback(context.Background()))
		}
	}
}

// blocked waits until a join waits for a lock.
func (s *system) blocked() {
	s.Helper()
	eventually(s, "a join waits for a lock", func() bool {
		return one[int](s, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND usename = 'join_service' AND wait_event_type = 'Lock'`) > 0
	})
}

// behind starts a join, waits until it is behind a lock, ends who holds it, and
// returns the join's result.
func (r *replica) behind(end func(bool), commit bool, join func() (*wire.Answer, error)) (*wire.Answer, error) {
	r.sys.Helper()
	done := make(chan result, 1)
	go func() {
		a, err := join()
		done <- result{a, err}
	}()
	r.sys.blocked()
	end(commit)
	got := <-done
	return got.answer, got.err
}

func TestAJoinWaitsForTheLastSlotAndTakesItIfItIsGivenBack(t *testing.T) {
	s := newSystem(t)
	r := s.replica()
	const spend = `UPDATE join_token_slots SET uses_left = uses_left - 1 WHERE token_id = $1`
	for _, commit := range []bool{false, true} {
		token, m := s.token(), newMachine(t)
		a, err := r.behind(s.hold(spend, token.id), commit, func() (*wire.Answer, error) { return r.token(m, token) })
		if commit {
			refusal(t, err, "join-token:spent")
			continue
		}
		if err != nil || a.Outcome != wire.OutcomeJoined {
			t.Errorf("%+v, %v", a, err)
		}
		if s.usesLeft(token) != 0 {
			t.Error("the use was not spent")
		}
	}
}

func TestALockThatIsHeldTooLongIsAnOutageAndNoRefusal(t *testing.T) {
	s := newSystem(t)
	r := s.replica()
	token, m := s.token(), newMachine(t)
	end := s.hold(`UPDATE join_token_slots SET uses_left = uses_left - 1 WHERE token_id = $1`, token.id)
	_, err := r.token(m, token)
	problem(t, err, wire.Unavailable)
	end(false)
	r.joins(m, token)
}

func TestASecondCopyOfAJoinWaitsForTheFirst(t *testing.T) {
	s := newSystem(t)
	r := s.replica()
	token, m := s.token(), newMachine(t)
	end := s.hold(`SELECT pg_advisory_xact_lock($1)`, m.csrLock())
	a, err := r.behind(end, true, func() (*wire.Answer, error) { return r.token(m, token) })
	if err != nil || a.Outcome != wire.OutcomeJoined {
		t.Errorf("%+v, %v", a, err)
	}
}

// What the database rolls back because of others is tried again, three times.
func TestADeadlockStartsTheTransactionAgain(t *testing.T) {
	s := newSystem(t)
	failures := 0
	clumsy := scripted(t, "clumsy", func(ctx context.Context, ev attestors.Evidence, jc *attestors.JoinContext) (attestors.Outcome, error) {
		if failures > 0 {
			failures--
			if _, err := jc.Tx.Exec(ctx, `DO $$ BEGIN RAISE EXCEPTION 'lost' USING ERRCODE = '40P01'; END $$`); err != nil {
				return nil, fmt.Errorf("look something up: %w", err)
			}
		}
		return admitting(ctx, ev, jc)
	})
	r := s.replica(withAttestors(clumsy))
	join := func() error {
		_, err := r.Join(t.Context(), s.envelope(newMachine(t), "clumsy", wire.RoleNode, &wire.Sealed{Evidence: []byte("machine")}), here)
		return err
	}
	failures = 2
	if err := join(); err != nil {
		t.Errorf("after two lost races: %v", err)
	}
	failures = 3
	problem(t, join(), wire.Unavailable)
	if n := one[int](s, `SELECT count(*) FROM nodes`); n != 1 {
		t.Errorf("%d nodes", n)
	}
}

// Two transactions that really wait for each other: one is rolled back by the
// database and both end well.
func TestARealDeadlockWithAControllerIsSurvived(t *testing.T) {
	s := newSystem(t)
	binder := scripted(t, "binder", func(ctx context.Context, ev attestors.Evidence, jc *attestors.JoinContext) (attestors.Outcome, error) {
		a, err := admitting(ctx, ev, jc)
		if err != nil {
			return nil, err
		}
		a.Bind = sum(ev.Payload)
		return a, nil
	})
	r := s.replica(withAttestors(binder))
	join := func(m *machine) (*wire.Answer, error) {
		return r.Join(context.Background(), s.envelope(m, "binder", wire.RoleNode, &wire.Sealed{Evidence: []byte("machine")}), here)
	}
	first, err := join(newMachine(t))
	s.must(err)
	// Against the order of locks: a certificate first, then its node.
	tx, err := s.admin.Begin(context.Background())
	s.must(err)
	_, err = tx.Exec(context.Background(), `UPDATE node_certs SET used_at = join_now() WHERE node_id = $1`, first.NodeID)
	s.must(err)
	done := make(chan error, 1)
	go func() {
		_, err := join(newMachine(t))
		done <- err
	}()
	s.blocked()
	_, wrongOrder := tx.Exec(context.Background(), `UPDATE nodes SET changed_at = join_now() WHERE id = $1`, first.NodeID)
	_ = tx.Rollback(context.Background())
	if err := <-done; err != nil {
		t.Errorf("the join: %v (the other: %v)", err, wrongOrder)
	}
}

func TestR10_ABoundSubjectReclaimsItsNodeAlsoWhenTwoRace(t *testing.T) {
	s := newSystem(t)
	binder := scripted(t, "binder", func(ctx context.Context, ev attestors.Evidence, jc *attestors.JoinContext) (attestors.Outcome, error) {
		a, err := admitting(ctx, ev, jc)
		if err != nil {
			return nil, err
		}
		a.Bind = sum(ev.Payload[:1])
		a.NodeID = string(ev.Payload[1:])
		return a, nil
	})
	replicas := []*replica{s.replica(withAttestors(binder)), s.replica(withAttestors(binder))}
	join := func(r *replica, subject string) (*wire.Answer, error) {
		return r.Join(context.Background(), s.envelope(newMachine(t), "binder", wire.RoleNode, &wire.Sealed{Evidence: []byte(subject)}), here)
	}
	for round := range 10 {
		subject := string(rune('a' + round))
		results := make([]result, 4)
		together(len(results), func(i int) { results[i].answer, results[i].err = join(replicas[i%2], subject) })
		for _, r := range results {
			if r.err != nil {
				problem(t, r.err, wire.Unavailable) // it lost three times; never a refusal
				continue
			}
		}
		if n := one[int](s, `SELECT count(*) FROM node_bindings WHERE subject = $1`, sum([]byte(subject))); n != 1 {
			t.Fatalf("%d bindings", n)
		}
		node := one[string](s, `SELECT node_id FROM node_bindings WHERE subject = $1`, sum([]byte(subject)))
		if n := one[int](s, `SELECT count(*) FROM node_certs WHERE node_id = $1 AND revoked_at IS NULL`, node); n != 1 {
			t.Fatalf("%d certificates of one node are valid", n)
		}
	}
	if n := one[int](s, `SELECT count(*) FROM nodes`); n != 10 {
		t.Errorf("%d nodes for 10 subjects", n)
	}
	// A subject that is bound to one node does not enter another.
	other, err := join(replicas[0], "z")
	s.must(err)
	_, err = join(replicas[0], "a"+other.NodeID)
	refusal(t, err, "binder:bound-elsewhere")
	// A deleted node's binding is gone; its machine enters anew.
	old := one[string](s, `SELECT node_id FROM node_bindings WHERE subject = $1`, sum([]byte("a")))
	s.exec(`DELETE FROM node_bindings WHERE node_id = $1`, old)
	s.exec(`DELETE FROM nodes WHERE id = $1`, old)
	anew, err := join(replicas[0], "a")
	s.must(err)
	if anew.NodeID == old {
		t.Error("it entered a node that was deleted")
	}
}

func TestR20_EvidenceIsUsedOnceAlsoWhenManyRace(t *testing.T) {
	s := newSystem(t)
	single := scripted(t, "single", func(ctx context.Context, ev attestors.Evidence, jc *attestors.JoinContext) (attestors.Outcome, error) {
		a, err := admitting(ctx, ev, jc)
		if err != nil {
			return nil, err
		}
		a.Use = &attestors.Use{Subject: sum(ev.Payload), ExpiresAt: jc.Now.Add(time.Hour)}
		return a, nil
	})
	replicas := []*replica{s.replica(withAttestors(single)), s.replica(withAttestors(single))}
	join := func(i int, m *machine, evidence string) (*wire.Answer, error) {
		return replicas[i%2].Join(context.Background(), s.envelope(m, "single", wire.RoleNode, &wire.Sealed{Evidence: []byte(evidence)}), here)
	}
	for round := range 20 {
		evidence := fmt.Sprint("document ", round)
		results := make([]result, 6)
		ms := machines(t, len(results))
		together(len(results), func(i int) { results[i].answer, results[i].err = join(i, ms[i], evidence) })
		if joined := tally(t, results, "single:reused"); joined != 1 {
			t.Fatalf("round %d: %d joined", round, joined)
		}
		for i, r := range results {
			if r.err != nil {
				continue
			}
			if again, err := join(i+1, ms[i], evidence); err != nil || again.Certificates[0] != r.answer.Certificates[0] {
				t.Fatalf("its lost answer: %v", err)
			}
		}
	}
	if n := one[int](s, `SELECT count(*) FROM attestation_uses WHERE attestor = 'single' AND expires_at IS NOT NULL AND node_id IS NOT NULL`); n != 20 {
		t.Errorf("%d uses", n)
	}
}

// A node that is retired while its machine joins is not entered.
func TestANodeThatIsRetiredUnderAJoinIsNotReclaimed(t *testing.T) {
	s := newSystem(t)
	r := s.replica()
	m := newMachine(t)
	m.claims.HardwareKeySHA256 = m.publicKeySHA256()
	first := r.joins(m, s.token())
	end := s.hold(`UPDATE nodes SET state = 'retired', retired_at = join_now() WHERE id = $1`, first.NodeID)
	a, err := r.behind(end, true, func() (*wire.Answer, error) { return r.token(m.again(t), s.token(reclaiming())) })
	if err != nil || a.Outcome != wire.OutcomePending {
		t.Fatalf("%+v, %v: want to wait for a person", a, err)
	}
}

func TestAManyUseTokenAdmitsItsMachinesSideBySide(t *testing.T) {
	s := newSystem(t)
	replicas := []*replica{s.replica(), s.replica()}
	token := s.token(uses(10_000))
	const n = 400
	if joined := tally(t, race(replicas, machines(t, n), token), "none"); joined != n {
		t.Errorf("%d of %d joined", joined, n)
	}
	if left := s.usesLeft(token); left != 10_000-n {
		t.Errorf("%d uses left", left)
	}
	if slots := one[int](s, `SELECT count(*) FROM join_token_slots WHERE token_id = $1 AND last_used_at IS NOT NULL`, token.id); slots < 32 {
		t.Errorf("only %d slots were used", slots)
	}
}
