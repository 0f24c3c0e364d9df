package gateway

import (
	"container/list"
	"net/netip"
	"sync"
	"time"
)

// Limiter keeps a bucket for each source: an IPv4 address, or the /64 of an IPv6
// one. A bucket is spent by what it counts (refusals, or requests) and refills
// with time. It keeps the buckets of at most maxSources sources; the one that was
// full the longest is forgotten first, which forgets nothing.
type Limiter struct {
	burst, rate float64
	now         func() time.Time

	mu      sync.Mutex
	buckets map[netip.Prefix]*list.Element
	recent  *list.List
}

const maxSources = 100_000

type bucket struct {
	source netip.Prefix
	left   float64
	at     time.Time
}

// NewLimiter makes a limiter of burst, refilled at rate a second.
func NewLimiter(burst, rate float64) *Limiter {
	return &Limiter{burst: burst, rate: rate, now: time.Now, buckets: map[netip.Prefix]*list.Element{}, recent: list.New()}
}

func key(a netip.Addr) netip.Prefix {
	bits := 64
	if a.Is4() {
		bits = 32
	}
	p, err := a.Prefix(bits)
	if err != nil {
		return netip.Prefix{}
	}
	return p
}

// Wait is how long a source must wait, or zero. With spend it takes one at once.
func (l *Limiter) Wait(a netip.Addr, spend bool) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	e, ok := l.buckets[key(a)]
	if !ok {
		if !spend {
			return 0 // a source that was never refused has no bucket
		}
		e = l.add(key(a))
	}
	b := l.refill(e)
	if b.left < 1 {
		return time.Duration((1 - b.left) / l.rate * float64(time.Second))
	}
	if spend {
		b.left--
	}
	return 0
}

// Spend takes one from a source's bucket, which may go below nothing.
func (l *Limiter) Spend(a netip.Addr) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e, ok := l.buckets[key(a)]
	if !ok {
		e = l.add(key(a))
	}
	l.refill(e).left--
}

func (l *Limiter) add(k netip.Prefix) *list.Element {
	for len(l.buckets) >= maxSources {
		oldest := l.recent.Back()
		delete(l.buckets, oldest.Value.(*bucket).source)
		l.recent.Remove(oldest)
	}
	e := l.recent.PushFront(&bucket{source: k, left: l.burst, at: l.now()})
	l.buckets[k] = e
	return e
}

func (l *Limiter) refill(e *list.Element) *bucket {
	b := e.Value.(*bucket)
	now := l.now()
	b.left = min(l.burst, b.left+now.Sub(b.at).Seconds()*l.rate)
	b.at = now
	l.recent.MoveToFront(e)
	return b
}
