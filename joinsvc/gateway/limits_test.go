package gateway

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/better-compute/join-operator/api/wire"
)

func TestRefusalsAreWeighedAndSuccessIsNot(t *testing.T) {
	a := newAuthority(t)
	var refuses atomic.Bool
	r := a.replica(t, func(w http.ResponseWriter, r *http.Request) {
		if refuses.Load() && r.URL.Path != wire.PathRenew {
			status(http.StatusForbidden, "refused")(w, r)
			return
		}
		status(http.StatusOK, "joined")(w, r)
	})
	f := a.front(t, func(c *Config, _ *Server) { c.Refusals = limiter(t, 3, 0.001) }, r.URL)
	for range 20 {
		if resp, _ := f.post(t, wire.PathJoin, strings.NewReader("x"), nil); resp.StatusCode != http.StatusOK {
			t.Fatalf("an honest machine got %d", resp.StatusCode)
		}
	}
	refuses.Store(true)
	for range 3 {
		if resp, body := f.post(t, wire.PathJoin, strings.NewReader("x"), nil); resp.StatusCode != http.StatusForbidden || body != "refused" {
			t.Fatalf("got %d %q", resp.StatusCode, body)
		}
	}
	for _, path := range []string{wire.PathJoin, wire.PathConfirm} {
		resp, body := f.post(t, path, strings.NewReader("x"), nil)
		wantProblem(t, resp, body, wire.RateLimited)
		if n, err := strconv.Atoi(resp.Header.Get("Retry-After")); err != nil || n < 900 || n > 1000 {
			t.Errorf("Retry-After %q", resp.Header.Get("Retry-After"))
		}
	}
	if resp, _ := f.post(t, wire.PathRenew, strings.NewReader("x"), nil); resp.StatusCode != http.StatusOK {
		t.Errorf("renewals have a budget of their own: %d", resp.StatusCode)
	}
	if resp, _ := f.send(t, http.MethodGet, wire.PathBundle, nil, nil); resp.StatusCode == http.StatusTooManyRequests {
		t.Error("what is public has a budget of its own")
	}
}

func TestRenewalsAndPollsHaveABudget(t *testing.T) {
	a := newAuthority(t)
	r := a.replica(t, status(http.StatusOK, ""))
	f := a.front(t, func(c *Config, _ *Server) { c.Requests = limiter(t, 3, 0.001) }, r.URL)
	for _, path := range []string{wire.PathRenew, wire.PathCommands, wire.PathRenew} {
		if resp, _ := f.post(t, path, strings.NewReader("x"), nil); resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: %d", path, resp.StatusCode)
		}
	}
	resp, body := f.post(t, wire.PathCommands, strings.NewReader("x"), nil)
	wantProblem(t, resp, body, wire.RateLimited)
	if resp, _ := f.post(t, wire.PathJoin, strings.NewReader("x"), nil); resp.StatusCode != http.StatusOK {
		t.Errorf("a join got %d", resp.StatusCode)
	}
}

func TestWhatAnAnswerCosts(t *testing.T) {
	problem := func(c wire.Code) string {
		return fmt.Sprintf(`{"status":%d,"title":"x","code":"%s"}`, c.Status(), c)
	}
	for _, tc := range []struct {
		answer answer
		want   float64
	}{
		{answer{status: 200}, 0},
		{answer{status: 204}, 0},
		{answer{status: 403, body: []byte(problem(wire.AccessDenied))}, 1},
		{answer{status: 400, body: []byte(problem(wire.InvalidInput))}, 1},
		{answer{status: 400, body: []byte(problem(wire.Unsupported))}, 1},
		{answer{status: 400, body: []byte(`{"code":"INVALID_INPUT","detail":"\"STALE_BUNDLE\""}`)}, 1},
		{answer{status: 400, body: []byte(problem(wire.StaleBundle))}, staleWeight},
		{answer{status: 413}, 1},
		{answer{status: 429}, 0},
		{answer{status: 500}, 0},
		{answer{status: 503}, 0},
	} {
		if got := cost(&tc.answer); got != tc.want {
			t.Errorf("%d %s costs %v, want %v", tc.answer.status, tc.answer.body, got, tc.want)
		}
	}
}

func TestWhoLeavesBeforeTheRefusalIsCountedAllTheSame(t *testing.T) {
	a := newAuthority(t)
	come, goOn := make(chan struct{}), make(chan struct{})
	r := a.replica(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		come <- struct{}{}
		<-goOn
		if r.Context().Err() != nil {
			t.Error("the request to the service was given up")
		}
		w.WriteHeader(http.StatusForbidden)
	})
	f := a.front(t, func(c *Config, _ *Server) { c.Refusals = limiter(t, 1, 0.001) }, r.URL)
	release := sync.OnceFunc(func() { close(goOn) })
	t.Cleanup(release) // before the replica is closed, which waits
	conn, err := tls.Dial("tcp", f.address, &tls.Config{RootCAs: a.pool()})
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.WriteString(conn, "POST "+wire.PathJoin+" HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx")
	within(t, "the request arrives", come)
	conn.Close()
	release()
	eventually(t, "the refusal is counted", func() bool { return f.handler.cfg.Refusals.Wait(netip.MustParseAddr("127.0.0.1")) > 0 })
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
		{2, []string{"6.6.6.6, 203.0.113.7", " 10.0.0.1 "}, "203.0.113.7"},
		{2, []string{"203.0.113.7"}, "192.0.2.1"},
		{1, []string{"203.0.113.7:4711"}, "203.0.113.7"},
		{1, []string{"[2001:db8::7]:4711"}, "2001:db8::7"},
		{1, []string{"2001:db8::7%eth0"}, "2001:db8::7"},
		{1, []string{"::ffff:203.0.113.7"}, "203.0.113.7"},
		{1, []string{"6.6.6.6, no address"}, "192.0.2.1"},
		{1, []string{"6.6.6.6,"}, "192.0.2.1"},
		{1, []string{""}, "192.0.2.1"},
		{1, nil, "192.0.2.1"},
	} {
		r := httptest.NewRequest(http.MethodPost, "/", nil)
		r.RemoteAddr = "192.0.2.1:1234"
		r.Header["X-Forwarded-For"] = tc.forwarded
		if got := source(r, tc.hops).String(); got != tc.want {
			t.Errorf("%d hops, %q: %s, want %s", tc.hops, tc.forwarded, got, tc.want)
		}
	}
}

func TestProxyProtocolIsBelievedFromItsNetworksOnly(t *testing.T) {
	a := newAuthority(t)
	var seen atomic.Value
	r := a.replica(t, func(_ http.ResponseWriter, r *http.Request) { seen.Store(r.Header.Get(sourceHeader)) })
	speak := func(f *front, preface string) (string, error) {
		raw, err := net.Dial("tcp", f.address)
		if err != nil {
			t.Fatal(err)
		}
		defer raw.Close()
		if err := raw.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(raw, preface)
		conn := tls.Client(raw, &tls.Config{RootCAs: a.pool(), ServerName: "127.0.0.1"})
		if _, err := io.WriteString(conn, "POST "+wire.PathJoin+" HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx"); err != nil {
			return "", err
		}
		answer, err := io.ReadAll(conn)
		if err != nil || !strings.HasPrefix(string(answer), "HTTP/1.1 200") {
			return "", fmt.Errorf("%w: %q", err, answer)
		}
		return seen.Load().(string), nil
	}
	header := "PROXY TCP4 203.0.113.7 10.0.0.1 1234 443\r\n"
	trusted := a.front(t, func(_ *Config, s *Server) { s.ProxyProtocol = []netip.Prefix{prefix("127.0.0.0/8")} }, r.URL)
	if got, err := speak(trusted, header); err != nil || got != "203.0.113.7" {
		t.Errorf("%q, %v", got, err)
	}
	if got, err := speak(trusted, "PROXY TCP6 2001:db8::7 2001:db8::1 1234 443\r\n"); err != nil || got != "2001:db8::7" {
		t.Errorf("%q, %v", got, err)
	}
	if got, err := speak(trusted, ""); err == nil {
		t.Errorf("without a header a proxy's connection was taken, as %q", got)
	}
	other := a.front(t, func(_ *Config, s *Server) { s.ProxyProtocol = []netip.Prefix{prefix("192.0.2.0/24")} }, r.URL)
	if got, err := speak(other, ""); err != nil || got != "127.0.0.1" {
		t.Errorf("%q, %v", got, err)
	}
	if got, err := speak(other, header); err == nil {
		t.Errorf("a stranger's header was taken, as %q", got)
	}
}

func TestConnectionsAreCapped(t *testing.T) {
	dial := func(t *testing.T, l net.Listener) net.Conn {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	listen := func(t *testing.T, limit, perSource int) (*capped, chan net.Conn) {
		inner, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		l := newCapped(inner, limit, perSource)
		accepted := make(chan net.Conn)
		var wg sync.WaitGroup
		wg.Go(func() {
			defer close(accepted)
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				accepted <- c
			}
		})
		t.Cleanup(func() {
			l.Close()
			for c := range accepted {
				c.Close()
			}
			wg.Wait()
		})
		return l, accepted
	}
	t.Run("in all, the next one waits", func(t *testing.T) {
		l, accepted := listen(t, 2, 0)
		for range 3 {
			dial(t, l)
		}
		one, two := <-accepted, <-accepted
		select {
		case <-accepted:
			t.Fatal("a third was accepted")
		case <-time.After(50 * time.Millisecond):
		}
		one.Close()
		one.Close() // gives one place back, not two
		(<-accepted).Close()
		two.Close()
		if len(l.slots) > 1 { // Accept holds one while it waits
			t.Errorf("%d places are taken", len(l.slots))
		}
	})
	t.Run("of a source, the next one is closed", func(t *testing.T) {
		l, accepted := listen(t, 10, 1)
		dial(t, l)
		one := <-accepted
		refused := dial(t, l)
		if err := refused.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
			t.Fatal(err)
		}
		if _, err := refused.Read(make([]byte, 1)); err == nil || strings.Contains(err.Error(), "timeout") {
			t.Errorf("the second was not closed: %v", err)
		}
		one.Close()
		dial(t, l)
		(<-accepted).Close()
		eventually(t, "the count is forgotten", func() bool {
			l.mu.Lock()
			defer l.mu.Unlock()
			return len(l.counts) == 0
		})
	})
}

func TestLimiterRefillsAndCountsNetworks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := limiter(t, 2, 1)
		one, sibling, other := netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8::ffff"), netip.MustParseAddr("2001:db8:0:1::1")
		l.Spend(one, 1)
		l.Spend(sibling, 1)
		if l.Wait(one) != time.Second || l.Wait(other) != 0 {
			t.Error("a /64 is one source, and another is another")
		}
		time.Sleep(time.Second)
		if l.Wait(one) != 0 {
			t.Error("one a second is forgiven")
		}
		time.Sleep(time.Hour)
		l.Spend(one, 1)
		l.Spend(one, 1)
		if l.Wait(one) == 0 {
			t.Error("it refills beyond the burst")
		}
		four, next := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
		for range 100 {
			l.Spend(four, 1)
		}
		if l.Wait(next) != 0 {
			t.Error("an IPv4 address is a source")
		}
		if w := l.Wait(four); w != 3*time.Second {
			t.Errorf("debts are bounded by a burst: %s", w)
		}
	})
}

func TestTakeIsTheWholeBudgetAndNoMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := limiter(t, 100, 1)
		var taken atomic.Int64
		var wg sync.WaitGroup
		for range 10 {
			wg.Go(func() {
				for range 100 {
					if l.Take(netip.MustParseAddr("192.0.2.1")) == 0 {
						taken.Add(1)
					}
				}
			})
		}
		wg.Wait()
		if taken.Load() != 100 {
			t.Errorf("%d were let through", taken.Load())
		}
	})
}

func TestLimiterForgetsTheOldestSources(t *testing.T) {
	l := limiter(t, 1, 0.001)
	old, watched := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	l.Spend(old, 1)
	l.Spend(watched, 1)
	for i := range maxSources {
		l.Spend(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 1)
		if i%1000 == 0 && l.Wait(watched) == 0 {
			t.Fatal("who keeps asking is forgotten")
		}
	}
	if l.Sources() != maxSources || l.recent.Len() != maxSources {
		t.Errorf("%d buckets, %d in the list", l.Sources(), l.recent.Len())
	}
	if l.Wait(old) != 0 {
		t.Error("the oldest is not forgotten")
	}
	if l.Wait(netip.Addr{}) != 0 {
		t.Error("no address has no refusals yet")
	}
}

func TestLimitsOfNothingAreMistakes(t *testing.T) {
	for _, l := range [][2]float64{{0, 1}, {600, 0}, {-1, 5}, {600, -5}} {
		if _, err := NewLimiter(l[0], l[1]); err == nil {
			t.Errorf("a burst of %v and a rate of %v are taken", l[0], l[1])
		}
	}
}
