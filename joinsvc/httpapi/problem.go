package httpapi

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/joinsvc"
)

// refusal is the body of every refusal, byte for byte.
var refusal = encodeProblem(wire.AccessDenied.Problem(""))

// defaultRetry is for problems that must say when to come again and do not.
const defaultRetry = 5 * time.Second

// fail makes an answer of an error.
func (h *Handler) fail(a *answer, r *http.Request, e *endpoint, err error) {
	ctx := r.Context()
	var refused *joinsvc.RefusedJoin
	if errors.As(err, &refused) {
		h.refuse(a, r, refused)
		return
	}
	var p *joinsvc.Problem
	if !errors.As(err, &p) {
		h.log.ErrorContext(ctx, "a request failed", "endpoint", e.name, "error", err)
		p = &joinsvc.Problem{Code: wire.Internal}
	} else if p.Cause != nil {
		h.log.WarnContext(ctx, "a request could not be served", "endpoint", e.name, "code", string(p.Code), "error", p.Cause)
	}
	a.problem(p)
}

// refuse answers at the next multiple of the pace after the request came, and lets
// the refusal be recorded once the answer has left.
func (h *Handler) refuse(a *answer, r *http.Request, refused *joinsvc.RefusedJoin) {
	elapsed := time.Since(a.came)
	if wait(r.Context(), (elapsed/wire.RefusalPace+1)*wire.RefusalPace-elapsed) {
		a.write(http.StatusForbidden, wire.MediaTypeProblem, refusal)
		// The machine has it before anything is done that depends on the reason.
		_ = http.NewResponseController(a.ResponseWriter).Flush()
	}
	a.code = string(wire.AccessDenied)
	h.cfg.Service.RecordRefusal(context.WithoutCancel(r.Context()), refused)
}

// wait reports whether the time came before the client left.
func wait(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// problem writes a problem that is no refusal.
func (a *answer) problem(p *joinsvc.Problem) {
	if p.Code == wire.RateLimited || p.Code == wire.Unavailable {
		retry := p.RetryAfter
		if retry <= 0 {
			retry = defaultRetry
		}
		a.Header().Set("Retry-After", strconv.FormatInt(int64((retry+time.Second-1)/time.Second), 10))
	}
	a.write(p.Code.Status(), wire.MediaTypeProblem, encodeProblem(p.Code.Problem(p.Detail)))
	a.code = string(p.Code)
}

// write answers with a whole body.
func (a *answer) write(status int, mediaType string, body []byte) {
	header := a.Header()
	header.Set("Content-Type", mediaType)
	header.Set("Content-Length", strconv.Itoa(len(body)))
	if header.Get("Cache-Control") == "" {
		header.Set("Cache-Control", "no-store")
	}
	a.written = true
	a.code = strconv.Itoa(status)
	a.WriteHeader(status)
	_, _ = a.Write(body) // a client that is gone is none of our trouble
}

func encodeProblem(p wire.Problem) []byte {
	b, err := json.Marshal(p)
	if err != nil {
		panic(err) // a struct of strings and a number
	}
	return b
}
