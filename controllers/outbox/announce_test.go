package outbox

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"k8s.io/client-go/tools/events"

	"github.com/better-compute/join-operator/test/pgtest"
)

type tag = pgconn.CommandTag

var contains = strings.Contains

// announcer is one with a clock that the test moves, and what it said.
func announcer(t *testing.T) (a *Announcer, said func() []string, advance func(time.Duration)) {
	t.Helper()
	d := pgtest.New(t)
	exec(t, d.Pool(t, pgtest.Admin), `INSERT INTO join_tokens (id, tenant, name, object_uid, secret_sha256, role, pool, uses)
		VALUES ('aaaaaaaaaaaa', 'acme', 'first', 'uid-1', sha256('x'), 'node', 'gpu', 1)`)
	recorder := events.NewFakeRecorder(1000)
	now := time.Now()
	a = &Announcer{DB: d.Pool(t, pgtest.Manager), Recorder: recorder, Logger: slog.New(slog.NewTextHandler(t.Output(), nil)), Now: func() time.Time { return now }}
	said = func() (out []string) {
		for {
			select {
			case e := <-recorder.Events:
				out = append(out, e)
			default:
				return out
			}
		}
	}
	return a, said, func(d time.Duration) { now = now.Add(d) }
}

func refused(tenant, reason, token string) Event {
	return Event{Type: "security.join.refused", Tenant: tenant,
		Data: fmt.Appendf(nil, `{"attestor": "join-token", "reason": %q, "csrSHA256": "c0ffee", "tokenID": %q}`, reason, token)}
}

func TestRefusalNamesReasonObjectAndFix(t *testing.T) {
	a, said, _ := announcer(t)
	if err := a.Observe(t.Context(), []Event{refused("acme", "join-token:spent", "aaaaaaaaaaaa")}); err != nil {
		t.Fatal(err)
	}
	got := said()
	if len(got) != 1 {
		t.Fatalf("said %q", got)
	}
	for _, want := range []string{"Warning JoinRefused", "join-token:spent", "JoinToken first", "raise its spec.uses", "c0ffee"} {
		if !contains(got[0], want) {
			t.Errorf("%q does not say %q", got[0], want)
		}
	}
}

func TestTheVerifiersOwnWordsComeFirst(t *testing.T) {
	a, said, _ := announcer(t)
	err := a.Observe(t.Context(), []Event{{Type: "security.join.refused", Tenant: "acme",
		Data: []byte(`{"reason": "join-token:expired", "tokenID": "aaaaaaaaaaaa", "detail": "JoinToken acme/first expired at noon: move spec.expiresAt"}`)}})
	if err != nil {
		t.Fatal(err)
	}
	got := said()
	if len(got) != 1 || !contains(got[0], "A machine was refused: join-token:expired. JoinToken acme/first expired at noon: move spec.expiresAt.") || contains(got[0], "make another") {
		t.Errorf("said %q", got)
	}
}

// Who merely names a token's id does not reach its tenant (R12).
func TestR12_UnprovedTokenIDStaysInTheRootTenant(t *testing.T) {
	events := []Event{refused("join-system", "join-token:secret", "aaaaaaaaaaaa")}
	a, _, _ := announcer(t)
	tokens, err := Tokens(t.Context(), a.DB, events)
	if err != nil {
		t.Fatal(err)
	}
	c, ok := causeOf(events[0], tokens)
	if !ok || c.object.Kind != "Namespace" || c.object.Namespace != "join-system" {
		t.Errorf("told about %+v", c.object)
	}
	tokens, err = Tokens(t.Context(), a.DB, []Event{refused("acme", "join-token:spent", "aaaaaaaaaaaa")})
	if err != nil || tokens["aaaaaaaaaaaa"].Name != "first" || tokens["aaaaaaaaaaaa"].UID != "uid-1" {
		t.Errorf("tokens are %+v (%v)", tokens, err)
	}
}

func TestFloodOfRefusalsIsToldTogether(t *testing.T) {
	a, said, advance := announcer(t)
	flood := make([]Event, 500)
	for i := range flood {
		flood[i] = refused("acme", "join-token:expired", "aaaaaaaaaaaa")
	}
	for range 10 {
		if err := a.Observe(t.Context(), flood); err != nil {
			t.Fatal(err)
		}
	}
	if got := said(); len(got) != 1 {
		t.Errorf("%d Events for one cause at once", len(got))
	}
	advance(announceEvery)
	if err := a.Observe(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if got := said(); len(got) != 1 || !contains(got[0], "4500 machines or attempts") {
		t.Errorf("said %q", got)
	}
	advance(announceEvery)
	if err := a.Observe(t.Context(), nil); err != nil || len(a.told) != 0 {
		t.Errorf("%d causes are kept (%v)", len(a.told), err)
	}
}

func TestMemoryForCausesIsBounded(t *testing.T) {
	a, said, _ := announcer(t)
	var many []Event
	for i := range 3 * announceKeys {
		many = append(many, refused("acme", fmt.Sprintf("join-token:r%d", i), ""))
	}
	if err := a.Observe(t.Context(), many); err != nil {
		t.Fatal(err)
	}
	if got := len(said()); got != announceKeys || len(a.told) != announceKeys {
		t.Errorf("%d Events, %d causes", got, len(a.told))
	}
}

func TestAdmittedMachinesAreCounted(t *testing.T) {
	a, said, advance := announcer(t)
	join := Event{Type: "node.joined", Tenant: "acme", NodeID: "n-1", Data: []byte(`{"tokenID": "aaaaaaaaaaaa"}`)}
	if err := a.Observe(t.Context(), []Event{join}); err != nil {
		t.Fatal(err)
	}
	if err := a.Observe(t.Context(), []Event{join, join, join}); err != nil {
		t.Fatal(err)
	}
	advance(announceEvery)
	if err := a.Observe(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	got := said()
	if len(got) != 2 || !contains(got[0], "FleetNode n-1") || !contains(got[1], "3 machines joined") {
		t.Errorf("said %q", got)
	}
}

func TestGarbledEventsAreToldWithoutDetails(t *testing.T) {
	a, said, _ := announcer(t)
	err := a.Observe(t.Context(), []Event{
		{Type: "security.join.refused", Tenant: "acme", Data: []byte(`{"reason": 7}`)},
		{Type: "security.join.refused", Tenant: "acme", Data: []byte(`{"reason": "join-token:` + strings.Repeat("x", 5000) + `"}`)},
		{Type: "node.joined", Tenant: "acme", Data: []byte(`[]`)},
		{Type: "something.else", Tenant: "acme"},
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range said() {
		if len(e) > 1100 {
			t.Errorf("an Event of %d characters", len(e))
		}
	}
}
