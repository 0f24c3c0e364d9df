package joinsvc_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"

	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/attestors"
	"github.com/better-compute/join-operator/attestors/configured"
	"github.com/better-compute/join-operator/attestors/jointoken"
	"github.com/better-compute/join-operator/joinsvc"
	"github.com/better-compute/join-operator/joinsvc/attestorset"
	"github.com/better-compute/join-operator/test/pgtest"
)

// asking is an attestor type whose attestors ask back, and prove the site.
func asking(id string, _ json.RawMessage, _ attestors.Environment) (*attestors.Attestor, error) {
	return attestors.Define(attestors.Spec{
		ID: id, Version: "1", Roles: []attestors.Role{attestors.RoleNode},
		Verify: func(ctx context.Context, ev attestors.Evidence, jc *attestors.JoinContext) (attestors.Outcome, error) {
			if ev.State == nil {
				return &attestors.Challenge{Data: []byte("which site?"), State: []byte("asked")}, nil
			}
			return &attestors.Admit{
				Subject: jc.CSRSHA256[:], SubjectProved: true, Role: jc.Role, Facts: map[string]string{"site": string(ev.Payload)},
			}, nil
		},
	})
}

// configuredReplica is a replica whose attestors follow their configurations.
func (s *system) configuredReplica() *replica {
	s.Helper()
	builtIn, err := attestors.NewRegistry(jointoken.New())
	s.must(err)
	set, err := attestorset.New(attestorset.Config{
		DB: s.db.Pool(s, pgtest.Service), BuiltIn: builtIn, Replica: "replica-1", Logger: s.log,
		Types: configured.Types{"external": {Rules: configured.RulesRequired, New: asking}, "joinToken": configured.BuiltIn()["joinToken"]},
	})
	s.must(err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); set.Run(ctx) }()
	s.Cleanup(func() { cancel(); <-done })
	eventually(s, "the configurations are read", func() bool { return set.Ready() == nil })
	return s.replica(func(c *joinsvc.Config) { c.Attestors = set })
}

// configure publishes a configuration and waits until a replica has it.
func (s *system) configure(r *replica, name, spec string) (version int64) {
	s.Helper()
	version = one[int64](s, `INSERT INTO attestor_configs (name, spec, object_uid, object_generation) VALUES ($1, $2, 'u', 1)
	  ON CONFLICT (name) DO UPDATE SET spec = excluded.spec, version = nextval('attestor_config_versions') RETURNING version`, name, spec)
	s.exec(`INSERT INTO replicas (id, keys) VALUES ('replica-1', '{}') ON CONFLICT DO NOTHING`)
	eventually(s, "the version is in force", func() bool {
		return one[bool](s, `SELECT coalesce((SELECT attestors->$1->>'version' = $2::bigint::text FROM replicas WHERE id = 'replica-1'), false)`, name, version)
	})
	return version
}

const bySite = `{"type": "external", "external": {"url": "https://x", "allowedTenants": ["factory"]}, "roles": ["node"], "approval": %q,
  "rules": [{"name": "ams", "when": "facts.site == 'ams'", "tenant": "factory", "pool": "general", "site": "ams"}]}`

func (r *replica) round(m *machine, attestor string, evidence string, state string) (*wire.Answer, error) {
	j := r.sys.envelope(m, attestor, wire.RoleNode, &wire.Sealed{Evidence: []byte(evidence)})
	if state != "" {
		var err error
		if j.State, err = wire.DecodeBase64(state); err != nil {
			r.sys.Fatal(err)
		}
	}
	return r.Join(context.Background(), j, here)
}

func TestR18_AChallengeIsNotFinishedUnderAnotherConfiguration(t *testing.T) {
	s := newSystem(t)
	r := s.configuredReplica()
	_, err := r.round(newMachine(t), "by-site", "x", "")
	problem(t, err, wire.Unsupported)
	s.configure(r, "by-site", fmt.Sprintf(bySite, "Never"))

	m := newMachine(t)
	asked, err := r.round(m, "by-site", "x", "")
	s.must(err)
	if asked.Outcome != wire.OutcomeChallenge || asked.Attestor != "by-site" {
		t.Fatalf("%+v", asked)
	}
	// Another CSR's state, another configuration's state.
	_, err = r.round(newMachine(t), "by-site", "ams", asked.State)
	refusal(t, err, "by-site:state")
	s.configure(r, "by-site", fmt.Sprintf(bySite, "Never")) // the same again: no change that a machine could see
	_, err = r.round(m, "by-site", "ams", asked.State)
	refusal(t, err, "by-site:state")
	// The machine starts again, and joins where the rule says.
	asked, err = r.round(m, "by-site", "x", "")
	s.must(err)
	joined, err := r.round(m, "by-site", "ams", asked.State)
	s.must(err)
	if joined.Outcome != wire.OutcomeJoined || joined.Tenant != tenant || joined.Pool != "general" || joined.Site != "ams" {
		t.Errorf("%+v", joined)
	}
	// No rule matches.
	other := newMachine(t)
	asked, err = r.round(other, "by-site", "x", "")
	s.must(err)
	_, err = r.round(other, "by-site", "lhr", asked.State)
	if got := refusal(t, err, "by-site:no-rule"); got.Refusal.Tenant != "" {
		t.Errorf("it is told to tenant %s", got.Refusal.Tenant)
	}
	s.exec(`DELETE FROM attestor_configs`)
	eventually(t, "withdrawn", func() bool {
		var p *joinsvc.Problem
		_, err := r.round(newMachine(t), "by-site", "x", "")
		return errors.As(err, &p) && p.Code == wire.Unsupported
	})
}

func TestR15_AnAttestorsPolicyAsksOnTheRowsThatPoolsAskBy(t *testing.T) {
	s := newSystem(t)
	r := s.configuredReplica()
	s.configure(r, "by-site", fmt.Sprintf(bySite, "Always"))
	m := newMachine(t)
	final := func() (*wire.Answer, error) {
		asked, err := r.round(m, "by-site", "x", "")
		s.must(err)
		return r.round(m, "by-site", "ams", asked.State)
	}
	waits, err := final()
	s.must(err)
	if waits.Outcome != wire.OutcomePending {
		t.Fatalf("%+v", waits)
	}
	if got := one[string](s, `SELECT concat_ws(' ', tenant, pool, site, spec->>'attestor', spec->'facts'->>'site') FROM join_requests`); got != "factory general ams by-site ams" {
		t.Errorf("a person is asked about %q", got)
	}
	if _, err := final(); err != nil || one[int](s, `SELECT count(*) FROM join_requests`) != 1 {
		t.Errorf("a poll made a second request: %v", err)
	}
	s.exec(`UPDATE join_requests SET verdict = 'Approved', decided_at = join_now()`)
	joined, err := final()
	s.must(err)
	if joined.Outcome != wire.OutcomeJoined {
		t.Fatalf("%+v", joined)
	}
	if ended := one[string](s, `SELECT ended FROM join_requests`); ended != "Joined" {
		t.Errorf("the request ended %q", ended)
	}

	// Tokens too, when the built-in is configured.
	s.configure(r, "join-token", `{"type": "joinToken", "joinToken": {}, "roles": ["node"], "approval": "Always"}`)
	token := s.token()
	a, err := r.token(newMachine(t), token)
	s.must(err)
	if a.Outcome != wire.OutcomePending || s.usesLeft(token) != 1 {
		t.Errorf("%+v, %d uses left", a, s.usesLeft(token))
	}
	_, err = r.Join(t.Context(), s.envelope(newMachine(t), "", wire.RoleSite, &wire.Sealed{Token: token.text}), here)
	refusal(t, err, "join-token:role-not-listed")
}
