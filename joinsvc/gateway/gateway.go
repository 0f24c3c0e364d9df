package gateway

import (
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/better-compute/join-operator/api/wire"
)

// Config of a gateway's handler; all fields but TrustedHops are required.
type Config struct {
	// Upstreams are the replicas that requests go to.
	Upstreams *Upstreams
	// Refusals is spent by what the service refuses.
	Refusals *Limiter
	// Requests is spent by renewals, polls and downloads.
	Requests *Limiter
	// TrustedHops is the number of proxies in front that write X-Forwarded-For.
	TrustedHops int
	// MaxInFlight bounds the requests that are relayed at once, MaxLargeBodies those
	// of them that hold a body above 16 KiB.
	MaxInFlight, MaxLargeBodies int
	Metrics                     prometheus.Registerer
	Logger                      *slog.Logger
}

// Handler is what machines talk to.
type Handler struct {
	cfg             Config
	inFlight, large slots
	draining        atomic.Bool
	metrics         *metrics
}

// New makes a handler.
func New(c Config) (*Handler, error) {
	if c.MaxInFlight < 1 || c.MaxLargeBodies < 1 {
		return nil, errors.New("the gateway relays at least one request at a time")
	}
	h := &Handler{cfg: c, inFlight: make(slots, c.MaxInFlight), large: make(slots, c.MaxLargeBodies)}
	var err error
	h.metrics, err = newMetrics(h)
	return h, err
}

// Drain makes /readyz say no, while requests are still served: load balancers
// look elsewhere before the gateway stops.
func (h *Handler) Drain() { h.draining.Store(true) }

// Ready says whether a replica is ready and the gateway is not about to stop.
func (h *Handler) Ready() bool { return !h.draining.Load() && h.cfg.Upstreams.Ready() }

// ServeHTTP counts every answer, also those that never reach the service.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	rt, known := routeOf(r.URL.Path)
	c := &counted{ResponseWriter: w, status: http.StatusOK}
	defer func() { h.metrics.answers.WithLabelValues(rt.name, strconv.Itoa(c.status)).Inc() }()
	h.serve(c, r, rt, known)
}

// serve holds the order of the checks: size, path and method, limits, body.
func (h *Handler) serve(w *counted, r *http.Request, rt route, known bool) {
	if r.ContentLength > wire.MaxBody {
		h.tooLarge(w, r)
		return
	}
	if !known {
		skipBody(w, r)
		problem(w, wire.NotFound, 0)
		return
	}
	if !rt.allows(r.Method) {
		h.wrongMethod(w, r, rt)
		return
	}
	if rt.budget == free {
		h.health(w, r)
		return
	}
	from := source(r, h.cfg.TrustedHops)
	if wait := h.wait(from, rt.budget); wait > 0 {
		skipBody(w, r)
		problem(w, wire.RateLimited, wait)
		return
	}
	b := &body{}
	if rt.method == http.MethodPost {
		var err error
		if b, err = readBody(w, r, h.large); err != nil {
			h.badBody(w, r, from, err)
			return
		}
	}
	defer b.free()
	if !h.inFlight.take() {
		problem(w, wire.Unavailable, time.Second)
		return
	}
	defer h.inFlight.give()
	h.relay(w, r, rt, from, b.bytes)
}

// wait is how long a source must wait, or zero.
func (h *Handler) wait(from netip.Addr, b budget) time.Duration {
	if b == byRequests {
		return h.cfg.Requests.Take(from)
	}
	return h.cfg.Refusals.Wait(from)
}

// wrongMethod counts a body of unknown length before it judges the method, as the
// protocol's order of checks has it.
func (h *Handler) wrongMethod(w *counted, r *http.Request, rt route) {
	if r.ContentLength < 0 {
		if _, err := io.Copy(io.Discard, http.MaxBytesReader(w.ResponseWriter, r.Body, wire.MaxBody)); err != nil {
			h.badBody(w, r, source(r, h.cfg.TrustedHops), sizeError(err))
			return
		}
	} else {
		skipBody(w, r)
	}
	w.Header().Set("Allow", rt.allow())
	problem(w, wire.MethodNotAllowed, 0)
}

func (h *Handler) tooLarge(w *counted, r *http.Request) {
	h.cfg.Refusals.Spend(source(r, h.cfg.TrustedHops), 1)
	skipBody(w, r)
	problem(w, wire.TooLarge, 0)
}

func (h *Handler) badBody(w *counted, r *http.Request, from netip.Addr, err error) {
	switch {
	case errors.Is(err, errTooLarge):
		h.tooLarge(w, r)
	case errors.Is(err, errBusy):
		skipBody(w, r)
		problem(w, wire.Unavailable, time.Second)
	default: // truncated, badly framed, or not here in time
		h.cfg.Refusals.Spend(from, 1)
		w.Header().Set("Connection", "close")
		problem(w, wire.InvalidInput, 0)
	}
}

// health answers for the gateway itself: it lives, and it can relay.
func (h *Handler) health(w *counted, r *http.Request) {
	if r.URL.Path == pathReadyz && !h.Ready() {
		problem(w, wire.Unavailable, time.Second)
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	_, _ = io.WriteString(w, "ok\n")
}
