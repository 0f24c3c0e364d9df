package httpapi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"runtime"
	"runtime/debug"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/joinsvc"
)

// Service decides; *joinsvc.Service is one.
type Service interface {
	Join(ctx context.Context, j *wire.Join, source netip.Addr) (*wire.Answer, error)
	Confirm(ctx context.Context, c *wire.Confirm) error
	// RecordRefusal returns at once.
	RecordRefusal(ctx context.Context, r *joinsvc.RefusedJoin)
}

// Signer signs answers; *keyring.Keyring is one.
type Signer interface {
	Sign(typ string, payload []byte) (string, error)
}

// Lists has the revocation lists of the node CAs; *Revocations is one.
type Lists interface {
	// Newest is the list of the CA that signs now.
	Newest(ctx context.Context) ([]byte, error)
	// OfKey is that of the CA with a subject key identifier.
	OfKey(ctx context.Context, ski []byte) ([]byte, error)
}

// Config is what a Handler is made of; all fields are required.
type Config struct {
	Service Service
	Signer  Signer
	Bundles *Bundles
	Lists   Lists
	// Ready says why this replica cannot serve joins now, or nil.
	Ready   func() error
	Logger  *slog.Logger
	Metrics prometheus.Registerer
}

// Handler serves the protocol.
type Handler struct {
	cfg      Config
	log      *slog.Logger
	requests *prometheus.CounterVec
	took     *prometheus.HistogramVec
	panics   prometheus.Counter
}

// New makes a handler.
func New(cfg Config) (*Handler, error) {
	h := &Handler{
		cfg: cfg, log: cfg.Logger,
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "join_http_requests_total", Help: "Requests by endpoint and by the problem's code, or the status where there was none."}, []string{"endpoint", "code"}),
		took: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "join_http_request_duration_seconds", Help: "Time from a request's header to its answer, without the wait of refusals.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10}}, []string{"endpoint"}),
		panics: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "join_http_panics_total", Help: "Requests that a bug ended; each was answered INTERNAL."}),
	}
	for _, c := range []prometheus.Collector{h.requests, h.took, h.panics} {
		if err := cfg.Metrics.Register(c); err != nil {
			return nil, fmt.Errorf("metrics of the HTTP API: %w", err)
		}
	}
	return h, nil
}

// endpoint is one of the protocol's. serve returns the error that becomes a
// problem; a nil error means that the answer was written.
type endpoint struct {
	name    string
	methods []string
	serve   func(*Handler, *answer, *http.Request) error
}

var (
	joinEndpoint      = endpoint{"join", []string{http.MethodPost}, (*Handler).join}
	confirmEndpoint   = endpoint{"confirm", []string{http.MethodPost}, (*Handler).confirm}
	bundleEndpoint    = endpoint{"bundle", []string{http.MethodGet, http.MethodHead}, (*Handler).bundle}
	rotationsEndpoint = endpoint{"rotations", []string{http.MethodGet, http.MethodHead}, (*Handler).rotations}
	crlEndpoint       = endpoint{"crl", []string{http.MethodGet, http.MethodHead}, (*Handler).crl}
	healthEndpoint    = endpoint{"healthz", []string{http.MethodGet, http.MethodHead}, (*Handler).healthz}
	readyEndpoint     = endpoint{"readyz", []string{http.MethodGet, http.MethodHead}, (*Handler).readyz}
	unknownEndpoint   = endpoint{"unknown", nil, func(*Handler, *answer, *http.Request) error { return &joinsvc.Problem{Code: wire.NotFound} }}
)

// find does without http.ServeMux, which redirects what it finds untidy.
func find(path string) *endpoint {
	switch path {
	case wire.PathJoin:
		return &joinEndpoint
	case wire.PathConfirm:
		return &confirmEndpoint
	case wire.PathBundle:
		return &bundleEndpoint
	case wire.PathRotations:
		return &rotationsEndpoint
	case wire.PathCRL:
		return &crlEndpoint
	case "/healthz":
		return &healthEndpoint
	case "/readyz":
		return &readyEndpoint
	}
	if strings.HasPrefix(path, wire.PathCRL+"/") {
		return &crlEndpoint
	}
	return &unknownEndpoint
}

// answer is one request's way out.
type answer struct {
	http.ResponseWriter
	came    time.Time
	written bool
	// code is what the request is counted under.
	code string
}

// ServeHTTP serves one request. A panic ends that request only.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a := &answer{ResponseWriter: w, came: time.Now()}
	e := find(r.URL.Path)
	r = r.WithContext(withID(r.Context(), r))
	defer func() {
		if p := recover(); p != nil {
			h.panicked(a, r, e, p)
		}
		h.requests.WithLabelValues(e.name, a.code).Inc()
	}()
	err := h.serve(e, a, r)
	h.took.WithLabelValues(e.name).Observe(time.Since(a.came).Seconds())
	if err != nil {
		h.fail(a, r, e, err)
	}
}

// serve holds the order of the first checks: size, then method.
func (h *Handler) serve(e *endpoint, a *answer, r *http.Request) error {
	if r.ContentLength > wire.MaxBody {
		return &joinsvc.Problem{Code: wire.TooLarge}
	}
	if e.methods != nil && !contains(e.methods, r.Method) {
		// A body of unknown length is counted before its method is judged.
		if r.ContentLength < 0 {
			if _, err := readBody(r); err != nil {
				return err
			}
		}
		a.Header().Set("Allow", strings.Join(e.methods, ", "))
		return &joinsvc.Problem{Code: wire.MethodNotAllowed}
	}
	return e.serve(h, a, r)
}

func contains(list []string, s string) bool {
	for _, v := range list {
		if v == s {
			return true
		}
	}
	return false
}

// panicked answers INTERNAL if nothing was answered yet. The values of panics stay
// out of the log but for the runtime's own: others may quote evidence.
func (h *Handler) panicked(a *answer, r *http.Request, e *endpoint, p any) {
	if err, ok := p.(error); ok && errors.Is(err, http.ErrAbortHandler) {
		panic(p)
	}
	h.panics.Inc()
	if _, ok := p.(runtime.Error); !ok {
		p = fmt.Sprintf("a value of type %T", p)
	}
	h.log.ErrorContext(r.Context(), "a request panicked", "endpoint", e.name, "panic", p, "stack", string(debug.Stack()))
	a.code = string(wire.Internal)
	if !a.written {
		a.problem(&joinsvc.Problem{Code: wire.Internal})
	}
}
