package httpapi

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/netip"
	"os"
	"strings"

	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/joinsvc"
)

// sourceHeader is where the gateway says whose request it relays: the machine's
// address, alone. Only the gateway can connect, so it can be believed.
const sourceHeader = "X-Forwarded-For"

func (h *Handler) join(a *answer, r *http.Request) error {
	body, err := readBody(r)
	if err != nil {
		return err
	}
	j, err := wire.DecodeJoin(body)
	if err != nil {
		return invalid(err)
	}
	if err := h.cfg.Ready(); err != nil {
		return &joinsvc.Problem{Code: wire.Unavailable, Cause: err}
	}
	// A machine that goes away does not stop its join half way: it comes again with
	// the same CSR and is given what was committed. The service has its own timeouts.
	ctx := context.WithoutCancel(r.Context())
	out, err := h.cfg.Service.Join(ctx, j, source(r))
	if err != nil {
		return err
	}
	out.BundleSHA256 = h.cfg.Bundles.SHA256()
	payload, err := json.Marshal(out)
	if err != nil {
		return err
	}
	jws, err := h.cfg.Signer.Sign(wire.TypeJoin, payload)
	if err != nil {
		return &joinsvc.Problem{Code: wire.Unavailable, Cause: err}
	}
	a.write(http.StatusOK, wire.MediaTypeJOSE, []byte(jws))
	h.log.InfoContext(ctx, "answered a join", "outcome", string(out.Outcome), "csr_sha256", out.CSRSHA256,
		"node", out.NodeID, "tenant", out.Tenant, "join_request", out.JoinRequest)
	return nil
}

func (h *Handler) confirm(a *answer, r *http.Request) error {
	body, err := readBody(r)
	if err != nil {
		return err
	}
	c, err := wire.DecodeConfirm(body)
	if err != nil {
		return invalid(err)
	}
	if err := h.cfg.Service.Confirm(context.WithoutCancel(r.Context()), c); err != nil {
		return err
	}
	a.written, a.code = true, "204"
	a.WriteHeader(http.StatusNoContent)
	return nil
}

// readBody reads at most what the protocol allows.
func readBody(r *http.Request) ([]byte, error) {
	if r.ContentLength > wire.MaxBody {
		return nil, &joinsvc.Problem{Code: wire.TooLarge}
	}
	// Not what the length claims: who sends slowly must not hold that much.
	var buf bytes.Buffer
	if n := r.ContentLength; n > 0 {
		buf.Grow(int(min(n, 16<<10)) + bytes.MinRead)
	}
	switch _, err := buf.ReadFrom(io.LimitReader(r.Body, wire.MaxBody+1)); {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, invalid(&wire.FieldError{Reason: "did not come in time"})
	case err != nil:
		return nil, invalid(&wire.FieldError{Reason: "did not come whole"})
	case buf.Len() > wire.MaxBody:
		return nil, &joinsvc.Problem{Code: wire.TooLarge}
	}
	return buf.Bytes(), nil
}

// invalid is the problem of a field of the envelope; its text repeats no value.
func invalid(err error) error {
	var field *wire.FieldError
	if errors.As(err, &field) {
		return &joinsvc.Problem{Code: wire.InvalidInput, Detail: field.Error()}
	}
	return &joinsvc.Problem{Code: wire.InvalidInput}
}

// source is the machine's address as the gateway saw it; the zero address where it
// does not say.
func source(r *http.Request) netip.Addr {
	values := r.Header.Values(sourceHeader)
	if len(values) != 1 {
		return netip.Addr{}
	}
	addr, err := netip.ParseAddr(strings.TrimSpace(values[0]))
	if err != nil {
		return netip.Addr{}
	}
	return addr
}
