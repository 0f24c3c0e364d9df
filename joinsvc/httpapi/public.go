package httpapi

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/joinsvc"
	"github.com/better-compute/join-operator/joinsvc/pki"
)

// mediaTypeCRL is that of RFC 2585 section 4.2.
const mediaTypeCRL = "application/pkix-crl"

func (h *Handler) bundle(a *answer, r *http.Request) error {
	newest := h.cfg.Bundles.newest()
	if newest == nil {
		return &joinsvc.Problem{Code: wire.Unavailable, Detail: "there is no bundle yet"}
	}
	a.Header().Set("Cache-Control", "no-cache")
	tag := `"` + newest.sha256 + `"`
	a.Header().Set("ETag", tag)
	if r.Header.Get("If-None-Match") == tag {
		a.written, a.code = true, "304"
		a.WriteHeader(http.StatusNotModified)
		return nil
	}
	a.write(http.StatusOK, wire.MediaTypeJSON, newest.payload)
	return nil
}

func (h *Handler) rotations(a *answer, r *http.Request) error {
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil || len(query["after"]) != 1 {
		return &joinsvc.Problem{Code: wire.InvalidInput, Detail: "after: is required, once"}
	}
	after, err := strconv.ParseUint(query["after"][0], 10, 31)
	if err != nil {
		return &joinsvc.Problem{Code: wire.InvalidInput, Detail: "after: is not a generation"}
	}
	body, err := json.Marshal(wire.Rotations{Protocol: wire.Protocol, Rotations: h.cfg.Bundles.after(int(after))})
	if err != nil {
		return err
	}
	a.write(http.StatusOK, wire.MediaTypeJSON, body)
	return nil
}

func (h *Handler) crl(a *answer, r *http.Request) error {
	var der []byte
	var err error
	if text, one := strings.CutPrefix(r.URL.Path, wire.PathCRL+"/"); one {
		ski, bad := hex.DecodeString(text)
		if bad != nil || len(ski) == 0 || len(ski) > 64 || hex.EncodeToString(ski) != text {
			return &joinsvc.Problem{Code: wire.NotFound}
		}
		der, err = h.cfg.Lists.OfKey(r.Context(), ski)
	} else {
		der, err = h.cfg.Lists.Newest(r.Context())
	}
	switch {
	case errors.Is(err, pki.ErrNoCRL):
		return &joinsvc.Problem{Code: wire.NotFound}
	case err != nil:
		return &joinsvc.Problem{Code: wire.Unavailable, Cause: err}
	}
	a.Header().Set("Cache-Control", "max-age=60")
	a.write(http.StatusOK, mediaTypeCRL, der)
	return nil
}

func (h *Handler) healthz(a *answer, _ *http.Request) error {
	a.write(http.StatusOK, "text/plain; charset=utf-8", []byte("ok\n"))
	return nil
}

// readyz does not say why: it can be asked through the gateway. The listener for
// metrics says.
func (h *Handler) readyz(a *answer, _ *http.Request) error {
	if err := h.cfg.Ready(); err != nil {
		return &joinsvc.Problem{Code: wire.Unavailable}
	}
	a.write(http.StatusOK, "text/plain; charset=utf-8", []byte("ok\n"))
	return nil
}
