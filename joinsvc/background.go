package joinsvc

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"
)

const (
	// askedEvery is how old last_asked_at gets before it is written anew.
	askedEvery = 10 * time.Minute
	// flushEvery is how often what a replica collected is written.
	flushEvery = 5 * time.Second
	// flushTimeout bounds the last writing when a replica ends.
	flushTimeout = 3 * time.Second
	// statementTimeout bounds one statement of the background.
	statementTimeout = 5 * time.Second
	// notifyEvery bounds a replica's notifications: commits in between share one.
	notifyEvery = 50 * time.Millisecond
)

// Run does what joins leave for later, until ctx ends: it records refusals, notes
// which machines still ask, notifies the controllers, counts who waits, and
// watches whether the database answers. What is left is written before it returns.
func (s *Service) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return s.refusals.run(ctx, s) })
	g.Go(func() error { return s.notifier.run(ctx, s) })
	g.Go(func() error { return s.health.run(ctx, s.db) })
	g.Go(func() error { return s.flush(ctx) })
	return g.Wait()
}

// flush counts who waits and writes who asked, now and then and at the end.
func (s *Service) flush(ctx context.Context) error {
	tick := time.NewTicker(flushEvery)
	defer tick.Stop()
	for {
		s.inBackground(ctx, "count the machines that wait", func(ctx context.Context) error { return s.waiting.refresh(ctx, s.db) })
		s.inBackground(ctx, "note which machines still ask", func(ctx context.Context) error { return s.seen.write(ctx, s.db) })
		select {
		case <-tick.C:
		case <-ctx.Done():
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTimeout)
			defer cancel()
			s.inBackground(last, "note which machines still ask", func(ctx context.Context) error { return s.seen.write(ctx, s.db) })
			return nil
		}
	}
}

// inBackground runs a statement whose failure is logged and made good by the next one.
func (s *Service) inBackground(ctx context.Context, what string, f func(context.Context) error) {
	if s.health.err() != nil {
		return
	}
	short, cancel := s.health.context(ctx, statementTimeout)
	defer cancel()
	if err := f(short); err != nil && ctx.Err() == nil {
		s.log.WarnContext(ctx, "could not "+what, "error", err)
	}
}

// askedLog collects which requests were asked for.
type askedLog struct {
	mu  sync.Mutex
	ids map[string]struct{}
}

// maxAsked bounds what is collected between two writings; who is left out is
// noted at a later poll.
const maxAsked = 10_000

func (l *askedLog) add(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ids == nil {
		l.ids = map[string]struct{}{}
	}
	if len(l.ids) < maxAsked {
		l.ids[id] = struct{}{}
	}
}

func (l *askedLog) write(ctx context.Context, db *pgxpool.Pool) error {
	l.mu.Lock()
	ids := l.ids
	l.ids = nil
	l.mu.Unlock()
	if len(ids) == 0 {
		return nil
	}
	list := make([]string, 0, len(ids))
	for id := range ids {
		list = append(list, id)
	}
	slices.Sort(list) // several replicas lock in one order
	_, err := db.Exec(ctx, askedSQL, list, askedEvery)
	return err
}

// waitingCount is a replica's idea of how many machines wait.
type waitingCount struct{ waiting, rows atomic.Int64 }

func (w *waitingCount) undecided() int64 { return w.waiting.Load() }
func (w *waitingCount) live() int64      { return w.rows.Load() }

func (w *waitingCount) add() {
	w.waiting.Add(1)
	w.rows.Add(1)
}

func (w *waitingCount) refresh(ctx context.Context, db *pgxpool.Pool) error {
	var waiting, live int64
	if err := db.QueryRow(ctx, waitingSQL).Scan(&waiting, &live); err != nil {
		return err
	}
	w.waiting.Store(waiting)
	w.rows.Store(live)
	return nil
}

// notifier tells the controllers that something was committed. No join's own
// transaction does, since Postgres serialises the commits of those that do.
type notifier struct{ wake chan struct{} }

func (n *notifier) init() { n.wake = make(chan struct{}, 1) }

// Channel is what controllers listen to.
const Channel = "join_events"

func (n *notifier) notify() {
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

func (n *notifier) run(ctx context.Context, s *Service) error {
	for {
		select {
		case <-n.wake:
		case <-ctx.Done():
			return nil
		}
		s.inBackground(ctx, "notify the controllers, who look for themselves every few seconds", func(ctx context.Context) error {
			_, err := s.db.Exec(ctx, `SELECT pg_notify($1, '')`, Channel)
			return err
		})
		select {
		case <-time.After(notifyEvery):
		case <-ctx.Done():
			return nil
		}
	}
}
