package httpapi

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/attestors"
	"github.com/better-compute/join-operator/joinsvc"
)

// script is a service that does what a test says; what it is about is time and
// order, which the real service does not let a test decide.
type script struct {
	join     func(context.Context, *wire.Join, netip.Addr) (*wire.Answer, error)
	recorded func(*joinsvc.RefusedJoin)
}

func (s script) Join(ctx context.Context, j *wire.Join, from netip.Addr) (*wire.Answer, error) {
	return s.join(ctx, j, from)
}
func (script) Confirm(context.Context, *wire.Confirm) error { return nil }
func (s script) RecordRefusal(_ context.Context, r *joinsvc.RefusedJoin) {
	if s.recorded != nil {
		s.recorded(r)
	}
}

type signer struct{ err error }

func (s signer) Sign(typ string, payload []byte) (string, error) {
	return typ + " " + string(payload), s.err
}

func scripted(tb testing.TB, s script, log io.Writer) *Handler {
	tb.Helper()
	logger := slog.New(slog.DiscardHandler)
	if log != nil {
		logger = slog.New(LogHandler(slog.NewTextHandler(log, nil)))
	}
	h, err := New(Config{
		Service: s, Signer: signer{}, Bundles: NewBundles(nil, logger), Ready: func() error { return nil }, Logger: logger, Metrics: prometheus.NewRegistry(),
	})
	if err != nil {
		tb.Fatal(err)
	}
	return h
}

func envelope(tb testing.TB) string {
	tb.Helper()
	body, err := json.Marshal(&wire.Join{Role: wire.RoleNode, CSR: []byte("request")})
	if err != nil {
		tb.Fatal(err)
	}
	return string(body)
}

func refusedFor(reason string) *joinsvc.RefusedJoin {
	return &joinsvc.RefusedJoin{Attestor: "join-token", Refusal: attestors.Refuse(reason).InTenant("factory").Because("a detail about %s", reason)}
}

// leaving notes when an answer's bytes leave.
type leaving struct {
	*httptest.ResponseRecorder
	at time.Time
}

func (l *leaving) Write(b []byte) (int, error) {
	l.at = time.Now()
	return l.ResponseRecorder.Write(b)
}

// TestR11_RefusalsAreTheSameBytesAtAMultipleOfThePace takes refusals of several
// reasons that took different times to find.
func TestR11_RefusalsAreTheSameBytesAtAMultipleOfThePace(t *testing.T) {
	const want = `{"status":403,"title":"Join refused","code":"ACCESS_DENIED"}`
	for _, took := range []time.Duration{0, time.Microsecond, 50 * time.Millisecond, 99 * time.Millisecond, 100 * time.Millisecond, 101 * time.Millisecond, 2345 * time.Millisecond} {
		synctest.Test(t, func(t *testing.T) {
			var recordedAt time.Time
			var answer *leaving
			h := scripted(t, script{
				join: func(context.Context, *wire.Join, netip.Addr) (*wire.Answer, error) {
					time.Sleep(took)
					return nil, fmt.Errorf("wrapped: %w", refusedFor(fmt.Sprintf("reason-%d", took)))
				},
				recorded: func(*joinsvc.RefusedJoin) {
					recordedAt = time.Now()
					if !answer.Flushed || answer.Body.Len() == 0 {
						t.Error("recorded before the answer left")
					}
				},
			}, nil)
			answer = &leaving{ResponseRecorder: httptest.NewRecorder()}
			came := time.Now()
			h.ServeHTTP(answer, httptest.NewRequest(http.MethodPost, wire.PathJoin, strings.NewReader(envelope(t))))
			elapsed := answer.at.Sub(came)
			if elapsed%wire.RefusalPace != 0 || elapsed <= took || elapsed > took+wire.RefusalPace {
				t.Errorf("took %v, left after %v", took, elapsed)
			}
			if recordedAt.IsZero() {
				t.Error("not recorded")
			}
			if answer.Code != http.StatusForbidden || answer.Body.String() != want {
				t.Errorf("answered %d %s", answer.Code, answer.Body)
			}
			headers := answer.Header()
			if headers.Get("Content-Type") != "application/problem+json" || headers.Get("Content-Length") != fmt.Sprint(len(want)) || headers.Get("Cache-Control") != "no-store" || len(headers) != 3 {
				t.Errorf("headers %v", headers)
			}
		})
	}
}

// TestARefusalWhoseMachineLeftIsRecordedAllTheSame does not wait for nobody.
func TestARefusalWhoseMachineLeftIsRecordedAllTheSame(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, leave := context.WithCancel(t.Context())
		recorded := false
		h := scripted(t, script{
			join: func(ctx context.Context, _ *wire.Join, _ netip.Addr) (*wire.Answer, error) {
				leave()
				if ctx.Err() != nil {
					t.Error("the join ended with its machine")
				}
				return nil, refusedFor("late")
			},
			recorded: func(*joinsvc.RefusedJoin) { recorded = true },
		}, nil)
		begun := time.Now()
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, wire.PathJoin, strings.NewReader(envelope(t))).WithContext(ctx))
		if !recorded || time.Since(begun) != 0 || w.Body.Len() > 0 {
			t.Errorf("recorded %t after %v, body %q", recorded, time.Since(begun), w.Body)
		}
	})
}

// TestErrorsBecomeProblems is every kind of error that a service returns.
func TestErrorsBecomeProblems(t *testing.T) {
	for name, c := range map[string]struct {
		err        error
		status     int
		code       wire.Code
		detail     string
		retryAfter string
	}{
		"stale":             {&joinsvc.Problem{Code: wire.StaleBundle}, 400, wire.StaleBundle, "", ""},
		"unsupported":       {&joinsvc.Problem{Code: wire.Unsupported}, 400, wire.Unsupported, "", ""},
		"invalid":           {&joinsvc.Problem{Code: wire.InvalidInput, Detail: "csr: x"}, 400, wire.InvalidInput, "csr: x", ""},
		"rate limited":      {&joinsvc.Problem{Code: wire.RateLimited, RetryAfter: 1500 * time.Millisecond}, 429, wire.RateLimited, "", "2"},
		"unavailable":       {&joinsvc.Problem{Code: wire.Unavailable, RetryAfter: time.Millisecond, Cause: errors.New("secret cause")}, 503, wire.Unavailable, "", "1"},
		"unavailable, when": {&joinsvc.Problem{Code: wire.Unavailable}, 503, wire.Unavailable, "", "5"},
		"a bug":             {errors.New("secret bug"), 500, wire.Internal, "", ""},
		"wrapped":           {fmt.Errorf("x: %w", &joinsvc.Problem{Code: wire.StaleBundle}), 400, wire.StaleBundle, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			var log bytes.Buffer
			h := scripted(t, script{join: func(context.Context, *wire.Join, netip.Addr) (*wire.Answer, error) { return nil, c.err }}, &log)
			w := httptest.NewRecorder()
			r := httptest.NewRequest(http.MethodPost, wire.PathJoin, strings.NewReader(envelope(t)))
			r.Header.Set("X-Request-Id", "abc-123")
			h.ServeHTTP(w, r)
			var p wire.Problem
			if err := json.Unmarshal(w.Body.Bytes(), &p); err != nil {
				t.Fatal(err)
			}
			if w.Code != c.status || p.Status != c.status || p.Code != c.code || p.Detail != c.detail || p.Title != c.code.Title() || w.Header().Get("Retry-After") != c.retryAfter {
				t.Errorf("answered %d %s with Retry-After %q", w.Code, w.Body, w.Header().Get("Retry-After"))
			}
			if strings.Contains(w.Body.String(), "secret") {
				t.Errorf("the cause is in the answer: %s", w.Body)
			}
			if strings.Contains(c.err.Error(), "secret") && !strings.Contains(log.String(), "request_id=abc-123") {
				t.Errorf("the log does not say which request it was: %s", log.String())
			}
		})
	}
}

// TestAPanicEndsOneRequestOnly also keeps what was panicked with out of the log.
func TestAPanicEndsOneRequestOnly(t *testing.T) {
	var log bytes.Buffer
	n := 0
	h := scripted(t, script{join: func(context.Context, *wire.Join, netip.Addr) (*wire.Answer, error) {
		n++
		if n == 1 {
			panic("the token is bcjt_secret")
		}
		return &wire.Answer{Outcome: wire.OutcomePending}, nil
	}}, &log)
	for i, want := range []int{http.StatusInternalServerError, http.StatusOK} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, wire.PathJoin, strings.NewReader(envelope(t))))
		if w.Code != want {
			t.Errorf("request %d: %d %s", i+1, w.Code, w.Body)
		}
		if i == 0 && w.Body.String() != `{"status":500,"title":"Internal error","code":"INTERNAL"}` {
			t.Errorf("answered %s", w.Body)
		}
	}
	if strings.Contains(log.String(), "bcjt_secret") || !strings.Contains(log.String(), "panicked") {
		t.Errorf("log: %s", log.String())
	}
}

func TestTheGatewaysWordOnTheSourceIsTaken(t *testing.T) {
	for name, c := range map[string]struct {
		headers []string
		want    string
	}{
		"IPv4":    {[]string{"192.0.2.7"}, "192.0.2.7"},
		"IPv6":    {[]string{"2001:db8::1"}, "2001:db8::1"},
		"none":    {nil, "invalid IP"},
		"garbage": {[]string{"gateway"}, "invalid IP"},
		"several": {[]string{"192.0.2.7, 192.0.2.8"}, "invalid IP"},
		"twice":   {[]string{"192.0.2.7", "192.0.2.8"}, "invalid IP"},
	} {
		t.Run(name, func(t *testing.T) {
			var got netip.Addr
			h := scripted(t, script{join: func(_ context.Context, _ *wire.Join, from netip.Addr) (*wire.Answer, error) {
				got = from
				return &wire.Answer{}, nil
			}}, nil)
			r := httptest.NewRequest(http.MethodPost, wire.PathJoin, strings.NewReader(envelope(t)))
			for _, v := range c.headers {
				r.Header.Add("X-Forwarded-For", v)
			}
			h.ServeHTTP(httptest.NewRecorder(), r)
			if got.String() != c.want {
				t.Errorf("source %v, want %s", got, c.want)
			}
		})
	}
}

// TestNothingIsDecidedWhileTheReplicaIsNotReady keeps a join from being committed
// whose answer could not be signed.
func TestNothingIsDecidedWhileTheReplicaIsNotReady(t *testing.T) {
	h := scripted(t, script{join: func(context.Context, *wire.Join, netip.Addr) (*wire.Answer, error) {
		t.Error("decided")
		return &wire.Answer{}, nil
	}}, nil)
	h.cfg.Ready = func() error { return errors.New("no keys") }
	for path, want := range map[string]int{wire.PathJoin: 503, "/readyz": 503, "/healthz": 200} {
		method, body := http.MethodGet, ""
		if path == wire.PathJoin {
			method, body = http.MethodPost, envelope(t)
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(method, path, strings.NewReader(body)))
		if w.Code != want || strings.Contains(w.Body.String(), "no keys") {
			t.Errorf("%s: %d %s", path, w.Code, w.Body)
		}
	}
	// What is wrong with the envelope is said all the same: it comes first.
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, wire.PathJoin, strings.NewReader("{}")))
	if w.Code != 400 {
		t.Errorf("a bad envelope: %d", w.Code)
	}
}
