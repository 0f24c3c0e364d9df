package gateway

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/better-compute/join-operator/api/wire"
)

// authority signs the certificates of one test.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t testing.TB) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test CA"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &authority{cert, key}
}

func (a *authority) issue(t testing.TB) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		DNSNames:    []string{"join-service.test"},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}, a.cert, key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func (a *authority) pool() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(a.cert)
	return p
}

// files writes a Secret's folder, as it is mounted.
func (a *authority) files(t testing.TB, dir string) {
	t.Helper()
	pair := a.issue(t)
	key, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "tls.crt"), "CERTIFICATE", pair.Certificate[0])
	write(t, filepath.Join(dir, "tls.key"), "PRIVATE KEY", key)
	write(t, filepath.Join(dir, "ca.crt"), "CERTIFICATE", a.cert.Raw)
}

func write(t testing.TB, path, kind string, der []byte) {
	t.Helper()
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
}

// identity is a certificate of the authority's, in files.
func (a *authority) identity(t testing.TB) *Identity {
	t.Helper()
	dir := t.TempDir()
	a.files(t, dir)
	i, err := OpenIdentity(dir, filepath.Join(dir, "ca.crt"), discard)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

var discard = slog.New(slog.DiscardHandler)

// replica is a join service that answers as the test says, over mutual TLS.
func (a *authority) replica(t testing.TB, serve http.HandlerFunc) *httptest.Server {
	t.Helper()
	s := httptest.NewUnstartedServer(serve)
	s.TLS = &tls.Config{Certificates: []tls.Certificate{a.issue(t)}, ClientCAs: a.pool(), ClientAuth: tls.RequireAndVerifyClientCert}
	s.Config.ErrorLog = slog.NewLogLogger(discard.Handler(), slog.LevelDebug)
	s.StartTLS()
	t.Cleanup(s.Close)
	return s
}

// front is a gateway before replicas.
type front struct {
	url     string
	address string
	client  *http.Client // a new connection each time, as agents do
	handler *Handler
	stop    context.CancelFunc
	stopped chan error
}

// front starts a gateway, with its limits as the test says.
func (a *authority) front(t testing.TB, change func(*Config, *Server), bases ...string) *front {
	t.Helper()
	ups, err := NewUpstreams(bases, a.identity(t), discard)
	if err != nil {
		t.Fatal(err)
	}
	c := Config{
		Upstreams: ups, Refusals: limiter(t, 600, 5), Requests: limiter(t, 600, 50), MaxInFlight: 100, MaxLargeBodies: 10,
		Metrics: prometheus.NewRegistry(), Logger: discard,
	}
	s := &Server{Identity: a.identity(t), MaxConnections: 1000, MaxConnectionsPerSource: 1000, Logger: discard}
	if change != nil {
		change(&c, s)
	}
	if s.Handler, err = New(c); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	f := &front{
		url: "https://" + l.Addr().String(), address: l.Addr().String(), handler: s.Handler, stop: stop, stopped: make(chan error, 1),
		client: &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: a.pool()}}},
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		f.stopped <- s.Serve(ctx, l)
	}()
	t.Cleanup(func() { stop(); <-done })
	return f
}

func limiter(t testing.TB, burst, rate float64) *Limiter {
	t.Helper()
	l, err := NewLimiter(burst, rate)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// status answers always the same.
func status(code int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.WriteHeader(code)
		_, _ = io.WriteString(w, body)
	}
}

func (f *front) post(t testing.TB, path string, body io.Reader, header http.Header) (*http.Response, string) {
	t.Helper()
	return f.send(t, http.MethodPost, path, body, header)
}

func (f *front) send(t testing.TB, method, path string, body io.Reader, header http.Header) (*http.Response, string) {
	t.Helper()
	resp, text, err := f.try(t.Context(), method, path, body, header)
	if err != nil {
		t.Fatal(err)
	}
	return resp, text
}

func (f *front) try(ctx context.Context, method, path string, body io.Reader, header http.Header) (*http.Response, string, error) {
	req, err := http.NewRequestWithContext(ctx, method, f.url+path, body)
	if err != nil {
		return nil, "", err
	}
	for k, v := range header {
		req.Header[k] = v
	}
	resp, err := f.client.Do(req)
	if err != nil {
		return nil, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp, string(b), err
}

func wantProblem(t testing.TB, resp *http.Response, body string, code wire.Code) {
	t.Helper()
	var p wire.Problem
	if err := json.Unmarshal([]byte(body), &p); err != nil || p.Code != code || resp.StatusCode != code.Status() || resp.Header.Get("Content-Type") != wire.MediaTypeProblem {
		t.Errorf("got %d %q %s, want the problem %s", resp.StatusCode, resp.Header.Get("Content-Type"), body, code)
	}
	if code == wire.RateLimited || code == wire.Unavailable {
		if resp.Header.Get("Retry-After") == "" || resp.Header.Get("Retry-After") == "0" {
			t.Errorf("Retry-After is %q", resp.Header.Get("Retry-After"))
		}
	}
}

// eventually polls until check is true.
func eventually(t testing.TB, what string, check func() bool) {
	t.Helper()
	deadline := time.Now().Add(15 * time.Second)
	for !check() {
		if time.Now().After(deadline) {
			t.Fatalf("not within 15 s: %s", what)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// within fails the test instead of waiting for ever.
func within[T any](t testing.TB, what string, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(15 * time.Second):
		t.Fatalf("not within 15 s: %s", what)
		panic("unreachable")
	}
}

func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }
