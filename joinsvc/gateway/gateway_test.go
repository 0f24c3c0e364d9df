package gateway

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os/exec"
	"strconv"
	"strings"
	"sync/atomic"
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

func newAuthority(t *testing.T) *authority {
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

func (a *authority) issue(t *testing.T) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
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

// replica is a join service that answers as the test says, over mutual TLS.
func (a *authority) replica(t *testing.T, serve http.HandlerFunc) *httptest.Server {
	t.Helper()
	s := httptest.NewUnstartedServer(serve)
	s.TLS = &tls.Config{Certificates: []tls.Certificate{a.issue(t)}, ClientCAs: a.pool(), ClientAuth: tls.RequireAndVerifyClientCert}
	s.StartTLS()
	t.Cleanup(s.Close)
	return s
}

// front is a gateway before replicas, with its limits as the test says.
func (a *authority) front(t *testing.T, change func(*Config), bases ...string) (url string, client *http.Client) {
	t.Helper()
	ups, err := NewUpstreams(bases, &tls.Config{RootCAs: a.pool(), Certificates: []tls.Certificate{a.issue(t)}})
	if err != nil {
		t.Fatal(err)
	}
	c := Config{
		Upstreams: ups, Refusals: NewLimiter(600, 5), Requests: NewLimiter(600, 50), MaxInFlight: 100,
		Metrics: prometheus.NewRegistry(), Logger: slog.New(slog.DiscardHandler),
	}
	if change != nil {
		change(&c)
	}
	h, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewUnstartedServer(h)
	s.TLS = &tls.Config{Certificates: []tls.Certificate{a.issue(t)}}
	s.Config.ReadTimeout = 500 * time.Millisecond
	s.StartTLS()
	t.Cleanup(s.Close)
	return s.URL, &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: a.pool()}}}
}

func status(code int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.WriteHeader(code)
		_, _ = io.WriteString(w, body)
	}
}

func post(t *testing.T, c *http.Client, url string, body io.Reader, header http.Header) (*http.Response, string) {
	t.Helper()
	return send(t, c, http.MethodPost, url, body, header)
}

func send(t *testing.T, c *http.Client, method, url string, body io.Reader, header http.Header) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	for k, v := range header {
		req.Header[k] = v
	}
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(b)
}

func wantProblem(t *testing.T, resp *http.Response, body string, code wire.Code) {
	t.Helper()
	var p wire.Problem
	if err := json.Unmarshal([]byte(body), &p); err != nil || p.Code != code || resp.StatusCode != code.Status() || resp.Header.Get("Content-Type") != wire.MediaTypeProblem {
		t.Errorf("got %d %q %s, want the problem %s", resp.StatusCode, resp.Header.Get("Content-Type"), body, code)
	}
}

func TestRelaysBytesAndOverwritesTheSource(t *testing.T) {
	a := newAuthority(t)
	want := "any bytes \x00 at all"
	r := a.replica(t, func(w http.ResponseWriter, r *http.Request) {
		got, _ := io.ReadAll(r.Body)
		if string(got) != want || r.URL.Path != wire.PathJoin || len(r.TLS.PeerCertificates) != 1 {
			t.Errorf("the service got %s %q with %d client certificates", r.URL.Path, got, len(r.TLS.PeerCertificates))
		}
		if h := r.Header.Values(sourceHeader); len(h) != 1 || h[0] != "127.0.0.1" {
			t.Errorf("source %q", h)
		}
		if r.Header.Get("Cookie") != "" || r.Header.Get("X-Evil") != "" {
			t.Error("the machine's own headers went through")
		}
		w.Header().Set("Content-Type", wire.MediaTypeJOSE)
		w.Header().Set("X-Internal", "no")
		_, _ = io.WriteString(w, "signed")
	})
	url, c := a.front(t, nil, r.URL)
	resp, body := post(t, c, url+wire.PathJoin, strings.NewReader(want), http.Header{sourceHeader: {"6.6.6.6"}, "Cookie": {"a"}, "X-Evil": {"b"}})
	if resp.StatusCode != http.StatusOK || body != "signed" || resp.Header.Get("Content-Type") != wire.MediaTypeJOSE || resp.Header.Get("X-Internal") != "" {
		t.Errorf("got %d %q %v", resp.StatusCode, body, resp.Header)
	}
}

func TestOnlyTheProtocolGoesThrough(t *testing.T) {
	a := newAuthority(t)
	r := a.replica(t, func(http.ResponseWriter, *http.Request) { t.Error("it went through") })
	url, c := a.front(t, nil, r.URL)
	for _, tc := range []struct {
		method, path string
		code         wire.Code
	}{
		{http.MethodGet, wire.PathJoin, wire.MethodNotAllowed},
		{http.MethodPut, wire.PathJoin, wire.MethodNotAllowed},
		{http.MethodPost, wire.PathBundle, wire.MethodNotAllowed},
		{http.MethodPost, "/", wire.NotFound},
		{http.MethodPost, "/v1/join/", wire.NotFound},
		{http.MethodPost, "/V1/JOIN", wire.NotFound},
		{http.MethodGet, "/metrics", wire.NotFound},
		{http.MethodGet, "/v1/crl/ab/cd", wire.NotFound},
		{http.MethodGet, "/debug/pprof/", wire.NotFound},
	} {
		resp, body := send(t, c, tc.method, url+tc.path, strings.NewReader("{}"), nil)
		wantProblem(t, resp, body, tc.code)
	}
	for _, body := range []io.Reader{bytes.NewReader(make([]byte, wire.MaxBody+1)), io.MultiReader(bytes.NewReader(make([]byte, 2<<20)))} {
		resp, text := post(t, c, url+wire.PathJoin, body, nil)
		wantProblem(t, resp, text, wire.TooLarge)
	}
}

func TestSlowBodyIsCutOff(t *testing.T) {
	a := newAuthority(t)
	r := a.replica(t, func(http.ResponseWriter, *http.Request) { t.Error("it went through") })
	url, _ := a.front(t, nil, r.URL)
	conn, err := tls.Dial("tcp", strings.TrimPrefix(url, "https://"), &tls.Config{RootCAs: a.pool()})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "POST "+wire.PathJoin+" HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"); err != nil {
		t.Fatal(err)
	}
	if err := conn.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
		t.Fatal(err)
	}
	answer, err := io.ReadAll(conn)
	if err != nil || strings.Contains(string(answer), "200 OK") {
		t.Errorf("%v: %q", err, answer)
	}
}

func TestRefusalsAreWeighedAndSuccessIsNot(t *testing.T) {
	a := newAuthority(t)
	var refuses atomic.Bool
	r := a.replica(t, func(w http.ResponseWriter, r *http.Request) {
		if refuses.Load() {
			status(http.StatusForbidden, "refused")(w, r)
			return
		}
		status(http.StatusOK, "joined")(w, r)
	})
	url, c := a.front(t, func(c *Config) { c.Refusals = NewLimiter(3, 0.001) }, r.URL)
	for range 50 {
		if resp, _ := post(t, c, url+wire.PathJoin, strings.NewReader("x"), nil); resp.StatusCode != http.StatusOK {
			t.Fatalf("an honest machine got %d", resp.StatusCode)
		}
	}
	refuses.Store(true)
	for range 3 {
		if resp, body := post(t, c, url+wire.PathJoin, strings.NewReader("x"), nil); resp.StatusCode != http.StatusForbidden || body != "refused" {
			t.Fatalf("got %d %q", resp.StatusCode, body)
		}
	}
	resp, body := post(t, c, url+wire.PathJoin, strings.NewReader("x"), nil)
	wantProblem(t, resp, body, wire.RateLimited)
	if n, err := strconv.Atoi(resp.Header.Get("Retry-After")); err != nil || n < 1 {
		t.Errorf("Retry-After %q", resp.Header.Get("Retry-After"))
	}
	if resp, _ := send(t, c, http.MethodGet, url+wire.PathBundle, nil, nil); resp.StatusCode == http.StatusTooManyRequests {
		t.Error("what is public has a budget of its own")
	}
}

func TestAnotherReplicaAnswersWhereOneIsGone(t *testing.T) {
	a := newAuthority(t)
	dead := a.replica(t, nil)
	dead.Close()
	breaks := a.replica(t, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	lives := a.replica(t, status(http.StatusOK, "joined"))
	url, c := a.front(t, nil, dead.URL, breaks.URL, lives.URL)
	for range 20 {
		if resp, body := post(t, c, url+wire.PathJoin, strings.NewReader("x"), nil); resp.StatusCode != http.StatusOK || body != "joined" {
			t.Fatalf("got %d %q", resp.StatusCode, body)
		}
	}
	url, c = a.front(t, nil, dead.URL)
	resp, body := post(t, c, url+wire.PathJoin, strings.NewReader("x"), nil)
	wantProblem(t, resp, body, wire.Unavailable)
	if resp.Header.Get("Retry-After") == "" {
		t.Error("no Retry-After")
	}
}

func TestReplicaOfAnotherAuthorityIsNotTrusted(t *testing.T) {
	a, other := newAuthority(t), newAuthority(t)
	r := other.replica(t, func(http.ResponseWriter, *http.Request) { t.Error("it went through") })
	url, c := a.front(t, nil, r.URL)
	resp, body := post(t, c, url+wire.PathJoin, strings.NewReader("x"), nil)
	wantProblem(t, resp, body, wire.Unavailable)
}

func TestSourceComesFromTrustedHopsOnly(t *testing.T) {
	for _, tc := range []struct {
		hops      int
		forwarded []string
		want      string
	}{
		{0, []string{"6.6.6.6"}, "192.0.2.1"},
		{1, []string{"6.6.6.6, 203.0.113.7"}, "203.0.113.7"},
		{1, []string{"6.6.6.6", "203.0.113.7"}, "203.0.113.7"},
		{2, []string{"6.6.6.6, 203.0.113.7, 10.0.0.1"}, "203.0.113.7"},
		{2, []string{"203.0.113.7"}, "192.0.2.1"},
		{1, []string{"no address"}, "192.0.2.1"},
		{1, nil, "192.0.2.1"},
	} {
		h := &handler{Config: Config{TrustedHops: tc.hops}}
		r := httptest.NewRequest(http.MethodPost, "/", nil)
		r.RemoteAddr = "192.0.2.1:1234"
		r.Header["X-Forwarded-For"] = tc.forwarded
		if got := h.source(r).String(); got != tc.want {
			t.Errorf("%d hops, %q: %s, want %s", tc.hops, tc.forwarded, got, tc.want)
		}
	}
}

func TestLimiterRefillsCountsNetworksAndForgets(t *testing.T) {
	now := time.Unix(0, 0)
	l := NewLimiter(2, 1)
	l.now = func() time.Time { return now }
	one, sibling, other := netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8::ffff"), netip.MustParseAddr("2001:db8:0:1::1")
	l.Spend(one)
	l.Spend(sibling)
	if l.Wait(one, false) != time.Second || l.Wait(other, false) != 0 {
		t.Error("a /64 is one source, and another is another")
	}
	now = now.Add(time.Second)
	if l.Wait(one, false) != 0 {
		t.Error("one a second is forgiven")
	}
	for i := range maxSources + 10 {
		l.Spend(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}))
	}
	if len(l.buckets) > maxSources || l.recent.Len() != len(l.buckets) {
		t.Errorf("%d buckets, %d in the list", len(l.buckets), l.recent.Len())
	}
}

func TestR04_GatewayLinksNeitherDatabaseNorKubernetesNorKeys(t *testing.T) {
	out, err := exec.CommandContext(context.Background(), "go", "list", "-deps", "github.com/better-compute/join-operator/cmd/gateway").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, forbidden := range []string{"jackc/pgx", "k8s.io/client-go", "joinsvc/keyring", "joinsvc/pki", "joinsvc/keys", "go-jose"} {
		if strings.Contains(string(out), forbidden) {
			t.Errorf("the gateway links %s", forbidden)
		}
	}
}
