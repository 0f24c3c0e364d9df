package joinsvc

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	probeEvery = 200 * time.Millisecond
	// probeTimeout with probeEvery keeps every answer to a dead database within a second.
	probeTimeout = 400 * time.Millisecond
)

// health watches whether the database answers, so that joins fail at once while
// it does not, instead of each waiting for its own timeout. A probe that fails
// proves nothing while joins are answered: then the machine is only busy.
type health struct {
	answered atomic.Int64 // when a join's statement was answered last, Unix nanoseconds
	mu       sync.Mutex
	cause    error
	// alive ends when the database stops answering.
	alive context.Context
	kill  context.CancelFunc
}

func (h *health) init() { h.alive, h.kill = context.WithCancel(context.Background()) }

// Ready says why the service cannot decide joins now, or nil.
func (s *Service) Ready() error { return s.health.err() }

func (h *health) err() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.cause
}

// lives notes that the database answered.
func (h *health) lives() { h.answered.Store(time.Now().UnixNano()) }

// context is one that ends after d, and early when the database stops answering.
func (h *health) context(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	h.mu.Lock()
	alive := h.alive
	h.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, d)
	stop := context.AfterFunc(alive, cancel)
	return ctx, func() {
		stop()
		cancel()
	}
}

// run probes over a connection of its own: one of the pool's would have to be
// waited for while joins use all of them, which is no sign of death.
func (h *health) run(ctx context.Context, pool *pgxpool.Pool) error {
	var conn *pgx.Conn
	defer func() {
		if conn != nil {
			_ = conn.Close(context.Background())
		}
	}()
	tick := time.NewTicker(probeEvery)
	defer tick.Stop()
	for {
		var err error
		if conn, err = probe(ctx, conn, pool); ctx.Err() != nil {
			return nil
		}
		if err == nil || time.Since(time.Unix(0, h.answered.Load())) > probeTimeout {
			h.set(err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// probe asks the database for an answer, over a new connection where the old one
// failed. It returns the connection to use the next time.
func probe(ctx context.Context, conn *pgx.Conn, pool *pgxpool.Pool) (*pgx.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	if conn == nil || conn.IsClosed() {
		var err error
		if conn, err = pgx.ConnectConfig(ctx, pool.Config().ConnConfig); err != nil {
			return nil, err
		}
	}
	return conn, conn.Ping(ctx)
}

func (h *health) set(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case err != nil && h.cause == nil:
		h.kill()
	case err == nil && h.cause != nil:
		h.init()
	}
	h.cause = nil
	if err != nil {
		h.cause = fmt.Errorf("the database does not answer: %w", err)
	}
}
