// Package gateway faces the internet: it caps, limits and relays. It holds no
// secret of a join; what it sees and can do never suffices for a certificate, a
// token or a forged answer.
package gateway

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"math"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/better-compute/join-operator/api/wire"
)

// sourceHeader tells the join service the machine's address, and idHeader what to
// call the request in its log. The gateway always overwrites both.
const (
	sourceHeader = "X-Forwarded-For"
	idHeader     = "X-Request-Id"
)

// Config of a gateway's handler.
type Config struct {
	Upstreams   *Upstreams
	Refusals    *Limiter // spent by refusals
	Requests    *Limiter // spent by renewals and polls
	TrustedHops int
	MaxInFlight int
	Metrics     prometheus.Registerer
	Logger      *slog.Logger
}

type handler struct {
	Config
	inFlight chan struct{}
	answers  *prometheus.CounterVec
	took     prometheus.Histogram
}

// New makes the handler that machines talk to.
func New(c Config) (http.Handler, error) {
	h := &handler{
		Config: c, inFlight: make(chan struct{}, c.MaxInFlight),
		answers: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "join_gateway_answers_total", Help: "Answers to machines, by endpoint and status.",
		}, []string{"endpoint", "status"}),
		took: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "join_gateway_relay_seconds", Help: "Time from a request's last byte to its answer.", Buckets: prometheus.ExponentialBuckets(0.001, 2, 14),
		}),
	}
	for _, m := range []prometheus.Collector{h.answers, h.took} {
		if err := c.Metrics.Register(m); err != nil {
			return nil, err
		}
	}
	return h, nil
}

// route is one endpoint of the protocol; name is its metric label.
type route struct {
	name   string
	method string
	budget bool // renewals, polls and what is public have a budget of their own
}

func routeOf(path string) (route, bool) {
	switch path {
	case wire.PathJoin:
		return route{"join", http.MethodPost, false}, true
	case wire.PathRenew, wire.PathConfirm, wire.PathCommands:
		return route{strings.TrimPrefix(path, "/v1/"), http.MethodPost, true}, true
	case wire.PathBundle, wire.PathRotations:
		return route{"bundle", http.MethodGet, true}, true
	case wire.PathCRL:
		return route{"crl", http.MethodGet, true}, true
	case "/healthz", "/readyz":
		return route{"health", http.MethodGet, true}, true
	}
	if rest, ok := strings.CutPrefix(path, wire.PathCRL+"/"); ok && !strings.Contains(rest, "/") {
		return route{"crl", http.MethodGet, true}, true
	}
	return route{name: "none"}, false
}

// ServeHTTP counts every answer, also those that never reach the service.
func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	rt, ok := routeOf(r.URL.Path)
	c := &counted{ResponseWriter: w, status: http.StatusOK}
	defer func() { h.answers.WithLabelValues(rt.name, strconv.Itoa(c.status)).Inc() }()
	h.serve(c, r, rt, ok)
}

type counted struct {
	http.ResponseWriter
	status int
}

func (c *counted) WriteHeader(status int) {
	c.status = status
	c.ResponseWriter.WriteHeader(status)
}

func (c *counted) Unwrap() http.ResponseWriter { return c.ResponseWriter }

func (h *handler) serve(w http.ResponseWriter, r *http.Request, rt route, ok bool) {
	if !ok {
		problem(w, wire.NotFound, 0)
		return
	}
	if r.URL.Path == "/healthz" {
		_, _ = io.WriteString(w, "ok\n")
		return
	}
	if r.ContentLength > wire.MaxBody {
		w.Header().Set("Connection", "close")
		problem(w, wire.TooLarge, 0)
		return
	}
	if r.Method != rt.method && (rt.method != http.MethodGet || r.Method != http.MethodHead) {
		w.Header().Set("Allow", rt.method)
		problem(w, wire.MethodNotAllowed, 0)
		return
	}
	source := h.source(r)
	limiter := h.Refusals
	if rt.budget {
		limiter = h.Requests
	}
	if wait := limiter.Wait(source, rt.budget); wait > 0 {
		problem(w, wire.RateLimited, wait)
		return
	}
	select {
	case h.inFlight <- struct{}{}:
		defer func() { <-h.inFlight }()
	default:
		problem(w, wire.Unavailable, time.Second)
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, wire.MaxBody))
	if err != nil {
		if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
			problem(w, wire.TooLarge, 0)
		} else {
			problem(w, wire.InvalidInput, 0)
		}
		return
	}
	h.relay(w, r, source, body)
}

func (h *handler) relay(w http.ResponseWriter, r *http.Request, source netip.Addr, body []byte) {
	id, began := rand.Text(), time.Now()
	resp, err := h.Upstreams.Do(r.Context(), func(ctx context.Context, base string) (*http.Request, error) {
		req, err := http.NewRequestWithContext(ctx, r.Method, base+r.URL.RequestURI(), bytes.NewReader(body))
		if err != nil {
			return nil, err
		}
		req.Header.Set("Content-Type", wire.MediaTypeJSON)
		req.Header.Set(sourceHeader, source.String())
		req.Header.Set(idHeader, id)
		return req, nil
	})
	if err != nil {
		if r.Context().Err() == nil {
			h.Logger.WarnContext(r.Context(), "no replica answered", "request", id, "path", r.URL.Path, "error", err)
		}
		problem(w, wire.Unavailable, 2*time.Second)
		return
	}
	defer resp.Body.Close()
	h.took.Observe(time.Since(began).Seconds())
	if resp.StatusCode == http.StatusForbidden {
		h.Refusals.Spend(source)
	}
	for _, name := range []string{"Content-Type", "Content-Length", "Retry-After", "Allow", "Cache-Control"} {
		if v := resp.Header.Get(name); v != "" {
			w.Header().Set(name, v)
		}
	}
	w.WriteHeader(resp.StatusCode)
	_, _ = io.Copy(w, io.LimitReader(resp.Body, wire.MaxAnswer)) // a client that is gone asks again
}

// source is the machine's address: the connection's, or where hops are trusted,
// what the outermost trusted one wrote.
func (h *handler) source(r *http.Request) netip.Addr {
	if h.TrustedHops > 0 {
		var hops []string
		for _, v := range r.Header.Values("X-Forwarded-For") {
			hops = append(hops, strings.Split(v, ",")...)
		}
		if i := len(hops) - h.TrustedHops; i >= 0 {
			if addr, err := netip.ParseAddr(strings.TrimSpace(hops[i])); err == nil {
				return addr.Unmap()
			}
		}
	}
	ap, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return netip.Addr{}
	}
	return ap.Addr().Unmap()
}

func problem(w http.ResponseWriter, code wire.Code, retryAfter time.Duration) {
	body, err := json.Marshal(code.Problem(""))
	if err != nil {
		panic(err) // strings and a number
	}
	w.Header().Set("Content-Type", wire.MediaTypeProblem)
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.Header().Set("Cache-Control", "no-store")
	if retryAfter > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(int(math.Ceil(retryAfter.Seconds()))))
	}
	w.WriteHeader(code.Status())
	_, _ = w.Write(body)
}
