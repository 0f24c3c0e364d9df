package outbox

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/better-compute/join-operator/test/pgtest"
)

// follower is a controller that counts what it hears.
type follower struct {
	mu         sync.Mutex
	heard      map[string]int
	order      []string
	everything int
	fail       int
}

func (f *follower) keys(_ context.Context, events []Event) ([]reconcile.Request, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.fail > 0 {
		f.fail--
		return nil, fmt.Errorf("not now")
	}
	var out []reconcile.Request
	for _, e := range events {
		f.heard[e.NodeID]++
		f.order = append(f.order, e.NodeID)
		out = append(out, reconcile.Request{NamespacedName: types.NamespacedName{Namespace: e.Tenant, Name: e.NodeID}})
	}
	return out, nil
}

func (f *follower) all(context.Context) ([]reconcile.Request, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.everything++
	return []reconcile.Request{{NamespacedName: types.NamespacedName{Name: "all"}}}, nil
}

// follow runs a feed with one follower until the test ends or stop is called.
func follow(t *testing.T, db *pgxpool.Pool, poll time.Duration) (f *follower, q workqueue.TypedRateLimitingInterface[reconcile.Request], stop func()) {
	t.Helper()
	f = &follower{heard: map[string]int{}}
	feed := NewFeed(db, Options{Poll: poll, Logger: slog.New(slog.NewTextHandler(t.Output(), nil))})
	src := feed.Source(Subscription{Keys: f.keys, Everything: f.all})
	q = workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]())
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- feed.Start(ctx) }()
	if err := src.Start(ctx, q); err != nil {
		t.Fatal(err)
	}
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		q.ShutDown()
	})
	t.Cleanup(stop)
	return f, q, stop
}

func (f *follower) await(t *testing.T, check func() error) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for {
		f.mu.Lock()
		err := check()
		f.mu.Unlock()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// hears waits until a node was heard of.
func (f *follower) hears(t *testing.T, node string) {
	t.Helper()
	f.await(t, func() error {
		if f.heard[node] == 0 {
			return fmt.Errorf("%s was not heard of: %v", node, f.order)
		}
		return nil
	})
}

func (f *follower) started(t *testing.T) {
	t.Helper()
	f.await(t, func() error {
		if f.everything == 0 {
			return fmt.Errorf("not started")
		}
		return nil
	})
}

func exec(t *testing.T, db interface {
	Exec(context.Context, string, ...any) (tag, error)
}, sql string, args ...any) {
	t.Helper()
	if _, err := db.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

const insertEvent = `INSERT INTO events (type, tenant, node_id) VALUES ('node.joined', 't', $1)`

func TestEventsAreHeardOnceAndAtOnce(t *testing.T) {
	d := pgtest.New(t)
	admin := d.Pool(t, pgtest.Admin)
	// So long that only a NOTIFY explains that it is heard.
	f, q, stop := follow(t, d.Pool(t, pgtest.Manager), time.Hour)
	f.started(t)
	exec(t, admin, insertEvent, "n-1")
	exec(t, admin, "NOTIFY join_events")
	f.hears(t, "n-1")
	if n := q.Len(); n != 2 { // everything, and this one
		t.Errorf("%d keys in the queue, want 2", n)
	}
	stop()
	// What came while nobody followed is heard, what was heard is not heard again.
	exec(t, admin, insertEvent, "n-2")
	f, _, _ = follow(t, d.Pool(t, pgtest.Manager), time.Hour)
	f.hears(t, "n-2")
	if f.heard["n-1"] != 0 || f.everything != 1 {
		t.Errorf("heard %v, everything %d times", f.heard, f.everything)
	}
}

func TestALostNotifyIsFoundByThePoll(t *testing.T) {
	d := pgtest.New(t)
	f, _, _ := follow(t, d.Pool(t, pgtest.Manager), 20*time.Millisecond)
	f.started(t)
	exec(t, d.Pool(t, pgtest.Admin), insertEvent, "n-1")
	f.hears(t, "n-1")
}

// A row whose transaction began first and commits last must not be skipped.
func TestALateCommitIsNotSkipped(t *testing.T) {
	d := pgtest.New(t)
	admin := d.Pool(t, pgtest.Admin)
	f, _, _ := follow(t, d.Pool(t, pgtest.Manager), 20*time.Millisecond)
	f.started(t)
	late, err := admin.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	exec(t, late, insertEvent, "n-late")
	exec(t, admin, insertEvent, "n-early") // a higher id, committed first
	exec(t, admin, "NOTIFY join_events")
	for range 20 { // looks of the follower
		f.mu.Lock()
		if len(f.order) != 0 {
			t.Errorf("heard %v while an older transaction runs", f.order)
		}
		f.mu.Unlock()
		time.Sleep(5 * time.Millisecond)
	}
	if err := late.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.hears(t, "n-early")
	f.hears(t, "n-late")
	if f.heard["n-late"] != 1 || f.heard["n-early"] != 1 {
		t.Errorf("heard %v", f.heard)
	}
}

func TestAFailedDeliveryComesAgain(t *testing.T) {
	d := pgtest.New(t)
	f, _, _ := follow(t, d.Pool(t, pgtest.Manager), 20*time.Millisecond)
	f.started(t)
	f.mu.Lock()
	f.fail = 1
	f.mu.Unlock()
	exec(t, d.Pool(t, pgtest.Admin), insertEvent, "n-1")
	f.hears(t, "n-1")
}

// A restore brings events that another system's transactions numbered, and a
// cursor that means nothing here.
func TestStartsOverAfterARestore(t *testing.T) {
	d := pgtest.New(t)
	admin := d.Pool(t, pgtest.Admin)
	exec(t, admin, `INSERT INTO events (type, tenant, node_id, xid) VALUES ('node.joined', 't', 'n-foreign', '9000000000000')`)
	exec(t, admin, `INSERT INTO cursors (name, system, xid, id) VALUES ('manager', 'another', '8000000000000', 7)`)
	f, q, _ := follow(t, d.Pool(t, pgtest.Manager), 20*time.Millisecond)
	f.started(t)
	exec(t, admin, insertEvent, "n-new")
	f.hears(t, "n-new")
	if f.heard["n-foreign"] != 0 || q.Len() < 2 {
		t.Errorf("heard %v, %d keys", f.heard, q.Len())
	}
	var left int
	if err := admin.QueryRow(t.Context(), `SELECT count(*) FROM events WHERE node_id = 'n-foreign'`).Scan(&left); err != nil || left != 0 {
		t.Errorf("%d foreign events are left (%v)", left, err)
	}
}

func TestTheDatabaseMayComeAndGo(t *testing.T) {
	s := pgtest.NewServer(t)
	d := pgtest.New(t, pgtest.OnServer(s))
	f, _, _ := follow(t, d.Pool(t, pgtest.Manager), 20*time.Millisecond)
	f.started(t)
	s.Kill()
	s.Start(t)
	admin := d.Pool(t, pgtest.Admin)
	exec(t, admin, insertEvent, "n-1")
	f.hears(t, "n-1")
}

func TestManyEventsComeInBatches(t *testing.T) {
	d := pgtest.New(t)
	admin := d.Pool(t, pgtest.Admin)
	f, _, _ := follow(t, d.Pool(t, pgtest.Manager), 20*time.Millisecond)
	f.started(t)
	exec(t, admin, `INSERT INTO events (type, tenant, node_id) SELECT 'node.joined', 't', 'n-' || i FROM generate_series(1, 3456) AS i`)
	f.hears(t, "n-3456")
	if len(f.order) != 3456 || f.order[0] != "n-1" {
		t.Errorf("heard %d events, the first %s", len(f.order), f.order[0])
	}
}

func TestEveryReadUsesAnIndex(t *testing.T) {
	d := pgtest.New(t)
	admin := d.Pool(t, pgtest.Admin)
	exec(t, admin, `INSERT INTO events (type, tenant, node_id) SELECT 'node.joined', 't', 'n-' || i FROM generate_series(1, 20000) AS i`)
	exec(t, admin, `ANALYZE events`)
	for _, q := range []struct {
		sql  string
		args []any
	}{{readSQL, []any{5, 5, 1000}}, {overtakableSQL, nil}} {
		rows, err := admin.Query(t.Context(), "EXPLAIN "+q.sql, append([]any{pgx.QueryExecModeSimpleProtocol}, q.args...)...)
		if err != nil {
			t.Fatal(err)
		}
		var plan string
		for rows.Next() {
			var line string
			if err := rows.Scan(&line); err != nil {
				t.Fatal(err)
			}
			plan += line + "\n"
		}
		if rows.Err() != nil || contains(plan, "Seq Scan") || !contains(plan, "events_cursor") {
			t.Errorf("%v\n%s", rows.Err(), plan)
		}
	}
}
