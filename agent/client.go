package agent

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/better-compute/join-operator/api/wire"
)

const (
	dialTimeout    = 10 * time.Second
	requestTimeout = 30 * time.Second
	maxHeader      = 64 << 10
)

// client speaks HTTP to one endpoint at a time: TLS as the bundle pins it, no
// proxy, no redirect, no compression, answers of limited size and time. Every
// request has a connection of its own, since minutes lie between them.
type client struct {
	clock   Clock
	timeout time.Duration
	dial    func(ctx context.Context, network, address string) (net.Conn, error)
}

func (c *client) post(ctx context.Context, conf *tls.Config, endpoint *url.URL, path string, body []byte) (*reply, error) {
	return c.do(ctx, conf, http.MethodPost, target(endpoint, path, ""), body)
}

func (c *client) get(ctx context.Context, conf *tls.Config, endpoint *url.URL, path, query string) (*reply, error) {
	return c.do(ctx, conf, http.MethodGet, target(endpoint, path, query), nil)
}

func target(endpoint *url.URL, path, query string) string {
	u := *endpoint
	u.Path, u.RawPath, u.RawQuery = strings.TrimRight(u.Path, "/")+path, "", query
	return u.String()
}

// reply is a whole answer.
type reply struct {
	status    int
	mediaType string
	header    http.Header
	body      []byte
}

func (c *client) do(ctx context.Context, conf *tls.Config, method, target string, body []byte) (*reply, error) {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, target, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	if body != nil {
		req.Header.Set("Content-Type", wire.MediaTypeJSON)
	}
	req.Header.Set("User-Agent", "bcd")
	transport := &http.Transport{
		DialContext: c.dial, TLSClientConfig: conf, TLSHandshakeTimeout: dialTimeout,
		DisableKeepAlives: true, DisableCompression: true, MaxResponseHeaderBytes: maxHeader,
	}
	defer transport.CloseIdleConnections()
	// RoundTrip, not a Client: it follows nothing and stores nothing.
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(io.LimitReader(resp.Body, wire.MaxAnswer+1))
	if err != nil {
		return nil, fmt.Errorf("read the answer: %w", err)
	}
	if len(data) > wire.MaxAnswer {
		return nil, &UntrustedError{fmt.Errorf("longer than %d bytes", wire.MaxAnswer)}
	}
	mediaType, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	if err != nil {
		mediaType = ""
	}
	return &reply{resp.StatusCode, mediaType, resp.Header, data}, nil
}

// problem reads any answer that is not what was asked for.
func (r *reply) problem(now time.Time) *ProblemError {
	e := &ProblemError{Status: r.status, RetryAfter: retryAfter(r.header.Get("Retry-After"), now)}
	var p wire.Problem
	if r.mediaType == wire.MediaTypeProblem && json.Unmarshal(r.body, &p) == nil && p.Code.Status() == r.status {
		e.Code, e.Detail = wire.Code(printable(string(p.Code), 40)), printable(p.Detail, 200)
	}
	return e
}

// retryAfter reads the header (RFC 9110 section 10.2.3) as seconds or a date;
// zero where there is none or it makes no sense.
func retryAfter(value string, now time.Time) time.Duration {
	if seconds, err := strconv.Atoi(value); err == nil {
		return time.Duration(min(max(seconds, 0), int(maxRetryAfter/time.Second))) * time.Second
	}
	if at, err := http.ParseTime(value); err == nil {
		return min(max(at.Sub(now), 0), maxRetryAfter)
	}
	return 0
}

// unverifiedTLS reports whether an endpoint showed a certificate that the pinned
// authority does not vouch for.
func unverifiedTLS(err error) bool {
	_, ok := errors.AsType[*tls.CertificateVerificationError](err)
	return ok
}
