package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// restFor is how long a replica that did not answer is tried last.
const restFor = 2 * time.Second

// upstreamTimeout bounds one attempt: the service's own limits end it earlier.
const upstreamTimeout = 15 * time.Second

// Upstreams are the replicas of the join service.
type Upstreams struct {
	replicas []*replica
	client   *http.Client
}

type replica struct {
	base      string
	inFlight  atomic.Int64
	mu        sync.Mutex
	restUntil time.Time
}

// NewUpstreams relays to base URLs with a client certificate. Connections are
// kept and reused, as HTTP/1.1: it costs the least CPU.
func NewUpstreams(bases []string, tlsConfig *tls.Config) (*Upstreams, error) {
	if len(bases) == 0 {
		return nil, errors.New("no replica of the join service is given")
	}
	u := &Upstreams{client: &http.Client{
		Transport: &http.Transport{
			TLSClientConfig: tlsConfig, MaxIdleConns: 0, MaxIdleConnsPerHost: 1024, IdleConnTimeout: 90 * time.Second,
			TLSHandshakeTimeout: 5 * time.Second, ResponseHeaderTimeout: upstreamTimeout, DisableCompression: true,
			Protocols: http1(),
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
	for _, b := range bases {
		u.replicas = append(u.replicas, &replica{base: b})
	}
	return u, nil
}

func http1() *http.Protocols {
	p := new(http.Protocols)
	p.SetHTTP1(true)
	return p
}

// Do sends a request to the replica with the least under way. One that cannot be
// reached or breaks off is rested, and the next one is asked: the same request may
// be sent twice, since joins are known by their CSR.
func (u *Upstreams) Do(ctx context.Context, build func(ctx context.Context, base string) (*http.Request, error)) (*http.Response, error) {
	var last error
	tried := map[*replica]bool{}
	for range min(len(u.replicas), 3) {
		r := u.pick(tried)
		if r == nil {
			break
		}
		tried[r] = true
		req, err := build(ctx, r.base)
		if err != nil {
			return nil, err
		}
		r.inFlight.Add(1)
		resp, err := u.client.Do(req)
		r.inFlight.Add(-1)
		if err == nil {
			return resp, nil
		}
		last = err
		if ctx.Err() != nil {
			return nil, err
		}
		r.rest()
	}
	return nil, last
}

// pick is the replica with the least under way of those not tried; rested ones last.
func (u *Upstreams) pick(tried map[*replica]bool) *replica {
	now := time.Now()
	var best *replica
	bestRests := true
	for _, r := range u.replicas {
		if tried[r] {
			continue
		}
		rests := r.rests(now)
		if best == nil || (bestRests && !rests) || (bestRests == rests && r.inFlight.Load() < best.inFlight.Load()) {
			best, bestRests = r, rests
		}
	}
	return best
}

func (r *replica) rest() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.restUntil = time.Now().Add(restFor)
}

func (r *replica) rests(now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return now.Before(r.restUntil)
}
