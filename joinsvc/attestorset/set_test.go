package attestorset_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/better-compute/join-operator/attestors"
	"github.com/better-compute/join-operator/attestors/configured"
	"github.com/better-compute/join-operator/attestors/jointoken"
	"github.com/better-compute/join-operator/joinsvc/attestorset"
	"github.com/better-compute/join-operator/test/pgtest"
)

// world is a database, and a replica's set of attestors.
type world struct {
	*testing.T
	admin, manager, service *pgxpool.Pool
	metrics                 *prometheus.Registry
	log                     *locked
	set                     *attestorset.Set
	stop                    func()
}

// locked is a log that is written and read at once.
type locked struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *locked) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *locked) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// testType is an attestor type for tests, under the name of the one that
// configurations of every name may have: what its attestors admit is the url.
func testType(id string, part json.RawMessage, _ attestors.Environment) (*attestors.Attestor, error) {
	var p struct {
		URL string `json:"url"`
	}
	if err := json.Unmarshal(part, &p); err != nil {
		return nil, err
	}
	switch p.URL {
	case "wrong":
		return nil, &attestors.FieldError{Field: "url", Reason: "it is wrong " + strings.Repeat("!", 1000)}
	case "panic":
		panic("secret")
	}
	return attestors.Define(attestors.Spec{
		ID: id, Version: "1", Roles: []attestors.Role{attestors.RoleNode},
		Verify: func(context.Context, attestors.Evidence, *attestors.JoinContext) (attestors.Outcome, error) {
			return &attestors.Admit{Subject: []byte(p.URL)}, nil
		},
	})
}

func newWorld(t *testing.T) *world {
	db := pgtest.New(t)
	w := &world{
		T: t, admin: db.Pool(t, pgtest.Admin), manager: db.Pool(t, pgtest.Manager), service: db.Pool(t, pgtest.Service), log: &locked{},
	}
	w.exec(w.service, `INSERT INTO replicas (id, keys) VALUES ('replica-1', '{}')`)
	w.start()
	return w
}

// start starts the replica, anew where it ran.
func (w *world) start() {
	w.Helper()
	if w.stop != nil {
		w.stop()
	}
	builtIn, err := attestors.NewRegistry(jointoken.New())
	if err != nil {
		w.Fatal(err)
	}
	types := configured.BuiltIn()
	types["external"] = configured.Type{Rules: configured.RulesOptional, New: testType}
	types["x509pop"] = configured.Type{New: testType} // no attestor of its own type: for names that it must not take
	w.metrics = prometheus.NewRegistry()
	if w.set, err = attestorset.New(attestorset.Config{
		DB: w.service, BuiltIn: builtIn, Types: types, Replica: "replica-1", Logger: slog.New(slog.NewTextHandler(w.log, nil)), Metrics: w.metrics,
	}); err != nil {
		w.Fatal(err)
	}
	if _, found := w.set.Find(""); found || w.set.Ready() == nil {
		w.Error("an attestor is found before the configurations were read")
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); w.set.Run(ctx) }()
	w.stop = sync.OnceFunc(func() { cancel(); <-done })
	w.Cleanup(w.stop)
	w.eventually("ready", func() error { return w.set.Ready() })
}

func (w *world) exec(db *pgxpool.Pool, sql string, args ...any) {
	w.Helper()
	if _, err := db.Exec(w.Context(), sql, args...); err != nil {
		w.Fatal(err)
	}
}

// publish publishes a configuration as the manager does, and returns its version.
func (w *world) publish(name, spec string) (version int64) {
	w.Helper()
	if err := w.manager.QueryRow(w.Context(), `INSERT INTO attestor_configs (name, spec, object_uid, object_generation) VALUES ($1, $2, 'u', 1)
	  ON CONFLICT (name) DO UPDATE SET spec = excluded.spec, version = nextval('attestor_config_versions') RETURNING version`, name, "{"+spec+"}").Scan(&version); err != nil {
		w.Fatal(err)
	}
	return version
}

func external(url string) string {
	return fmt.Sprintf(`"type": "external", "external": {"url": %q, "allowedTenants": ["factory"]}, "roles": ["node"]`, url)
}

func (w *world) eventually(what string, check func() error) {
	w.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			w.Fatalf("%s: %v", what, err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// admits waits until the attestor admits what its version says.
func (w *world) admits(name, url string, version int64) *attestors.Attestor {
	w.Helper()
	var a *attestors.Attestor
	w.eventually(name, func() error {
		var found bool
		if a, found = w.set.Find(name); !found {
			return fmt.Errorf("not found")
		}
		if want := fmt.Sprintf("1+%d", version); a.Version() != want {
			return fmt.Errorf("version %s, want %s", a.Version(), want)
		}
		return nil
	})
	w.verifies(a, url)
	return a
}

func (w *world) verifies(a *attestors.Attestor, url string) {
	w.Helper()
	out, err := a.Verify(w.Context(), attestors.Evidence{}, &attestors.JoinContext{})
	if admit, ok := out.(*attestors.Admit); err != nil || !ok || string(admit.Subject) != url {
		w.Errorf("it admits %v, %v; want %s", out, err, url)
	}
}

// reports waits until the replica's row says so.
func (w *world) reports(want string) {
	w.Helper()
	w.eventually("report", func() error {
		var same bool
		var got string
		if err := w.admin.QueryRow(w.Context(), `SELECT attestors = $1::jsonb, attestors::text FROM replicas WHERE id = 'replica-1'`, want).Scan(&same, &got); err != nil {
			return err
		}
		if !same {
			return fmt.Errorf("it reports %s, want %s", got, want)
		}
		return nil
	})
}

func (w *world) metric(want string) {
	w.Helper()
	w.eventually("metric", func() error {
		return testutil.GatherAndCompare(w.metrics, strings.NewReader(want), "join_attestor_config_version", "join_attestor_config_failed")
	})
}

func gauges(version, failed int64) string {
	return fmt.Sprintf(`
# HELP join_attestor_config_failed 1 where this replica could not build the newest version of an AttestorConfig.
# TYPE join_attestor_config_failed gauge
join_attestor_config_failed{attestor="verify"} %d
# HELP join_attestor_config_version The version of each AttestorConfig that this replica decides by; 0 where it could build none.
# TYPE join_attestor_config_version gauge
join_attestor_config_version{attestor="verify"} %d
`, failed, version)
}

func TestAChangeIsInForceWithoutARestart(t *testing.T) {
	w := newWorld(t)
	if _, found := w.set.Find("verify"); found {
		t.Error("nobody configured it")
	}
	if a, found := w.set.Find(""); !found || a.ID() != attestors.DefaultID {
		t.Error("the built-in is not found")
	}
	first := w.publish("verify", external("one"))
	old := w.admits("verify", "one", first)
	w.reports(fmt.Sprintf(`{"verify": {"version": %d}}`, first))
	w.metric(gauges(first, 0))

	second := w.publish("verify", external("two"))
	if second <= first {
		t.Errorf("version %d follows %d", second, first)
	}
	w.admits("verify", "two", second)
	w.verifies(old, "one") // a join goes on with what it found
	w.reports(fmt.Sprintf(`{"verify": {"version": %d}}`, second))
	w.metric(gauges(second, 0))

	w.exec(w.manager, `DELETE FROM attestor_configs WHERE name = 'verify'`)
	w.eventually("withdrawn", func() error {
		if _, found := w.set.Find("verify"); found {
			return fmt.Errorf("it is still found")
		}
		return nil
	})
	w.reports(`{}`)
	w.metric("")
	// A name that comes again has a version that there never was.
	if third := w.publish("verify", external("one")); third <= second {
		t.Errorf("version %d after %d was withdrawn", third, second)
	} else {
		w.admits("verify", "one", third)
	}
}

func TestTheLastGoodVersionStaysInForce(t *testing.T) {
	w := newWorld(t)
	good := w.publish("verify", external("one"))
	w.admits("verify", "one", good)
	for _, c := range []struct{ url, says string }{{"wrong", "spec.external.url: it is wrong"}, {"panic", "its type panicked"}} {
		bad := w.publish("verify", external(c.url))
		w.metric(gauges(good, 1))
		w.admits("verify", "one", good)
		w.eventually("report", func() error {
			var version, failed, length int64
			var says string
			err := w.admin.QueryRow(t.Context(), `SELECT (v->>'version')::bigint, (v->>'failed')::bigint, v->>'error', length(v->>'error')
			  FROM (SELECT attestors->'verify' AS v FROM replicas WHERE id = 'replica-1') r`).Scan(&version, &failed, &says, &length)
			if err != nil || version != good || failed != bad || !strings.Contains(says, c.says) || length > 510 {
				return fmt.Errorf("%d, %d, %s (%d), %v", version, failed, says, length, err)
			}
			return nil
		})
		if strings.Contains(w.log.String(), "secret") {
			t.Error("the log quotes a panic's value")
		}
	}
	if n := strings.Count(w.log.String(), "cannot be built"); n != 2 {
		t.Errorf("%d lines about two versions:\n%s", n, w.log)
	}
	next := w.publish("verify", external("two"))
	w.admits("verify", "two", next)
	w.metric(gauges(next, 0))
}

// A built-in must not answer for a configuration that was to narrow it.
func TestWhatCannotBeBuiltIsNobodys(t *testing.T) {
	w := newWorld(t)
	w.publish("join-token", `"type": "joinToken", "joinToken": {}, "roles": ["site"], "mood": "of a newer release"`)
	w.eventually("nobody's", func() error {
		if a, found := w.set.Find(""); found {
			return fmt.Errorf("%s %s is found", a.ID(), a.Version())
		}
		return nil
	})
	version := w.publish("join-token", `"type": "joinToken", "joinToken": {}, "roles": ["site"]`)
	w.eventually("configured", func() error {
		a, found := w.set.Find("")
		if !found || a.Version() != fmt.Sprintf("1+%d", version) || a.Type() != attestors.DefaultID || a.Admits(attestors.RoleNode) {
			return fmt.Errorf("%v", a)
		}
		return nil
	})
	w.exec(w.manager, `DELETE FROM attestor_configs`)
	w.eventually("the built-in again", func() error {
		if a, found := w.set.Find(""); !found || !a.Admits(attestors.RoleNode) {
			return fmt.Errorf("%v", a)
		}
		return nil
	})
	// One that is of another type takes no built-in's place.
	w.publish("join-token", external("one"))
	w.eventually("nobody's", func() error {
		if a, found := w.set.Find(""); found {
			return fmt.Errorf("%s %s is found", a.ID(), a.Version())
		}
		return nil
	})
}

func TestTheDatabaseMayGoAndBeRestored(t *testing.T) {
	w := newWorld(t)
	version := w.publish("verify", external("one"))
	w.admits("verify", "one", version)
	w.exec(w.admin, `ALTER TABLE attestor_configs RENAME TO gone`)
	w.eventually("a warning", func() error {
		if !strings.Contains(w.log.String(), "the last ones stay in force") {
			return fmt.Errorf("%s", w.log)
		}
		return nil
	})
	w.admits("verify", "one", version)
	// The restored database gives the same number to something else.
	w.exec(w.admin, `UPDATE gone SET spec = jsonb_set(spec, '{external,url}', '"two"'), published_at = published_at + interval '1 second'`)
	w.exec(w.admin, `ALTER TABLE gone RENAME TO attestor_configs`)
	w.eventually("the restored one", func() error {
		a, _ := w.set.Find("verify")
		out, err := a.Verify(t.Context(), attestors.Evidence{}, nil)
		if err != nil || string(out.(*attestors.Admit).Subject) != "two" {
			return fmt.Errorf("%v, %v", out, err)
		}
		return nil
	})
	// A replica that starts takes what is there, and its row may come later.
	w.exec(w.service, `DELETE FROM replicas`)
	w.start()
	w.admits("verify", "two", version)
	w.exec(w.service, `INSERT INTO replicas (id, keys) VALUES ('replica-1', '{}')`)
	w.reports(fmt.Sprintf(`{"verify": {"version": %d}}`, version))
}

// The service may not configure itself.
func TestTheServiceReadsConfigurationsAndWritesNone(t *testing.T) {
	w := newWorld(t)
	w.publish("verify", external("one"))
	for _, sql := range []string{
		`INSERT INTO attestor_configs (name, spec, object_uid, object_generation) VALUES ('x', '{}', 'u', 1)`,
		`UPDATE attestor_configs SET spec = '{}'`, `DELETE FROM attestor_configs`, `SELECT nextval('attestor_config_versions')`,
	} {
		if _, err := w.service.Exec(t.Context(), sql); err == nil || !strings.Contains(err.Error(), "permission denied") {
			t.Errorf("%s: %v", sql, err)
		}
	}
}

// A look that finds nothing new takes no transaction id and sends no configuration.
func TestALookThatFindsNothingNewWritesNothing(t *testing.T) {
	w := newWorld(t)
	w.admits("verify", "one", w.publish("verify", external("one")))
	w.stop()
	var before, after string
	if err := w.admin.QueryRow(t.Context(), `SELECT xmin::text FROM replicas WHERE id = 'replica-1'`).Scan(&before); err != nil {
		t.Fatal(err)
	}
	w.start()
	w.admits("verify", "one", 1)
	w.reports(`{"verify": {"version": 1}}`)
	if err := w.admin.QueryRow(t.Context(), `SELECT xmin::text FROM replicas WHERE id = 'replica-1'`).Scan(&after); err != nil {
		t.Fatal(err)
	}
	if before != after {
		t.Error("the replica's row was written though nothing changed")
	}
}
