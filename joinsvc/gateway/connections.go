package gateway

import (
	"net"
	"net/netip"
	"sync"
)

// capped is a listener with a bounded number of connections, in all and of each
// source. When it is full, what comes waits in the kernel's queue: every connection
// has deadlines, so that the queue moves.
type capped struct {
	net.Listener
	slots     slots
	perSource int // 0: no bound
	closed    chan struct{}
	close     sync.Once

	mu     sync.Mutex
	counts map[netip.Prefix]int
}

func newCapped(l net.Listener, limit, perSource int) *capped {
	return &capped{Listener: l, slots: make(slots, limit), perSource: perSource, closed: make(chan struct{}), counts: map[netip.Prefix]int{}}
}

// Accept implements net.Listener.
func (c *capped) Accept() (net.Conn, error) {
	for {
		select {
		case c.slots <- struct{}{}:
		case <-c.closed:
			return nil, net.ErrClosed
		}
		conn, err := c.Listener.Accept()
		if err != nil {
			c.slots.give()
			return nil, err
		}
		source := network(remote(conn.RemoteAddr()))
		if !c.enter(source) {
			_ = conn.Close()
			c.slots.give()
			continue
		}
		return &cappedConn{Conn: conn, left: sync.OnceFunc(func() {
			c.leave(source)
			c.slots.give()
		})}, nil
	}
}

// Close implements net.Listener.
func (c *capped) Close() error {
	c.close.Do(func() { close(c.closed) })
	return c.Listener.Close()
}

func (c *capped) enter(source netip.Prefix) bool {
	if c.perSource == 0 {
		return true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.counts[source] >= c.perSource {
		return false
	}
	c.counts[source]++
	return true
}

func (c *capped) leave(source netip.Prefix) {
	if c.perSource == 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.counts[source]--; c.counts[source] == 0 {
		delete(c.counts, source)
	}
}

// cappedConn gives its place back when it is closed.
type cappedConn struct {
	net.Conn
	left func()
}

// Close implements net.Conn.
func (c *cappedConn) Close() error {
	defer c.left()
	return c.Conn.Close()
}
