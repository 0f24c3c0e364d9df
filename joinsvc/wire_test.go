package joinsvc_test

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/better-compute/join-operator/joinsvc"
	"github.com/better-compute/join-operator/joinsvc/rows"
	"github.com/better-compute/join-operator/test/pgtest"
)

// line counts the round trips of a service's connections to the database, and
// cuts them off where a test says so.
type line struct {
	trips atomic.Int64
	mu    sync.Mutex
	// cut is asked before each packet is sent: cutBefore loses it, cutAfter delivers
	// it and loses the answer.
	cut func(packet []byte) cutting
}

type cutting int

const (
	keep cutting = iota
	cutBefore
	cutAfter
	// swallow is a network that delivers nothing and says nothing.
	swallow
)

func (l *line) ask(packet []byte) cutting {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cut == nil {
		return keep
	}
	return l.cut(packet)
}

func (l *line) setCut(f func([]byte) cutting) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cut = f
}

// onLine has a service use connections through a line, so many at most.
func (s *system) onLine(l *line, conns int32) serviceOption {
	s.Helper()
	pool, err := rows.Open(context.Background(), s.db.URL(pgtest.Service), rows.Options{MaxConns: conns})
	s.must(err)
	cfg := pool.Config()
	pool.Close()
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &tapped{Conn: c, line: l}, nil
	}
	pool, err = pgxpool.NewWithConfig(context.Background(), cfg)
	s.must(err)
	return func(c *joinsvc.Config) { c.DB = pool }
}

// tapped is one connection: what is read after something was written ends a round
// trip.
type tapped struct {
	net.Conn
	line    *line
	pending atomic.Bool
}

func (t *tapped) Write(b []byte) (int, error) {
	t.pending.Store(true)
	switch t.line.ask(b) {
	case swallow:
		time.AfterFunc(3*time.Second, func() { t.Close() }) // or the driver waits long for a farewell
		return len(b), nil
	case cutBefore:
		t.Close()
		return 0, net.ErrClosed
	case cutAfter:
		n, err := t.Conn.Write(b)
		// Give the server what it was sent: half-close, then lose what it answers.
		if tcp, ok := t.Conn.(*net.TCPConn); ok {
			_ = tcp.CloseWrite()
			for buf := make([]byte, 4096); ; {
				if _, err := tcp.Read(buf); err != nil {
					break
				}
			}
		}
		t.Close()
		return n, err
	}
	return t.Conn.Write(b)
}

func (t *tapped) Read(b []byte) (int, error) {
	n, err := t.Conn.Read(b)
	if n > 0 && t.pending.CompareAndSwap(true, false) {
		t.line.trips.Add(1)
	}
	return n, err
}
