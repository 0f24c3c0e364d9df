package gateway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"net/url"
	"sync/atomic"
	"time"
)

const (
	// tries is how often a request is sent at most: a join is known by its CSR, so
	// that the same one may reach two replicas.
	tries = 2
	// restFor is how long a replica that gave no answer is asked last, unless a
	// probe finds it ready before.
	restFor = time.Second
	// answerTimeout bounds one try: the service's own limits end it earlier.
	answerTimeout = 12 * time.Second
	// relayTimeout bounds all tries.
	relayTimeout = 20 * time.Second
)

// Upstreams are the replicas of the join service. The one with the least under way
// is asked; one that is not ready or gave no answer is asked last.
type Upstreams struct {
	targets  []target
	identity *Identity
	log      *slog.Logger
	replicas atomic.Pointer[[]*replica]
	turn     atomic.Uint32
}

// target is a configured replica, or a name that stands for several.
type target struct{ host, port string }

// replica is one address.
type replica struct {
	target
	address   string // host:port that is dialled
	transport *http.Transport
	inFlight  atomic.Int64
	restUntil atomic.Int64 // Unix nanoseconds
	health    atomic.Int32
}

// Health, as probes see it.
const (
	unprobed int32 = iota
	ready
	unready
)

// NewUpstreams takes the https URLs of replicas. A URL's host may be a name with
// several addresses, each of which is a replica (see Run).
func NewUpstreams(urls []string, identity *Identity, log *slog.Logger) (*Upstreams, error) {
	if len(urls) == 0 {
		return nil, errors.New("no replica of the join service is given")
	}
	u := &Upstreams{identity: identity, log: log}
	var replicas []*replica
	for _, s := range urls {
		parsed, err := url.Parse(s)
		if err != nil {
			return nil, fmt.Errorf("replica of the join service: %w", err)
		}
		if parsed.Scheme != "https" || parsed.Hostname() == "" || parsed.User != nil || (parsed.Path != "" && parsed.Path != "/") || parsed.RawQuery != "" {
			return nil, fmt.Errorf("replica of the join service: %q is not https://HOST[:PORT]", s)
		}
		t := target{host: parsed.Hostname(), port: parsed.Port()}
		if t.port == "" {
			t.port = "443"
		}
		u.targets = append(u.targets, t)
		replicas = append(replicas, u.newReplica(t, net.JoinHostPort(t.host, t.port)))
	}
	u.replicas.Store(&replicas)
	return u, nil
}

func (u *Upstreams) newReplica(t target, address string) *replica {
	r := &replica{target: t, address: address}
	// HTTP/1.1 over connections that are kept costs the least.
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	r.transport = &http.Transport{
		DialTLSContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return u.identity.dial(ctx, network, r.address, r.host)
		},
		Protocols: protocols, DisableCompression: true,
		MaxIdleConnsPerHost: 1024, IdleConnTimeout: 60 * time.Second,
		ResponseHeaderTimeout: answerTimeout, MaxResponseHeaderBytes: 16 << 10,
	}
	return r
}

// outgoing is a request to the service, ready for any replica.
type outgoing struct {
	method, path, query string
	header              http.Header
	body                []byte
}

func (o *outgoing) to(ctx context.Context, r *replica) *http.Request {
	req := &http.Request{
		Method: o.method, URL: &url.URL{Scheme: "https", Host: r.address, Path: o.path, RawQuery: o.query}, Host: net.JoinHostPort(r.host, r.port),
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Header: o.header,
	}
	if len(o.body) > 0 {
		// With GetBody the transport itself repeats what a closing connection never took.
		req.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(o.body)), nil }
		req.Body, _ = req.GetBody()
		req.ContentLength = int64(len(o.body))
	}
	return req.WithContext(ctx)
}

// Do sends a request, and once more to another replica (where there is one) if it
// was not sent or got no answer. It returns how often it was sent.
func (u *Upstreams) Do(ctx context.Context, o *outgoing) (*answer, int, error) {
	ctx, cancel := context.WithTimeout(ctx, relayTimeout)
	var failed *replica
	var last error
	for n := range tries {
		r := u.pick(failed)
		a, err := r.do(ctx, o)
		if err == nil {
			a.end = cancel
			return a, n + 1, nil
		}
		last = fmt.Errorf("%s: %w", r.address, err)
		if ctx.Err() != nil {
			cancel()
			return nil, n + 1, last
		}
		r.rest()
		failed = r
	}
	cancel()
	return nil, tries, last
}

func (r *replica) do(ctx context.Context, o *outgoing) (*answer, error) {
	r.inFlight.Add(1)
	defer r.inFlight.Add(-1)
	resp, err := r.transport.RoundTrip(o.to(ctx, r))
	if err != nil {
		return nil, err
	}
	return read(resp, o.method)
}

// pick is the replica with the least under way; of equals each in its turn. One
// that failed this request comes last, then those that rest or are not ready.
func (u *Upstreams) pick(failed *replica) *replica {
	replicas := *u.replicas.Load()
	now := time.Now().UnixNano()
	start := int(u.turn.Add(1))
	var best *replica
	least := int64(math.MaxInt64)
	for i := range replicas {
		r := replicas[(start+i)%len(replicas)]
		load := r.inFlight.Load()
		if r.health.Load() == unready || r.restUntil.Load() > now {
			load += 1 << 40
		}
		if r == failed {
			load += 1 << 50
		}
		if load < least {
			best, least = r, load
		}
	}
	return best
}

// rest makes a replica that gave no answer the last choice for a while. What is
// left of its connections is as dead as the one that failed.
func (r *replica) rest() {
	r.restUntil.Store(time.Now().Add(restFor).UnixNano())
	r.transport.CloseIdleConnections()
}

// Ready says whether a replica said that it is.
func (u *Upstreams) Ready() bool {
	n, _ := u.count()
	return n > 0
}

func (u *Upstreams) count() (readyNow, all int) {
	replicas := *u.replicas.Load()
	for _, r := range replicas {
		if r.health.Load() == ready {
			readyNow++
		}
	}
	return readyNow, len(replicas)
}
