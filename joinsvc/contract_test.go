package joinsvc_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/attestors"
	"github.com/better-compute/join-operator/joinsvc"
	"github.com/better-compute/join-operator/joinsvc/pki"
)

// prover is an issuer whose crypto knows statements of the shape that it is told.
type prover struct{ joinsvc.Issuer }

func (prover) ProvesNodeKey(uri string) bool { return true }

func TestR06_AStatementThatCannotBeProvedAtRenewalIsRefused(t *testing.T) {
	s := newSystem(t)
	statement := ""
	stating := scripted(t, "stating", func(ctx context.Context, ev attestors.Evidence, jc *attestors.JoinContext) (attestors.Outcome, error) {
		a, err := admitting(ctx, ev, jc)
		if err != nil {
			return nil, err
		}
		a.NodeKeyURI = statement
		return a, nil
	})
	// One crypto says what it can prove, the other does not say.
	type silent struct{ joinsvc.Issuer }
	speaks := s.replica(withAttestors(stating), func(c *joinsvc.Config) { c.Issuer = prover{s.authority} })
	knowsNone := s.replica(withAttestors(stating), func(c *joinsvc.Config) { c.Issuer = silent{s.authority} })
	join := func(r *replica) error {
		m := newMachine(t)
		_, err := r.Join(t.Context(), s.envelope(m, "stating", wire.RoleNode, &wire.Sealed{Evidence: m.csr[:20]}), here)
		return err
	}
	good := "urn:bc:tpm-ak:" + strings.Repeat("0f", 32)
	for _, statement = range []string{
		"urn:bc:tpm-ak:", "urn:bc:tpm-ak:" + strings.Repeat("0F", 32), good + "0", "urn:bc:tpm-ek:" + strings.Repeat("0f", 32), " " + good, good + "\n",
	} {
		refusal(t, join(speaks), "join:node-key-statement")
	}
	statement = good
	refusal(t, join(knowsNone), "join:node-key-statement")
	s.must(join(speaks))
	if n := one[int](s, `SELECT count(*) FROM nodes n JOIN node_certs c ON c.node_id = n.id JOIN events e ON e.node_id = n.id
	  WHERE n.node_key_uri = $1 AND c.node_key_uri = $1 AND e.data->>'nodeKey' = $1`, good); n != 1 {
		t.Error("the statement is not kept with the node, its certificate and its event")
	}
	statement = ""
	s.must(join(knowsNone))
}

// A stronger attestor's node is not taken over by a weaker one.
func TestANodeWithAStatementIsReclaimedOnlyWithTheSameProof(t *testing.T) {
	s := newSystem(t)
	shape := func(*attestors.Admit) {}
	strong := scripted(t, "strong", func(ctx context.Context, ev attestors.Evidence, jc *attestors.JoinContext) (attestors.Outcome, error) {
		a, err := admitting(ctx, ev, jc)
		if err != nil {
			return nil, err
		}
		shape(a)
		return a, nil
	})
	weak := scripted(t, "weak", func(ctx context.Context, ev attestors.Evidence, jc *attestors.JoinContext) (attestors.Outcome, error) {
		a, err := admitting(ctx, ev, jc)
		if err != nil {
			return nil, err
		}
		shape(a)
		return a, nil
	})
	r := s.replica(withAttestors(strong, weak), func(c *joinsvc.Config) { c.Issuer = prover{s.authority} })
	join := func(attestor string, f func(*attestors.Admit)) (*wire.Answer, error) {
		shape = f
		m := newMachine(t)
		return r.Join(t.Context(), s.envelope(m, attestor, wire.RoleNode, &wire.Sealed{Evidence: []byte("machine")}), here)
	}
	key, uri := sum([]byte("ek")), "urn:bc:tpm-ak:"+strings.Repeat("ab", 32)
	first, err := join("strong", func(a *attestors.Admit) { a.HardwareKey, a.NodeKeyURI = key, uri })
	s.must(err)
	_, err = join("weak", func(a *attestors.Admit) { a.NodeID = first.NodeID })
	refusal(t, err, "weak:weaker-proof")
	_, err = join("weak", func(a *attestors.Admit) { a.HardwareKey, a.NodeKeyURI = key, uri })
	refusal(t, err, "weak:enrolled")
	_, err = join("strong", func(a *attestors.Admit) { a.HardwareKey = key })
	refusal(t, err, "strong:weaker-proof")
	_, err = join("strong", func(a *attestors.Admit) {
		a.HardwareKey, a.NodeKeyURI = key, "urn:bc:tpm-ak:"+strings.Repeat("cd", 32)
	})
	refusal(t, err, "strong:weaker-proof")
	again, err := join("strong", func(a *attestors.Admit) { a.HardwareKey, a.NodeKeyURI = key, uri })
	s.must(err)
	if again.NodeID != first.NodeID {
		t.Error("the machine did not enter its node")
	}
	s.exec(`UPDATE nodes SET conflicted_at = join_now() WHERE id = $1`, first.NodeID)
	_, err = join("strong", func(a *attestors.Admit) { a.HardwareKey, a.NodeKeyURI = key, uri })
	refusal(t, err, "strong:conflicted")
}

// A refusal is recorded with hashes only, so many a minute over all replicas.
func TestR11_RefusalsAreRecordedByReasonAndBounded(t *testing.T) {
	s := newSystem(t)
	limit := func(c *joinsvc.Config) { c.Limits.RefusalsPerMinute = 5 }
	s.db.SetNow(t, time.Now().UTC().Truncate(time.Minute))
	replicas := []*replica{s.replica(limit), s.replica(limit)}
	token := s.token()
	m := newMachine(t)
	m.claims.HardwareKeySHA256 = hexSum([]byte("claimed"))
	text := strings.ToUpper(token.text)
	for i := range 40 {
		_, err := replicas[i%2].Join(t.Context(), s.envelope(m, "", wire.RoleNode, &wire.Sealed{Token: text}), here)
		replicas[i%2].RecordRefusal(t.Context(), refusal(t, err, "join-token:malformed"))
	}
	_, err := replicas[0].token(m, issued{text: jointoken4(token)})
	replicas[0].RecordRefusal(t.Context(), refusal(t, err, "join-token:unknown"))
	eventually(t, "all are recorded or counted", func() bool {
		return one[int](s, `SELECT coalesce(sum(recorded + dropped), 0)::integer FROM refusal_windows WHERE attestor = 'join-token'`) == 41
	})
	if n := one[int](s, `SELECT count(*) FROM events WHERE type = 'security.join.refused' AND data->>'reason' = 'join-token:malformed'`); n != 5 {
		t.Errorf("%d events of one reason", n)
	}
	if n := one[int](s, `SELECT count(*) FROM events WHERE type = 'security.join.refused' AND data->>'reason' = 'join-token:unknown'`); n != 1 {
		t.Errorf("%d events of another reason", n)
	}
	if n := one[int](s, `SELECT count(*) FROM events WHERE data->>'csrSHA256' = $1 AND data->>'hardwareKeySHA256' = $2 AND tenant = $3`,
		hexSum(m.csr), m.claims.HardwareKeySHA256, rootTenant); n != 6 {
		t.Errorf("%d events with the hashes, in the root tenant's stream", n)
	}
	if n := one[int](s, `SELECT count(*) FROM events WHERE data::text ILIKE '%' || $1 || '%'`, token.text[18:50]); n != 0 {
		t.Error("an event quotes the secret")
	}
}

func jointoken4(token issued) string { return swapID(token.text, "aaaaaaaaaaaa") }

func TestR12_ARefusalIsInATenantsStreamOnlyOnceTheEvidenceSaidSo(t *testing.T) {
	s := newSystem(t)
	r := s.replica()
	token := s.token()
	r.joins(newMachine(t), token)
	forged := issued{token.id, flipSecret(token.text)}
	for _, c := range []struct {
		token         issued
		reason, where string
	}{{token, "spent", tenant}, {forged, "unknown", rootTenant}} {
		_, err := r.token(newMachine(t), c.token)
		r.RecordRefusal(t.Context(), refusal(t, err, "join-token:"+c.reason))
		eventually(t, c.reason+" is in the stream of "+c.where, func() bool {
			return one[int](s, `SELECT count(*) FROM events WHERE type = 'security.join.refused' AND tenant = $1 AND data->>'tokenID' = $2 AND data->>'reason' = $3`,
				c.where, token.id, "join-token:"+c.reason) == 1
		})
	}
}

// flipSecret changes a token's secret and mends its checksum.
func flipSecret(text string) string { return swapID(flip(text), text[5:17]) }

// Any other error, a panic or a deadline fails this one join and is no refusal.
func TestR13_AnAttestorThatFailsFailsOneJoinAndLeavesNothing(t *testing.T) {
	s := newSystem(t)
	s.exec(`CREATE TABLE plg_test_rows (id text); GRANT SELECT, INSERT ON plg_test_rows TO join_service`)
	var refused []string
	behave := map[string]func(ctx context.Context, jc *attestors.JoinContext) (attestors.Outcome, error){
		"error": func(context.Context, *attestors.JoinContext) (attestors.Outcome, error) {
			return nil, errors.New("no such file")
		},
		"panic": func(context.Context, *attestors.JoinContext) (attestors.Outcome, error) { panic("secret evidence") },
		"nil dereference": func(context.Context, *attestors.JoinContext) (attestors.Outcome, error) {
			var p *int
			return nil, fmt.Errorf("%d", *p)
		},
		"nothing": func(context.Context, *attestors.JoinContext) (attestors.Outcome, error) { return nil, nil },
		"no subject": func(_ context.Context, jc *attestors.JoinContext) (attestors.Outcome, error) {
			return &attestors.Admit{Tenant: tenant, Pool: "general", Role: jc.Role}, nil
		},
		"another role": func(_ context.Context, jc *attestors.JoinContext) (attestors.Outcome, error) {
			return &attestors.Admit{Subject: []byte("x"), Tenant: tenant, Pool: "general", Role: "site"}, nil
		},
		"a token of nobody": func(_ context.Context, jc *attestors.JoinContext) (attestors.Outcome, error) {
			return &attestors.Admit{Subject: []byte("x"), Tenant: tenant, Pool: "general", Role: jc.Role, TokenID: "aaaaaaaaaaaa"}, nil
		},
		"a short binding": func(_ context.Context, jc *attestors.JoinContext) (attestors.Outcome, error) {
			return &attestors.Admit{Subject: []byte("x"), Tenant: tenant, Pool: "general", Role: jc.Role, Bind: []byte("x")}, nil
		},
		"unprintable facts": func(_ context.Context, jc *attestors.JoinContext) (attestors.Outcome, error) {
			return &attestors.Admit{Subject: []byte("x"), Tenant: tenant, Pool: "general", Role: jc.Role, Facts: map[string]string{"a": "\x1b[31m"}}, nil
		},
		"commits": func(ctx context.Context, jc *attestors.JoinContext) (attestors.Outcome, error) {
			_, err := jc.Tx.Exec(ctx, "COMMIT")
			return &attestors.Admit{Subject: []byte("x"), Tenant: tenant, Pool: "general", Role: jc.Role}, err
		},
		"hides an error": func(ctx context.Context, jc *attestors.JoinContext) (attestors.Outcome, error) {
			_, _ = jc.Tx.Exec(ctx, "SELECT 1/0")
			return &attestors.Admit{Subject: []byte("x"), Tenant: tenant, Pool: "general", Role: jc.Role}, nil
		},
	}
	var list []any
	for name, f := range behave {
		list = append(list, scripted(t, "fails-"+strings.ReplaceAll(name, " ", "-"), func(ctx context.Context, _ attestors.Evidence, jc *attestors.JoinContext) (attestors.Outcome, error) {
			if _, err := jc.Tx.Exec(ctx, `INSERT INTO plg_test_rows VALUES ($1)`, name); err != nil {
				return nil, err
			}
			return f(ctx, jc)
		}))
	}
	r := s.replica(withAttestors(list...), func(c *joinsvc.Config) {
		c.OnRefusal = func(attestor, reason string) { refused = append(refused, attestor+":"+reason) }
	})
	for _, name := range slices.Sorted(maps.Keys(behave)) {
		t.Run(name, func(t *testing.T) {
			_, err := r.Join(t.Context(), s.envelope(newMachine(t), "fails-"+strings.ReplaceAll(name, " ", "-"), wire.RoleNode, &wire.Sealed{Evidence: []byte("x")}), here)
			var asRefusal *joinsvc.RefusedJoin
			var asProblem *joinsvc.Problem
			if err == nil || errors.As(err, &asRefusal) || errors.As(err, &asProblem) {
				t.Errorf("got %v, want an error that is neither a refusal nor a problem", err)
			}
			if err != nil && strings.Contains(err.Error(), "secret evidence") {
				t.Error("the error quotes what the attestor panicked with")
			}
		})
	}
	left := one[[]string](s, `SELECT coalesce(array_agg(id), '{}') FROM plg_test_rows WHERE id <> 'commits'`)
	if len(left) > 0 || one[int](s, `SELECT count(*) FROM nodes`) != 0 || len(refused) > 0 {
		t.Errorf("left behind: rows %v, refusals %v", left, refused)
	}
	r.joins(newMachine(t), s.token()) // the others join on
}

// I/O is done before any transaction, and has its deadline.
func TestAnAttestorsPreparationHoldsNoTransaction(t *testing.T) {
	s := newSystem(t)
	for name, c := range map[string]struct {
		prepare attestors.PrepareFunc
		check   func(t *testing.T, a *wire.Answer, err error)
	}{
		"its result reaches the verifier": {
			func(ctx context.Context, _ attestors.Evidence, _ *attestors.PrepareContext) (any, error) {
				if n := one[int](s, `SELECT count(*) FROM pg_stat_activity WHERE usename = 'join_service' AND datname = current_database() AND state = 'idle in transaction'`); n != 0 {
					return nil, errors.New("a transaction is open")
				}
				return "prepared", nil
			},
			func(t *testing.T, a *wire.Answer, err error) {
				if err != nil || a.Outcome != wire.OutcomeJoined {
					t.Errorf("%+v, %v", a, err)
				}
			},
		},
		"refuses": {
			func(context.Context, attestors.Evidence, *attestors.PrepareContext) (any, error) {
				return nil, attestors.Refuse("early")
			},
			func(t *testing.T, _ *wire.Answer, err error) { refusal(t, err, "prepared:early") },
		},
		"panics": {
			func(context.Context, attestors.Evidence, *attestors.PrepareContext) (any, error) { panic("x") },
			func(t *testing.T, _ *wire.Answer, err error) {
				if err == nil || !strings.Contains(err.Error(), "panicked") {
					t.Errorf("got %v", err)
				}
			},
		},
		"never ends": {
			func(context.Context, attestors.Evidence, *attestors.PrepareContext) (any, error) { select {} },
			func(t *testing.T, _ *wire.Answer, err error) { problem(t, err, wire.Unavailable) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			a, err := attestors.Define(attestors.Spec{
				ID: "prepared", Version: "1", Roles: []attestors.Role{attestors.RoleNode}, Prepare: c.prepare,
				Verify: func(ctx context.Context, ev attestors.Evidence, jc *attestors.JoinContext) (attestors.Outcome, error) {
					if jc.Prepared != "prepared" {
						return nil, errors.New("what was prepared did not arrive")
					}
					return admitting(ctx, ev, jc)
				},
			})
			s.must(err)
			ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
			defer cancel()
			m := newMachine(t)
			answer, err := s.replica(withAttestors(a)).Join(ctx, s.envelope(m, "prepared", wire.RoleNode, &wire.Sealed{Evidence: m.csr[:20]}), here)
			c.check(t, answer, err)
		})
	}
}

// A deferral commits the attestor's own rows; a refusal does not.
func TestR14_ADeferralCommitsTheAttestorsOwnRows(t *testing.T) {
	s := newSystem(t)
	s.exec(`CREATE TABLE plg_test_rows (id text); GRANT SELECT, INSERT ON plg_test_rows TO join_service`)
	noting := scripted(t, "noting", func(ctx context.Context, ev attestors.Evidence, jc *attestors.JoinContext) (attestors.Outcome, error) {
		if _, err := jc.Tx.Exec(ctx, `INSERT INTO plg_test_rows VALUES ($1)`, string(ev.Payload)); err != nil {
			return nil, err
		}
		a, err := admitting(ctx, ev, jc)
		if err != nil || string(ev.Payload) == "refused" {
			return nil, attestors.Refuse("said-no")
		}
		a.Use = &attestors.Use{Subject: sum(ev.Payload)}
		return &attestors.Pending{Would: a}, nil
	})
	r := s.replica(withAttestors(noting))
	join := func(evidence string) (*wire.Answer, error) {
		return r.Join(t.Context(), s.envelope(newMachine(t), "noting", wire.RoleNode, &wire.Sealed{Evidence: []byte(evidence)}), here)
	}
	a, err := join("deferred")
	waits(t, a, err)
	_, err = join("refused")
	refusal(t, err, "noting:said-no")
	if rows := one[[]string](s, `SELECT array_agg(id) FROM plg_test_rows`); !slices.Equal(rows, []string{"deferred"}) {
		t.Errorf("rows: %v", rows)
	}
	if n := one[int](s, `SELECT count(*) FROM attestation_uses`); n != 0 {
		t.Error("a deferral used the evidence up")
	}
}

// Single-use evidence is spent in the round that joins; each round checks it.
func TestR17_EvidenceIsCheckedInEachRoundAndSpentInTheLast(t *testing.T) {
	s, token := guarded(t)
	r := s.replica()
	m := newMachine(t)
	for range 3 {
		a, err := r.token(m, token)
		waits(t, a, err)
	}
	if left := s.usesLeft(token); left != 2 {
		t.Fatalf("waiting spent uses: %d left", left)
	}
	s.exec(`UPDATE join_token_slots SET uses_left = 0 WHERE token_id = $1`, token.id)
	_, err := r.token(m, token)
	refusal(t, err, "join-token:spent")
	s.exec(`UPDATE join_token_slots SET uses_left = 1 WHERE token_id = $1 AND slot = 0`, token.id)
	a, err := r.token(m, token)
	s.decide(waits(t, a, err).JoinRequest, "Approved")
	r.joins(m, token)
	if left := s.usesLeft(token); left != 0 {
		t.Errorf("%d uses left", left)
	}
}

// A challenge writes no row, any replica finishes it, and only for its own join.
func TestR18_AChallengeFinishesTheJoinItWasMadeForOnAnyReplica(t *testing.T) {
	s := newSystem(t)
	asking := scripted(t, "asking", func(ctx context.Context, ev attestors.Evidence, jc *attestors.JoinContext) (attestors.Outcome, error) {
		if ev.State == nil {
			return &attestors.Challenge{Data: []byte("answer this"), State: []byte("what I asked")}, nil
		}
		if string(ev.State) != "what I asked" {
			return nil, errors.New("another state than was sealed")
		}
		return admitting(ctx, ev, jc)
	})
	other := scripted(t, "other", func(context.Context, attestors.Evidence, *attestors.JoinContext) (attestors.Outcome, error) {
		return nil, attestors.Refuse("ran")
	})
	first, second := s.replica(withAttestors(asking, other)), s.replica(withAttestors(asking, other))
	m := newMachine(t)
	join := func(r *replica, m *machine, attestor string, role wire.Role, state []byte) (*wire.Answer, error) {
		j := s.envelope(m, attestor, role, &wire.Sealed{Evidence: []byte("machine")})
		j.State = state
		return r.Join(t.Context(), j, here)
	}
	var a *wire.Answer
	s.writesNothing("a challenge", func() {
		var err error
		a, err = join(first, m, "asking", wire.RoleNode, nil)
		s.must(err)
	})
	if a.Outcome != wire.OutcomeChallenge || a.Attestor != "asking" || a.Challenge != wire.EncodeBase64([]byte("answer this")) {
		t.Fatalf("%+v", a)
	}
	state, err := wire.DecodeBase64(a.State)
	s.must(err)
	if strings.Contains(string(state), "what I asked") {
		t.Error("the state is not sealed")
	}
	_, err = join(second, newMachine(t), "asking", wire.RoleNode, state)
	refusal(t, err, "asking:state")
	_, err = join(second, m, "other", wire.RoleNode, state)
	refusal(t, err, "other:state")
	_, err = join(second, m, "asking", wire.RoleSite, state)
	refusal(t, err, "asking:state")
	b, err := join(second, m, "asking", wire.RoleNode, state)
	if err != nil || b.Outcome != wire.OutcomeJoined {
		t.Errorf("%+v, %v", b, err)
	}
}

func TestR21_AListMayReplaceTheBuiltInAndWhatIsNoAttestorIsSkipped(t *testing.T) {
	s := newSystem(t)
	own := scripted(t, "join-token", func(context.Context, attestors.Evidence, *attestors.JoinContext) (attestors.Outcome, error) {
		return nil, attestors.Refuse("mine")
	})
	r := s.replica(withAttestors("no attestor", 7, nil, []any{own}))
	_, err := r.token(newMachine(t), s.token())
	refusal(t, err, "join-token:mine")
	s.replica(withAttestors("no attestor")).joins(newMachine(t), s.token())
}

// Every round is counted by attestor and outcome; what a machine sends is no label.
func TestRoundsAreCountedByOutcome(t *testing.T) {
	s, token := guarded(t)
	r := s.replica()
	r.joins(newMachine(t), s.token())
	a, err := r.token(newMachine(t), token)
	waits(t, a, err)
	_, err = r.token(newMachine(t), issued{text: "bcjt_not_a_token"})
	refusal(t, err, "join-token:malformed")
	_, err = r.Join(t.Context(), s.envelope(newMachine(t), "made-up-by-a-machine", wire.RoleNode, &wire.Sealed{}), here)
	problem(t, err, wire.Unsupported)
	want := `
# HELP join_requests_total Rounds of joins by attestor and outcome.
# TYPE join_requests_total counter
join_requests_total{attestor="join-token",outcome="ACCESS_DENIED"} 1
join_requests_total{attestor="join-token",outcome="joined"} 1
join_requests_total{attestor="join-token",outcome="pending"} 1
join_requests_total{attestor="none",outcome="UNSUPPORTED"} 1
`
	if err := testutil.GatherAndCompare(r.metrics, strings.NewReader(want), "join_requests_total"); err != nil {
		t.Error(err)
	}
}

func TestWithoutACAJoinsAreAnOutageAndSpendNothing(t *testing.T) {
	s := newSystem(t)
	empty := s.replica(func(c *joinsvc.Config) { c.Issuer = pki.NewAuthority(s.log) })
	token, m := s.token(), newMachine(t)
	_, err := empty.token(m, token)
	problem(t, err, wire.Unavailable)
	s.replica().joins(m, token)
}

// Controllers hear of commits by one notification for many, and never from a
// join's own transaction.
func TestControllersHearOfCommits(t *testing.T) {
	s := newSystem(t)
	r := s.replica()
	conn, err := s.admin.Acquire(t.Context())
	s.must(err)
	defer conn.Release()
	_, err = conn.Exec(t.Context(), "LISTEN "+joinsvc.Channel)
	s.must(err)
	token := s.token(uses(200))
	ms := machines(t, 100)
	tally(t, race([]*replica{r}, ms, token), "none")
	heard := 0
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	for {
		if _, err := conn.Conn().WaitForNotification(ctx); err != nil {
			break
		}
		if heard++; heard == 1 { // what comes within a moment belongs to the same commits
			ctx, cancel = context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
		}
	}
	if heard == 0 || heard > 50 {
		t.Errorf("%d notifications for 100 joins", heard)
	}
}
