package gateway

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/better-compute/join-operator/api/wire"
)

func TestRelaysBytesAndSaysItsOwnHeadersOnly(t *testing.T) {
	a := newAuthority(t)
	want := "any bytes \x00 at all"
	r := a.replica(t, func(w http.ResponseWriter, r *http.Request) {
		got, _ := io.ReadAll(r.Body)
		if string(got) != want || r.RequestURI != wire.PathJoin || len(r.TLS.PeerCertificates) != 1 {
			t.Errorf("the service got %s %q with %d client certificates", r.RequestURI, got, len(r.TLS.PeerCertificates))
		}
		if h := r.Header.Values(sourceHeader); len(h) != 1 || h[0] != "127.0.0.1" {
			t.Errorf("source %q", h)
		}
		if h := r.Header.Values(idHeader); len(h) != 1 || h[0] == "mine" || h[0] == "" {
			t.Errorf("request id %q", h)
		}
		for name := range r.Header {
			switch name {
			case sourceHeader, idHeader, "User-Agent", "Content-Type", "Content-Length":
			default:
				t.Errorf("the machine's own header went through: %s", name)
			}
		}
		w.Header().Set("Content-Type", wire.MediaTypeJOSE)
		w.Header().Set("X-Internal", "no")
		w.Header().Set("Set-Cookie", "no")
		_, _ = io.WriteString(w, "signed")
	})
	f := a.front(t, nil, r.URL)
	resp, body := f.post(t, wire.PathJoin+"?a=b", strings.NewReader(want), http.Header{
		sourceHeader: {"6.6.6.6"}, idHeader: {"mine"}, "Cookie": {"a"}, "X-Evil": {"b"}, "Forwarded": {"for=6.6.6.6"}, "X-Real-Ip": {"6.6.6.6"},
		"Te": {"trailers"}, "Proxy-Authorization": {"x"}, "Accept-Encoding": {"gzip"}, "Authorization": {"Bearer x"},
	})
	if resp.StatusCode != http.StatusOK || body != "signed" || resp.Header.Get("Content-Type") != wire.MediaTypeJOSE {
		t.Errorf("got %d %q %v", resp.StatusCode, body, resp.Header)
	}
	if resp.Header.Get("X-Internal") != "" || resp.Header.Get("Set-Cookie") != "" {
		t.Errorf("internal headers came out: %v", resp.Header)
	}
	if resp.TLS.Version != tls.VersionTLS13 || resp.ProtoMajor != 1 {
		t.Errorf("TLS %x, %s", resp.TLS.Version, resp.Proto)
	}
}

func TestAnswersGoThroughByteForByte(t *testing.T) {
	a := newAuthority(t)
	refusal := `{"status":403,"title":"Join refused","code":"ACCESS_DENIED"}`
	for _, tc := range []struct {
		status int
		header map[string]string
		body   string
	}{
		{http.StatusForbidden, map[string]string{"Content-Type": wire.MediaTypeProblem, "Cache-Control": "no-store"}, refusal},
		{http.StatusServiceUnavailable, map[string]string{"Content-Type": wire.MediaTypeProblem, "Retry-After": "7"}, "{}"},
		{http.StatusTooManyRequests, map[string]string{"Content-Type": wire.MediaTypeProblem, "Retry-After": "9"}, "{}"},
		{http.StatusInternalServerError, map[string]string{"Content-Type": wire.MediaTypeProblem}, "{}"},
		{http.StatusOK, map[string]string{"Content-Type": wire.MediaTypeJOSE}, strings.Repeat("x", 300_000)},
		{http.StatusNoContent, nil, ""},
		{http.StatusFound, map[string]string{"Location": "https://elsewhere.invalid/"}, ""},
	} {
		r := a.replica(t, func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			for k, v := range tc.header {
				w.Header().Set(k, v)
			}
			w.WriteHeader(tc.status)
			_, _ = io.WriteString(w, tc.body)
		})
		f := a.front(t, nil, r.URL)
		f.client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
		resp, body := f.post(t, wire.PathJoin, strings.NewReader("{}"), nil)
		if resp.StatusCode != tc.status || body != tc.body {
			t.Errorf("got %d %.80q, want %d %.80q", resp.StatusCode, body, tc.status, tc.body)
		}
		for k, v := range tc.header {
			if k == "Location" {
				v = "" // the service never redirects
			}
			if resp.Header.Get(k) != v {
				t.Errorf("%d: %s is %q, want %q", tc.status, k, resp.Header.Get(k), v)
			}
		}
	}
}

func TestBundleIsCachedByItsTag(t *testing.T) {
	a := newAuthority(t)
	r := a.replica(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("ETag", `"x"`)
		if r.Header.Get("If-None-Match") == `"x"` {
			w.WriteHeader(http.StatusNotModified)
			return
		}
		_, _ = io.WriteString(w, r.RequestURI)
	})
	f := a.front(t, nil, r.URL)
	if resp, body := f.send(t, http.MethodGet, wire.PathBundle+"?x=y", nil, nil); body != wire.PathBundle || resp.Header.Get("ETag") != `"x"` {
		t.Errorf("got %q %v", body, resp.Header)
	}
	if resp, _ := f.send(t, http.MethodGet, wire.PathBundle, nil, http.Header{"If-None-Match": {`"x"`}}); resp.StatusCode != http.StatusNotModified {
		t.Errorf("got %d", resp.StatusCode)
	}
	if _, body := f.send(t, http.MethodGet, wire.PathRotations+"?after=7", nil, nil); body != wire.PathRotations+"?after=7" {
		t.Errorf("got %q", body)
	}
	if resp, body := f.send(t, http.MethodHead, wire.PathCRL+"/00ff", nil, nil); resp.StatusCode != http.StatusOK || body != "" {
		t.Errorf("got %d %q", resp.StatusCode, body)
	}
}

func TestOnlyTheProtocolGoesThrough(t *testing.T) {
	a := newAuthority(t)
	r := a.replica(t, func(_ http.ResponseWriter, r *http.Request) { t.Errorf("it went through: %s", r.RequestURI) })
	f := a.front(t, nil, r.URL)
	for _, tc := range []struct {
		method, path string
		code         wire.Code
		allow        string
	}{
		{http.MethodGet, wire.PathJoin, wire.MethodNotAllowed, "POST"},
		{http.MethodHead, wire.PathConfirm, "", "POST"},
		{http.MethodPut, wire.PathJoin, wire.MethodNotAllowed, "POST"},
		{"BREW", wire.PathRenew, wire.MethodNotAllowed, "POST"},
		{http.MethodPost, wire.PathBundle, wire.MethodNotAllowed, "GET, HEAD"},
		{http.MethodDelete, wire.PathCRL, wire.MethodNotAllowed, "GET, HEAD"},
		{http.MethodPost, "/healthz", wire.MethodNotAllowed, "GET, HEAD"},
		{http.MethodPost, "/", wire.NotFound, ""},
		{http.MethodPost, "/v1/join/", wire.NotFound, ""},
		{http.MethodPost, "//v1/join", wire.NotFound, ""},
		{http.MethodPost, "/v1/../v1/join", wire.NotFound, ""},
		{http.MethodPost, "/v1/join%2f", wire.NotFound, ""},
		{http.MethodPost, "/V1/JOIN", wire.NotFound, ""},
		{http.MethodGet, "/metrics", wire.NotFound, ""},
		{http.MethodGet, "/v1/crl/", wire.NotFound, ""},
		{http.MethodGet, "/v1/crl/ab/cd", wire.NotFound, ""},
		{http.MethodGet, "/v1/crl/AB", wire.NotFound, ""},
		{http.MethodGet, "/v1/crl/..", wire.NotFound, ""},
		{http.MethodGet, "/v1/crl/" + strings.Repeat("ab", 65), wire.NotFound, ""},
		{http.MethodGet, "/debug/pprof/", wire.NotFound, ""},
	} {
		resp, body := f.send(t, tc.method, tc.path, strings.NewReader("{}"), nil)
		if tc.code != "" {
			wantProblem(t, resp, body, tc.code)
		}
		if resp.Header.Get("Allow") != tc.allow {
			t.Errorf("%s %s: Allow is %q, want %q", tc.method, tc.path, resp.Header.Get("Allow"), tc.allow)
		}
	}
}

func TestBodiesAreCapped(t *testing.T) {
	a := newAuthority(t)
	var got atomic.Int64
	r := a.replica(t, func(_ http.ResponseWriter, r *http.Request) {
		n, _ := io.Copy(io.Discard, r.Body)
		got.Store(n)
	})
	f := a.front(t, nil, r.URL)
	unknown := func(n int) io.Reader { return io.MultiReader(bytes.NewReader(make([]byte, n))) } // sent in chunks
	for _, n := range []int{0, 1, smallBody - 1, smallBody, smallBody + 1, wire.MaxBody} {
		for _, body := range []io.Reader{bytes.NewReader(make([]byte, n)), unknown(n)} {
			got.Store(-1)
			if resp, _ := f.post(t, wire.PathJoin, body, nil); resp.StatusCode != http.StatusOK || got.Load() != int64(n) {
				t.Errorf("%d bytes: %d, %d arrived", n, resp.StatusCode, got.Load())
			}
		}
	}
	got.Store(-1)
	for _, n := range []int{wire.MaxBody + 1, 2 << 20} {
		for _, method := range []string{http.MethodPost, http.MethodPut} { // size comes before method
			for _, body := range []io.Reader{bytes.NewReader(make([]byte, n)), unknown(n)} {
				resp, text := f.send(t, method, wire.PathJoin, body, nil)
				wantProblem(t, resp, text, wire.TooLarge)
			}
		}
	}
	if got.Load() != -1 {
		t.Error("too large a body went through")
	}
	if n := len(f.handler.large); n != 0 {
		t.Errorf("%d slots for large bodies were not given back", n)
	}
}

func TestLargeBodiesAreHeldByOnlySoMany(t *testing.T) {
	a := newAuthority(t)
	come, goOn := make(chan struct{}, 2), make(chan struct{})
	r := a.replica(t, func(http.ResponseWriter, *http.Request) {
		come <- struct{}{}
		<-goOn
	})
	f := a.front(t, func(c *Config, _ *Server) { c.MaxLargeBodies = 1 }, r.URL)
	release := sync.OnceFunc(func() { close(goOn) })
	t.Cleanup(release) // before the replica is closed, which waits
	done := make(chan error, 1)
	go func() {
		resp, _, err := f.try(t.Context(), http.MethodPost, wire.PathJoin, bytes.NewReader(make([]byte, 100_000)), nil)
		if err == nil && resp.StatusCode != http.StatusOK {
			err = fmt.Errorf("status %d", resp.StatusCode)
		}
		done <- err
	}()
	within(t, "the first one arrives", come)
	resp, body := f.post(t, wire.PathJoin, bytes.NewReader(make([]byte, 100_000)), nil)
	wantProblem(t, resp, body, wire.Unavailable)
	go func() { <-come; release() }()
	if resp, _ := f.post(t, wire.PathJoin, bytes.NewReader(make([]byte, 3_000)), nil); resp.StatusCode != http.StatusOK {
		t.Errorf("a small one got %d", resp.StatusCode)
	}
	if err := within(t, "the first one's answer", done); err != nil {
		t.Error(err)
	}
}

func TestRequestsInFlightAreCapped(t *testing.T) {
	a := newAuthority(t)
	come, goOn := make(chan struct{}), make(chan struct{})
	r := a.replica(t, func(http.ResponseWriter, *http.Request) {
		come <- struct{}{}
		<-goOn
	})
	f := a.front(t, func(c *Config, _ *Server) { c.MaxInFlight = 1 }, r.URL)
	release := sync.OnceFunc(func() { close(goOn) })
	t.Cleanup(release) // before the replica is closed, which waits
	done := make(chan error, 1)
	go func() {
		_, _, err := f.try(t.Context(), http.MethodPost, wire.PathJoin, strings.NewReader("x"), nil)
		done <- err
	}()
	within(t, "the first one arrives", come)
	resp, body := f.post(t, wire.PathJoin, strings.NewReader("x"), nil)
	wantProblem(t, resp, body, wire.Unavailable)
	release()
	if err := within(t, "the first one's answer", done); err != nil {
		t.Error(err)
	}
}

func TestSlowMachinesAreCutOffAndHoldNothing(t *testing.T) {
	a := newAuthority(t)
	r := a.replica(t, status(http.StatusOK, "joined"))
	f := a.front(t, func(c *Config, s *Server) {
		c.MaxInFlight, c.MaxLargeBodies, s.ReadTimeout = 1, 2, 2*time.Second
	}, r.URL)
	for _, sent := range []string{
		"POST " + wire.PathJoin + " HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{",
		"POST " + wire.PathJoin + " HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}",
		"POST " + wire.PathJoin + " HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + strings.Repeat("x", 20_000),
		"POST " + wire.PathJoin + " HTTP/1.1\r\nHost",
	} {
		conn, err := tls.Dial("tcp", f.address, &tls.Config{RootCAs: a.pool()})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(conn, sent); err != nil {
			t.Fatal(err)
		}
		drip, stop := context.WithCancel(t.Context())
		go func() {
			for tick := time.Tick(50 * time.Millisecond); ; {
				select {
				case <-tick:
					_, _ = io.WriteString(conn, " ")
				case <-drip.Done():
					return
				}
			}
		}()
		// Meanwhile others are served.
		if resp, _ := f.post(t, wire.PathJoin, strings.NewReader("x"), nil); resp.StatusCode != http.StatusOK {
			t.Errorf("another machine got %d", resp.StatusCode)
		}
		if err := conn.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
			t.Fatal(err)
		}
		answer, err := io.ReadAll(conn)
		if ne, ok := err.(interface{ Timeout() bool }); ok && ne.Timeout() {
			t.Errorf("it was not cut off: %v: %q", err, answer)
		}
		if strings.Contains(string(answer), "joined") {
			t.Errorf("%q", answer)
		}
		stop()
		conn.Close()
	}
}

func TestHeadersAreCapped(t *testing.T) {
	a := newAuthority(t)
	r := a.replica(t, func(http.ResponseWriter, *http.Request) { t.Error("it went through") })
	f := a.front(t, nil, r.URL)
	resp, _ := f.post(t, wire.PathJoin, strings.NewReader("x"), http.Header{"X-Long": {strings.Repeat("x", 20_000)}})
	if resp.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("got %d", resp.StatusCode)
	}
}

func TestOnlyTLS13(t *testing.T) {
	a := newAuthority(t)
	f := a.front(t, nil, "https://127.0.0.1:1")
	if conn, err := tls.Dial("tcp", f.address, &tls.Config{RootCAs: a.pool(), MaxVersion: tls.VersionTLS12}); err == nil {
		conn.Close()
		t.Error("TLS 1.2 was taken")
	}
	conn, err := tls.Dial("tcp", f.address, &tls.Config{RootCAs: a.pool()})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if c := conn.ConnectionState().CurveID; c != tls.X25519MLKEM768 {
		t.Errorf("the key exchange is %v", c)
	}
}

func TestHealthIsTheGatewaysOwn(t *testing.T) {
	a := newAuthority(t)
	var up atomic.Bool
	r := a.replica(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != pathReadyz {
			t.Errorf("asked for %s", r.URL.Path)
		}
		if !up.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})
	f := a.front(t, nil, r.URL)
	if resp, body := f.send(t, http.MethodGet, "/healthz", nil, nil); resp.StatusCode != http.StatusOK || body != "ok\n" {
		t.Errorf("got %d %q", resp.StatusCode, body)
	}
	ask := func() (*http.Response, string) { return f.send(t, http.MethodGet, "/readyz", nil, nil) }
	resp, body := ask()
	wantProblem(t, resp, body, wire.Unavailable)
	f.handler.cfg.Upstreams.probe(t.Context())
	resp, body = ask()
	wantProblem(t, resp, body, wire.Unavailable)
	up.Store(true)
	f.handler.cfg.Upstreams.probe(t.Context())
	if resp, body := ask(); resp.StatusCode != http.StatusOK || body != "ok\n" {
		t.Errorf("got %d %q", resp.StatusCode, body)
	}
	f.handler.Drain()
	resp, body = ask()
	wantProblem(t, resp, body, wire.Unavailable)
}

func TestStoppingFinishesWhatIsUnderWay(t *testing.T) {
	a := newAuthority(t)
	come, goOn := make(chan struct{}), make(chan struct{})
	r := a.replica(t, func(w http.ResponseWriter, _ *http.Request) {
		close(come)
		<-goOn
		_, _ = io.WriteString(w, "joined")
	})
	f := a.front(t, nil, r.URL)
	release := sync.OnceFunc(func() { close(goOn) })
	t.Cleanup(release) // before the replica is closed, which waits
	got := make(chan string, 1)
	go func() {
		_, body, err := f.try(t.Context(), http.MethodPost, wire.PathJoin, strings.NewReader("x"), nil)
		got <- fmt.Sprint(body, err)
	}()
	within(t, "the join arrives", come)
	f.stop()
	eventually(t, "new connections are refused", func() bool {
		conn, err := tls.Dial("tcp", f.address, &tls.Config{RootCAs: a.pool()})
		if err == nil {
			conn.Close()
		}
		return err != nil
	})
	select {
	case err := <-f.stopped:
		t.Fatalf("it stopped with a join under way: %v", err)
	default:
	}
	release()
	if g := within(t, "the answer", got); g != "joined<nil>" {
		t.Errorf("the join under way got %s", g)
	}
	if err := within(t, "the end", f.stopped); err != nil {
		t.Error(err)
	}
}

func TestAnswersAreCounted(t *testing.T) {
	a := newAuthority(t)
	r := a.replica(t, status(http.StatusForbidden, "refused"))
	registry := prometheus.NewRegistry()
	f := a.front(t, func(c *Config, _ *Server) { c.Metrics = registry }, r.URL)
	f.post(t, wire.PathJoin, strings.NewReader("x"), nil)
	f.post(t, "/bcjt_secret", strings.NewReader("x"), nil)
	want := `
# HELP join_gateway_answers_total Answers to machines, by endpoint and status.
# TYPE join_gateway_answers_total counter
join_gateway_answers_total{endpoint="join",status="403"} 1
join_gateway_answers_total{endpoint="unknown",status="404"} 1
# HELP join_gateway_refused_sources Sources that have refusals to their account, or had lately.
# TYPE join_gateway_refused_sources gauge
join_gateway_refused_sources 1
`
	if err := testutil.GatherAndCompare(registry, strings.NewReader(want), "join_gateway_answers_total", "join_gateway_refused_sources"); err != nil {
		t.Error(err)
	}
}

func TestR04_GatewayLinksNeitherDatabaseNorKubernetesNorKeys(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "github.com/better-compute/join-operator/cmd/gateway").Output()
	if err != nil {
		t.Fatal(err)
	}
	ours := 0
	for _, pkg := range strings.Fields(string(out)) {
		if strings.HasPrefix(pkg, "github.com/better-compute/join-operator/") {
			ours++
			switch strings.TrimPrefix(pkg, "github.com/better-compute/join-operator/") {
			case "api/wire", "joinsvc/gateway", "cmd/gateway":
			default:
				t.Errorf("the gateway links %s", pkg)
			}
		}
		for _, forbidden := range []string{"k8s.io/", "github.com/jackc/", "github.com/go-jose/", "sigs.k8s.io/controller-runtime"} {
			if strings.HasPrefix(pkg, forbidden) {
				t.Errorf("the gateway links %s", pkg)
			}
		}
	}
	if ours < 3 {
		t.Errorf("go list said %q", out)
	}
}
