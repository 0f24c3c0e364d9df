package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
)

const (
	// batch bounds what one read holds in memory.
	batch = 1000
	// overtakableWait is how soon to look again for an event that is committed
	// while an older transaction still runs.
	overtakableWait = 50 * time.Millisecond
	// retryWait is the pause after the database failed.
	retryWait = time.Second
	// defaultPoll is how long a lost NOTIFY can go unnoticed.
	defaultPoll = 5 * time.Second
	// defaultFullPass is how long anything else can go unnoticed.
	defaultFullPass = 30 * time.Minute
)

// Options of a Feed.
type Options struct {
	// Name of the cursor's row; "manager" by default.
	Name string
	// Poll is the longest wait between two looks; 5 s by default.
	Poll time.Duration
	// FullPass is how often every controller looks at everything, as it does at
	// the start; 30 min by default.
	FullPass time.Duration
	// Logger is required.
	Logger *slog.Logger
	// Metrics registers what is counted, where it is not nil.
	Metrics prometheus.Registerer
}

// Feed follows the outbox for all controllers of the process: one connection,
// one cursor. Add it to the manager after all controllers subscribed; it runs on
// the leader only.
type Feed struct {
	db   *pgxpool.Pool
	opts Options

	mu            sync.Mutex
	subscriptions []*subscription
	observers     []Observer

	fullPass time.Time // when everything was looked at last

	delivered prometheus.Counter
	newest    prometheus.Gauge
}

// Observer is shown every event, and an empty batch at least once in each poll,
// for work that is put off. A failure makes the feed deliver the batch again.
type Observer func(ctx context.Context, events []Event) error

// Observe adds an observer, before Start.
func (f *Feed) Observe(o Observer) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.observers = append(f.observers, o)
}

// Subscription says what a controller wants to hear of.
type Subscription struct {
	// Keys turns a batch of events into the objects to reconcile. A failure makes
	// the feed deliver the batch again.
	Keys func(ctx context.Context, events []Event) ([]reconcile.Request, error)
	// Everything returns all objects to look at, those that only rows know of
	// included: at the start, now and then, and after the database was restored or
	// moved, when the events in between are unknown. Nil means none.
	Everything func(ctx context.Context) ([]reconcile.Request, error)
	// Coalesce delays a key, so that many events about one object cost one look.
	Coalesce time.Duration
}

type subscription struct {
	Subscription
	started chan struct{}
	queue   workqueue.TypedRateLimitingInterface[reconcile.Request]
}

// NewFeed makes a feed that reads with db.
func NewFeed(db *pgxpool.Pool, o Options) *Feed {
	if o.Name == "" {
		o.Name = "manager"
	}
	if o.Poll == 0 {
		o.Poll = defaultPoll
	}
	if o.FullPass == 0 {
		o.FullPass = defaultFullPass
	}
	f := &Feed{
		db: db, opts: o,
		delivered: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "join_outbox_events_total", Help: "Events that the controllers were told of.",
		}),
		newest: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "join_outbox_newest_event_timestamp_seconds", Help: "The database's time of the newest event that the controllers were told of.",
		}),
	}
	if o.Metrics != nil {
		o.Metrics.MustRegister(f.delivered, f.newest)
	}
	return f
}

// Source is a source for a controller (builder.WatchesRawSource). The feed waits
// until every source that it gave out was started, so that no controller misses
// an event.
func (f *Feed) Source(s Subscription) source.Source {
	sub := &subscription{Subscription: s, started: make(chan struct{})}
	f.mu.Lock()
	f.subscriptions = append(f.subscriptions, sub)
	f.mu.Unlock()
	return source.Func(func(_ context.Context, q workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		sub.queue = q
		close(sub.started)
		return nil
	})
}

// NeedLeaderElection is true: two followers would move one cursor.
func (f *Feed) NeedLeaderElection() bool { return true }

// Start follows the outbox until ctx ends. The database may come and go.
func (f *Feed) Start(ctx context.Context) error {
	f.mu.Lock()
	subs := f.subscriptions
	f.mu.Unlock()
	for _, s := range subs {
		select {
		case <-s.started:
		case <-ctx.Done():
			return nil
		}
	}
	for {
		err := f.follow(ctx, subs)
		if ctx.Err() != nil {
			return nil //nolint:nilerr // it ends because it was told to
		}
		f.opts.Logger.WarnContext(ctx, "the outbox cannot be followed; trying again", "error", err)
		select {
		case <-time.After(retryWait):
		case <-ctx.Done():
			return nil
		}
	}
}

// follow reads until something fails.
func (f *Feed) follow(ctx context.Context, subs []*subscription) error {
	conn, err := f.db.Acquire(ctx)
	if err != nil {
		return err
	}
	// A connection that listens is not given back to the pool.
	listener := conn.Hijack()
	defer listener.Close(context.WithoutCancel(ctx))
	if _, err := listener.Exec(ctx, "LISTEN "+Channel); err != nil {
		return fmt.Errorf("listen for events: %w", err)
	}
	p, err := f.resume(ctx, subs)
	if err != nil {
		return err
	}
	for {
		h, err := readHorizon(ctx, f.db)
		if err != nil {
			return err
		}
		if h.system != p.system || p.xid > h.xmin {
			return errors.New("the database was exchanged")
		}
		if time.Since(f.fullPass) > f.opts.FullPass {
			if err := f.everything(ctx, subs); err != nil {
				return err
			}
		}
		if p, err = f.drain(ctx, subs, p); err != nil {
			return err
		}
		soon, err := overtakable(ctx, f.db)
		if err != nil {
			return err
		}
		wait := f.opts.Poll
		if soon {
			wait = overtakableWait
		}
		waiting, cancel := context.WithTimeout(ctx, wait)
		_, err = listener.WaitForNotification(waiting)
		timedOut := waiting.Err() != nil
		cancel()
		if err != nil && !timedOut {
			return fmt.Errorf("wait for events: %w", err)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

// resume finds where to go on. Where there is no place in this database system,
// the controllers start over from the rows, and events from now on count.
func (f *Feed) resume(ctx context.Context, subs []*subscription) (position, error) {
	h, err := readHorizon(ctx, f.db)
	if err != nil {
		return position{}, err
	}
	p, found, err := loadCursor(ctx, f.db, f.opts.Name)
	if err != nil {
		return position{}, err
	}
	if found && p.system == h.system && p.xid <= h.xmin {
		return p, nil
	}
	if found {
		f.opts.Logger.WarnContext(ctx, "the database was restored or moved: starting over from the rows",
			"was", p.system, "is", h.system)
		if err := dropForeign(ctx, f.db); err != nil {
			return position{}, err
		}
	}
	if err := f.everything(ctx, subs); err != nil {
		return position{}, err
	}
	p = position{system: h.system, xid: h.xmin}
	return p, saveCursor(ctx, f.db, f.opts.Name, p)
}

// everything has all controllers look at all there is.
func (f *Feed) everything(ctx context.Context, subs []*subscription) error {
	for _, s := range subs {
		if s.Everything == nil {
			continue
		}
		keys, err := s.Everything(ctx)
		if err != nil {
			return fmt.Errorf("look at everything: %w", err)
		}
		for _, k := range keys {
			s.queue.Add(k)
		}
	}
	f.fullPass = time.Now()
	return nil
}

// drain delivers all that can be read, and stores the cursor after each batch:
// who is killed in between delivers a batch twice, never not at all.
func (f *Feed) drain(ctx context.Context, subs []*subscription, p position) (position, error) {
	for {
		events, err := readEvents(ctx, f.db, p, batch)
		if err != nil {
			return p, err
		}
		for _, observe := range f.observers {
			if err := observe(ctx, events); err != nil {
				return p, err
			}
		}
		if len(events) == 0 {
			return p, nil
		}
		for _, s := range subs {
			keys, err := s.Keys(ctx, events)
			if err != nil {
				return p, err
			}
			for _, k := range keys {
				if s.Coalesce > 0 {
					s.queue.AddAfter(k, s.Coalesce)
				} else {
					s.queue.Add(k)
				}
			}
		}
		last := events[len(events)-1]
		f.delivered.Add(float64(len(events)))
		f.newest.Set(float64(last.At.Unix()))
		p.xid, p.id = last.XID, last.ID
		if err := saveCursor(ctx, f.db, f.opts.Name, p); err != nil {
			return p, err
		}
		if len(events) < batch {
			return p, nil
		}
	}
}
