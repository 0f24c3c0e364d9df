package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/better-compute/join-operator/api/wire"
)

func TestAnotherReplicaAnswersWhereOneIsGone(t *testing.T) {
	a := newAuthority(t)
	dead := a.replica(t, nil)
	dead.Close()
	lives := a.replica(t, status(http.StatusOK, "joined"))
	for name, broken := range map[string]string{
		"gone":                      dead.URL,
		"breaks off":                a.replica(t, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }).URL,
		"breaks off in the answer":  a.replica(t, halfAnAnswer).URL,
		"endless answer":            a.replica(t, endlessAnswer).URL,
		"of another authority":      newAuthority(t).replica(t, status(http.StatusOK, "stolen")).URL,
		"speaks something else too": notHTTP(t),
	} {
		t.Run(name, func(t *testing.T) {
			f := a.front(t, nil, broken, lives.URL)
			for range 6 {
				if resp, body := f.post(t, wire.PathJoin, strings.NewReader("x"), nil); resp.StatusCode != http.StatusOK || body != "joined" {
					t.Fatalf("got %d %.80q", resp.StatusCode, body)
				}
			}
			alone := a.front(t, nil, broken)
			resp, body := alone.post(t, wire.PathJoin, strings.NewReader("x"), nil)
			wantProblem(t, resp, body, wire.Unavailable)
		})
	}
}

func halfAnAnswer(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Length", "100")
	_, _ = io.WriteString(w, "half")
	panic(http.ErrAbortHandler)
}

func endlessAnswer(w http.ResponseWriter, _ *http.Request) {
	for {
		if _, err := w.Write(make([]byte, 64<<10)); err != nil {
			return
		}
	}
}

// notHTTP accepts connections and says hello.
func notHTTP(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, "220 hello\r\n")
			c.Close()
		}
	}()
	return "https://" + l.Addr().String()
}

func TestRequestIsSentToAtMostTwoReplicasAndRefusalsToOne(t *testing.T) {
	a := newAuthority(t)
	var asked atomic.Int64
	breaks := func(http.ResponseWriter, *http.Request) { asked.Add(1); panic(http.ErrAbortHandler) }
	f := a.front(t, nil, a.replica(t, breaks).URL, a.replica(t, breaks).URL, a.replica(t, breaks).URL)
	resp, body := f.post(t, wire.PathJoin, strings.NewReader("x"), nil)
	wantProblem(t, resp, body, wire.Unavailable)
	if asked.Load() != tries {
		t.Errorf("it was sent %d times", asked.Load())
	}
	for _, code := range []int{http.StatusForbidden, http.StatusBadRequest, http.StatusServiceUnavailable, http.StatusInternalServerError} {
		asked.Store(0)
		answers := func(w http.ResponseWriter, _ *http.Request) { asked.Add(1); w.WriteHeader(code) }
		f := a.front(t, nil, a.replica(t, answers).URL, a.replica(t, answers).URL)
		if resp, _ := f.post(t, wire.PathJoin, strings.NewReader("x"), nil); resp.StatusCode != code || asked.Load() != 1 {
			t.Errorf("%d: got %d after %d were asked", code, resp.StatusCode, asked.Load())
		}
	}
}

func TestReplicaThatIsKilledUnderLoadCostsNoJoin(t *testing.T) {
	a := newAuthority(t)
	dies := a.replica(t, status(http.StatusOK, "joined"))
	lives := a.replica(t, status(http.StatusOK, "joined"))
	f := a.front(t, nil, dies.URL, lives.URL)
	var wg sync.WaitGroup
	var done atomic.Int64
	for range 8 {
		wg.Go(func() {
			for range 40 {
				resp, body, err := f.try(t.Context(), http.MethodPost, wire.PathJoin, strings.NewReader("x"), nil)
				if err != nil || resp.StatusCode != http.StatusOK || body != "joined" {
					t.Errorf("%v %q", err, body)
					return
				}
				if done.Add(1) == 100 {
					dies.Listener.Close()
					dies.CloseClientConnections()
				}
			}
		})
	}
	wg.Wait()
}

func TestBusyReplicaGetsNoMoreThanTheFreeOne(t *testing.T) {
	a := newAuthority(t)
	var joins [2]atomic.Int64
	var stuck atomic.Int64 // which one is, counted from 1
	come, goOn := make(chan struct{}), make(chan struct{})
	replica := func(i int) string {
		return a.replica(t, func(http.ResponseWriter, *http.Request) {
			joins[i].Add(1)
			if stuck.CompareAndSwap(0, int64(i+1)) {
				close(come)
				<-goOn
			}
		}).URL
	}
	f := a.front(t, nil, replica(0), replica(1))
	release := sync.OnceFunc(func() { close(goOn) })
	t.Cleanup(release) // before the replica is closed, which waits
	var wg sync.WaitGroup
	wg.Go(func() { _, _, _ = f.try(t.Context(), http.MethodPost, wire.PathJoin, strings.NewReader("x"), nil) })
	within(t, "a join arrives", come)
	for range 20 {
		f.post(t, wire.PathJoin, strings.NewReader("x"), nil)
	}
	busy := stuck.Load() - 1
	if n := joins[busy].Load(); n != 1 {
		t.Errorf("the busy replica got %d more", n-1)
	}
	release()
	wg.Wait()
	for range 20 {
		f.post(t, wire.PathJoin, strings.NewReader("x"), nil)
	}
	if n := joins[busy].Load(); n != 11 {
		t.Errorf("of 20 joins, one after the other, one replica got %d", n-1)
	}
}

func TestReplicaThatIsNotReadyIsAskedLast(t *testing.T) {
	a := newAuthority(t)
	var up atomic.Bool
	var starting atomic.Int64
	one := a.replica(t, func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path != pathReadyz:
			starting.Add(1)
			_, _ = io.WriteString(w, "joined")
		case !up.Load():
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})
	two := a.replica(t, status(http.StatusOK, "joined"))
	f := a.front(t, nil, one.URL, two.URL)
	ups := f.handler.cfg.Upstreams
	ups.probe(t.Context())
	if n, all := ups.count(); n != 1 || all != 2 {
		t.Errorf("%d of %d are ready", n, all)
	}
	for range 10 {
		f.post(t, wire.PathJoin, strings.NewReader("x"), nil)
	}
	if starting.Load() != 0 {
		t.Errorf("the one that is not ready was asked %d times", starting.Load())
	}
	// Where none is ready, one is asked all the same: it says 503 itself, or knows better.
	two.Close()
	if resp, body := f.post(t, wire.PathJoin, strings.NewReader("x"), nil); resp.StatusCode != http.StatusOK || body != "joined" {
		t.Errorf("got %d %q", resp.StatusCode, body)
	}
	up.Store(true)
	ups.probe(t.Context())
	if n, _ := ups.count(); n != 1 {
		t.Errorf("%d are ready", n)
	}
}

func TestNamesAreFollowed(t *testing.T) {
	a := newAuthority(t)
	r := a.replica(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, r.Host+" "+r.TLS.ServerName)
	})
	_, port, err := net.SplitHostPort(r.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	f := a.front(t, nil, "https://join-service.test:"+port)
	ups := f.handler.cfg.Upstreams
	addresses := func(list ...string) lookup {
		return func(_ context.Context, _, host string) ([]netip.Addr, error) {
			if host != "join-service.test" {
				t.Errorf("asked for %q", host)
			}
			var found []netip.Addr
			for _, s := range list {
				found = append(found, netip.MustParseAddr(s))
			}
			return found, nil
		}
	}
	ups.resolve(t.Context(), addresses("127.0.0.1", "127.0.0.1", "::ffff:127.0.0.2"))
	before := *ups.replicas.Load()
	if len(before) != 2 {
		t.Fatalf("%d replicas", len(before))
	}
	if resp, body := f.post(t, wire.PathJoin, strings.NewReader("x"), nil); resp.StatusCode != http.StatusOK || body != "join-service.test:"+port+" join-service.test" {
		t.Errorf("got %d %q", resp.StatusCode, body)
	}
	ups.resolve(t.Context(), addresses("127.0.0.1", "127.0.0.3"))
	after := *ups.replicas.Load()
	if len(after) != 2 || after[0] != before[0] || after[1] == before[1] || after[1].address != "127.0.0.3:"+port {
		t.Errorf("%v, then %v", before, after)
	}
	for _, broken := range []lookup{
		addresses(),
		func(context.Context, string, string) ([]netip.Addr, error) { return nil, errors.New("no such host") },
	} {
		ups.resolve(t.Context(), broken)
		if now := *ups.replicas.Load(); len(now) != 2 || now[0] != after[0] || now[1] != after[1] {
			t.Errorf("a name that is not resolved lost its replicas: %v", now)
		}
	}
}

func TestRunFollowsReplicas(t *testing.T) {
	a := newAuthority(t)
	r := a.replica(t, status(http.StatusOK, "ok"))
	f := a.front(t, nil, strings.Replace(r.URL, "127.0.0.1", "localhost", 1), r.URL)
	ups := f.handler.cfg.Upstreams
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); ups.Run(ctx) }()
	eventually(t, "it is ready", ups.Ready)
	r.Close()
	eventually(t, "it is not", func() bool { return !ups.Ready() })
	stop()
	<-done
}

func TestURLsOfReplicasAreChecked(t *testing.T) {
	a := newAuthority(t)
	id := a.identity(t)
	for _, bad := range [][]string{nil, {""}, {"http://a"}, {"a:8443"}, {"https://"}, {"https://a/path"}, {"https://u:p@a"}, {"https://a?x"}, {"https://a", "https://a:b"}} {
		if _, err := NewUpstreams(bad, id, discard); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
	u, err := NewUpstreams([]string{"https://a/", "https://[2001:db8::1]:8443"}, id, discard)
	if err != nil {
		t.Fatal(err)
	}
	if r := *u.replicas.Load(); r[0].address != "a:443" || r[1].address != "[2001:db8::1]:8443" {
		t.Errorf("%q, %q", r[0].address, r[1].address)
	}
}

func TestCertificatesAreReadAgain(t *testing.T) {
	a, next := newAuthority(t), newAuthority(t)
	dir := t.TempDir()
	a.files(t, dir)
	id, err := OpenIdentity(dir, filepath.Join(dir, "ca.crt"), discard)
	if err != nil {
		t.Fatal(err)
	}
	old := a.replica(t, status(http.StatusOK, "joined"))
	f := a.front(t, func(c *Config, s *Server) {
		s.Identity = id
		c.Upstreams, err = NewUpstreams([]string{old.URL}, id, discard)
		if err != nil {
			t.Fatal(err)
		}
	}, old.URL)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); id.Run(ctx) }()
	defer func() { stop(); <-done }()

	// The two writes of a rotation: in between the last good pair is served.
	before := id.current.Load()
	if err := os.WriteFile(filepath.Join(dir, "tls.key"), []byte("half a key"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := id.reload(); err == nil || id.current.Load() != before {
		t.Errorf("%v", err)
	}
	if resp, _ := f.post(t, wire.PathJoin, strings.NewReader("x"), nil); resp.StatusCode != http.StatusOK {
		t.Errorf("got %d", resp.StatusCode)
	}
	next.files(t, dir)
	trusting := &tls.Config{RootCAs: next.pool()}
	eventually(t, "machines see the new certificate", func() bool {
		conn, err := tls.Dial("tcp", f.address, trusting)
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
	// And the service is verified under the new CA, on new connections.
	old.CloseClientConnections()
	f.client = &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: trusting}}
	resp, body := f.post(t, wire.PathJoin, strings.NewReader("x"), nil)
	wantProblem(t, resp, body, wire.Unavailable)
}

func TestCertificatesThatCannotBeUsedStopTheStart(t *testing.T) {
	a := newAuthority(t)
	dir := t.TempDir()
	if _, err := OpenIdentity(dir, "", discard); err == nil {
		t.Error("an empty folder is taken")
	}
	a.files(t, dir)
	if _, err := OpenIdentity(dir, "", discard); err != nil {
		t.Error(err)
	}
	if _, err := OpenIdentity(dir, filepath.Join(dir, "tls.key"), discard); err == nil {
		t.Error("a CA file without a certificate is taken")
	}
	other := t.TempDir()
	a.files(t, other)
	key, err := os.ReadFile(filepath.Join(other, "tls.key"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "tls.key"), key, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenIdentity(dir, "", discard); err == nil {
		t.Error("a key of another certificate is taken")
	}
}

func TestListThatBreaksOffDoesNotLookWhole(t *testing.T) {
	a := newAuthority(t)
	r := a.replica(t, func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write(make([]byte, 64<<10)) // in chunks
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	})
	f := a.front(t, nil, r.URL)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if _, _, err := f.try(ctx, http.MethodGet, wire.PathCRL, nil, nil); err == nil {
		t.Error("half a list was answered as a whole one")
	}
}
