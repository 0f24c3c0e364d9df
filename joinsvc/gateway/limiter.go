package gateway

import (
	"container/list"
	"errors"
	"net/netip"
	"sync"
	"time"
)

// Limiter keeps a bucket for each source: an IPv4 address, or the /64 of an IPv6
// one. A bucket is spent by what it counts (refusals, or requests) and refills
// with time; a source that has spent nothing has none. It keeps the buckets of at
// most maxSources sources (some 20 MB) and beyond that forgets the one that was
// spent from or asked about longest ago.
type Limiter struct {
	burst, rate float64
	now         func() time.Time

	mu      sync.Mutex
	buckets map[netip.Prefix]*list.Element
	recent  *list.List // of *bucket, the latest first
}

const maxSources = 100_000

// maxDebt is how far below nothing a bucket may go, in bursts: what was under way
// when it ran out is counted, but nobody is kept out for hours.
const maxDebt = 1

type bucket struct {
	source netip.Prefix
	left   float64
	at     time.Time
}

// NewLimiter makes a limiter of burst, refilled at rate a second. Time is the
// gateway's own clock: nothing is decided by it but who waits.
func NewLimiter(burst, rate float64) (*Limiter, error) {
	if !(burst >= 1) || !(rate > 0) {
		return nil, errors.New("a limit has a burst of at least 1 and a rate above 0")
	}
	return &Limiter{burst: burst, rate: rate, now: time.Now, buckets: map[netip.Prefix]*list.Element{}, recent: list.New()}, nil
}

// Wait is how long a source must wait until there is one in its bucket, or zero.
func (l *Limiter) Wait(a netip.Addr) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	e, ok := l.buckets[network(a)]
	if !ok {
		return 0
	}
	return l.wait(l.refill(e))
}

// Take takes one from a source's bucket, or says how long the source must wait.
func (l *Limiter) Take(a netip.Addr) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	b := l.refill(l.find(network(a)))
	wait := l.wait(b)
	if wait == 0 {
		b.left--
	}
	return wait
}

// Spend takes an amount from a source's bucket, which may go below nothing.
func (l *Limiter) Spend(a netip.Addr, amount float64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	b := l.refill(l.find(network(a)))
	b.left = max(b.left-amount, -maxDebt*l.burst)
}

// Sources is how many buckets there are.
func (l *Limiter) Sources() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.buckets)
}

func (l *Limiter) wait(b *bucket) time.Duration {
	if b.left >= 1 {
		return 0
	}
	return max(time.Nanosecond, time.Duration((1-b.left)/l.rate*float64(time.Second)))
}

func (l *Limiter) find(source netip.Prefix) *list.Element {
	if e, ok := l.buckets[source]; ok {
		return e
	}
	for len(l.buckets) >= maxSources {
		oldest := l.recent.Back()
		delete(l.buckets, oldest.Value.(*bucket).source)
		l.recent.Remove(oldest)
	}
	e := l.recent.PushFront(&bucket{source: source, left: l.burst, at: l.now()})
	l.buckets[source] = e
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
