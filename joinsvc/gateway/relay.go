package gateway

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net/http"
	"net/netip"
	"strconv"
	"time"

	"github.com/better-compute/join-operator/api/wire"
)

// What the gateway itself says to the join service, which believes it because of
// the client certificate. Nothing that a machine sends under these names arrives.
const (
	// sourceHeader is the machine's address, alone.
	sourceHeader = "X-Forwarded-For"
	// idHeader is what to call the request in the service's log.
	idHeader = "X-Request-Id"
)

// staleWeight is what an answer STALE_BUNDLE costs: after a rotation every machine
// behind an address may honestly get one.
const staleWeight = 0.1

// answerHeaders are the only headers of the service's that machines see.
var answerHeaders = []string{"Content-Type", "Content-Length", "Cache-Control", "Retry-After", "Allow", "Etag"}

// relay sends a request to the service and its answer to the machine.
func (h *Handler) relay(w *counted, r *http.Request, rt route, from netip.Addr, body []byte) {
	id, began := rand.Text(), time.Now()
	header := http.Header{
		sourceHeader: {from.String()},
		idHeader:     {id},
		"User-Agent": {"join-gateway"},
	}
	if rt.method == http.MethodPost {
		header["Content-Type"] = []string{wire.MediaTypeJSON}
	} else if tag := r.Header.Values("If-None-Match"); len(tag) > 0 {
		header["If-None-Match"] = tag
	}
	out := outgoing{method: r.Method, path: r.URL.Path, header: header, body: body}
	if rt.query {
		out.query = r.URL.RawQuery
	}
	// A machine that leaves does not end its request: who leaves before the answer is
	// refused and counted all the same, and a connection to the service is not lost.
	a, tries, err := h.cfg.Upstreams.Do(context.WithoutCancel(r.Context()), &out)
	if tries > 1 {
		h.metrics.again.Add(float64(tries - 1))
	}
	if err != nil {
		h.cfg.Logger.WarnContext(r.Context(), "no replica answered", "request", id, "endpoint", rt.name, "tries", tries, "error", err)
		problem(w, wire.Unavailable, 2*time.Second)
		return
	}
	defer a.close()
	h.metrics.took.Observe(time.Since(began).Seconds())
	if c := cost(a); c > 0 && rt.budget == byRefusals {
		h.cfg.Refusals.Spend(from, c)
	}
	a.write(w)
}

// cost is what an answer costs its source.
func cost(a *answer) float64 {
	switch a.status {
	case http.StatusForbidden, http.StatusRequestEntityTooLarge:
		return 1
	case http.StatusBadRequest:
		// What is not a code is quoted in JSON, so that no detail can look like one.
		if bytes.Contains(a.body, []byte(`"`+string(wire.StaleBundle)+`"`)) {
			return staleWeight
		}
		return 1
	}
	return 0
}

// answer is what the service said: to a POST as a whole, to a GET as a stream.
type answer struct {
	status int
	header http.Header
	body   []byte
	stream io.ReadCloser
	end    context.CancelFunc // of the request's context, which the stream needs
}

func (a *answer) close() {
	if a.stream != nil {
		_ = a.stream.Close()
	}
	a.end()
}

// errAnswerTooLarge is a replica that answers more than a machine reads.
var errAnswerTooLarge = errors.New("the answer is too large")

// read takes over a response. That of a POST is read whole, so that another
// replica can be asked when this one breaks off in the middle.
func read(resp *http.Response, method string) (*answer, error) {
	a := &answer{status: resp.StatusCode, header: resp.Header}
	if method != http.MethodPost {
		a.stream = resp.Body
		return a, nil
	}
	defer resp.Body.Close()
	if n := resp.ContentLength; n >= 0 && n <= wire.MaxAnswer {
		a.body = make([]byte, n)
		_, err := io.ReadFull(resp.Body, a.body)
		return a, err
	}
	var err error
	if a.body, err = io.ReadAll(io.LimitReader(resp.Body, wire.MaxAnswer+1)); err != nil {
		return nil, err
	}
	if len(a.body) > wire.MaxAnswer {
		return nil, errAnswerTooLarge
	}
	return a, nil
}

// write passes the answer on as it is.
func (a *answer) write(w http.ResponseWriter) {
	header := w.Header()
	for _, name := range answerHeaders {
		if v, ok := a.header[name]; ok {
			header[name] = v
		}
	}
	if a.stream == nil {
		if a.status != http.StatusNoContent {
			header["Content-Length"] = []string{strconv.Itoa(len(a.body))}
		}
		w.WriteHeader(a.status)
		_, _ = w.Write(a.body) // a machine that is gone asks again
		return
	}
	w.WriteHeader(a.status)
	if _, err := io.Copy(w, a.stream); err != nil {
		panic(http.ErrAbortHandler) // half a list must not look like a whole one
	}
}
