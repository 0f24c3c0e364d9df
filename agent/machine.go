package agent

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/url"
	"time"

	"github.com/better-compute/join-operator/agent/state"
	"github.com/better-compute/join-operator/agent/trust"
)

// Config is what a machine runs with. State and Logger are required; the zero
// value of the rest is what a real machine wants.
type Config struct {
	// State is open, so that no other process changes it.
	State *state.Dir
	// FirstBundle is pinned where nothing is pinned yet; later it is ignored.
	FirstBundle []byte
	// KeyType is the kind of key to make; default ECDSA P-256, and for a renewal
	// the kind of the key before it.
	KeyType state.KeyType
	Logger  *slog.Logger
	// Observe is told what a person would want to see, as it happens.
	Observe func(Event)

	Clock Clock
	// Random returns a random duration below its argument, for jitter.
	Random func(limit time.Duration) time.Duration
	// Dial replaces the network.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// RequestTimeout limits one request to one endpoint; default 30 s.
	RequestTimeout time.Duration
}

// Machine is one machine with its state. Its methods are not safe for concurrent
// use.
type Machine struct {
	state   *state.Dir
	log     *slog.Logger
	observe func(Event)
	clock   Clock
	random  func(time.Duration) time.Duration
	http    client

	bundle  *trust.Bundle
	keyType state.KeyType
	request *state.Request
	time    *timeline
	// endpoint is where the next exchange begins, an index into the bundle's.
	endpoint int
	walked   walk
	// awaiting is the JoinRequest that was last told of.
	awaiting string
}

// New reads what a machine has on disk, pins its first bundle, and makes its key
// and request where there are none. It talks to nobody.
func New(c Config) (*Machine, error) {
	m := &Machine{state: c.State, log: c.Logger, observe: c.Observe, clock: c.Clock, random: c.Random, keyType: c.KeyType}
	if m.observe == nil {
		m.observe = func(Event) {}
	}
	if m.clock == nil {
		m.clock = SystemClock{}
	}
	if m.random == nil {
		m.random = randomUpTo
	}
	m.http = client{clock: m.clock, timeout: c.RequestTimeout, dial: c.Dial}
	if m.http.timeout == 0 {
		m.http.timeout = requestTimeout
	}
	if m.http.dial == nil {
		m.http.dial = (&net.Dialer{Timeout: dialTimeout}).DialContext
	}
	if c.KeyType == "" {
		c.KeyType = state.ECDSAP256
	}
	if err := m.pin(c.FirstBundle); err != nil {
		return nil, err
	}
	m.time = newTimeline(m.clock, m.progress(), m.bundle.IssuedAt())
	var err error
	if m.request, err = c.State.EnsureRequest(c.KeyType); err != nil {
		return nil, err
	}
	m.endpoint = int(m.random(time.Duration(len(m.bundle.Endpoints()))))
	return m, nil
}

// ErrNoBundle is returned by [New] where nothing is pinned and nothing was given.
var ErrNoBundle = errors.New("no join bundle is pinned yet, and none was given")

// BundleError is returned by [New] for a given bundle that cannot be pinned.
type BundleError struct{ Err error }

func (e *BundleError) Error() string { return "the given join bundle cannot be used: " + e.Err.Error() }
func (e *BundleError) Unwrap() error { return e.Err }

func (m *Machine) pin(first []byte) error {
	raw, err := m.state.Bundle()
	if errors.Is(err, fs.ErrNotExist) {
		return m.pinFirst(first)
	}
	if err != nil {
		return err
	}
	if m.bundle, err = trust.Parse(raw); err != nil {
		return &state.DamagedError{Path: m.state.BundlePath(), Err: err, Remedy: "Remove it and give the bundle again, from the place where the first one came from"}
	}
	if len(first) > 0 {
		m.compareGiven(first)
	}
	return nil
}

func (m *Machine) pinFirst(first []byte) error {
	if len(first) == 0 {
		return ErrNoBundle
	}
	b, err := trust.Parse(first)
	if err != nil {
		return &BundleError{err}
	}
	if err := m.state.StoreBundle(first); err != nil {
		return err
	}
	m.bundle = b
	m.log.Info("pinned the given bundle", "generation", b.Generation(), "trustDomain", b.TrustDomain(), "sha256", b.SHA256())
	return nil
}

// compareGiven says when a bundle that was given again is not what is pinned:
// it changes nothing, since only signed rotations may.
func (m *Machine) compareGiven(first []byte) {
	given, err := trust.Parse(first)
	switch {
	case err != nil:
		m.log.Warn("the given bundle cannot be read; the pinned one stays", "error", err)
	case given.TrustDomain() != m.bundle.TrustDomain():
		m.log.Warn("the given bundle is another trust domain's; the pinned one stays", "given", given.TrustDomain(), "pinned", m.bundle.TrustDomain())
	case given.Generation() > m.bundle.Generation():
		m.log.Info("the given bundle is newer than the pinned one, which follows by signed rotations only", "given", given.Generation(), "pinned", m.bundle.Generation())
	case given.Generation() == m.bundle.Generation() && given.SHA256() != m.bundle.SHA256():
		m.log.Warn("the given bundle is not the pinned one though it has its generation; the pinned one stays", "generation", given.Generation())
	}
}

// Bundle is the pinned bundle.
func (m *Machine) Bundle() *trust.Bundle { return m.bundle }

// PublicKeySHA256 is the key's fingerprint as a JoinRequest shows it.
func (m *Machine) PublicKeySHA256() (string, error) { return m.request.PublicKeySHA256() }

// now is the time to judge certificates by.
func (m *Machine) now() time.Time { return m.time.now() }

func (m *Machine) noticeClock(issuedAt time.Time) {
	m.time.heard(issuedAt)
	if ahead, tell := m.time.news(); tell {
		m.log.Info("this machine's clock is wrong", "ahead", ahead.Round(time.Second).String(), "serviceTime", issuedAt)
		m.observe(ClockWrong{Ahead: ahead, ServiceTime: issuedAt})
	}
}

// post sends a body to an endpoint whose certificate the pinned authority vouches
// for. Where only the dates of that certificate are wrong, by a clock that no
// signed answer has spoken for yet, the clock is what is doubted: else a machine
// whose clock is off by years could never be told.
func (m *Machine) post(ctx context.Context, endpoint *url.URL, path string, body []byte) (*reply, error) {
	r, err := m.http.post(ctx, m.bundle.TLS(m.now), endpoint, path, body)
	at, doubted := m.doubtedDate(err)
	if !doubted {
		return r, err
	}
	m.log.Warn("this machine's clock may be wrong: by it, an endpoint's certificate is not in force", "endpoint", endpoint.String(), "clock", m.clock.Now(), "error", err)
	return m.http.post(ctx, m.bundle.TLS(func() time.Time { return at }), endpoint, path, body)
}

// doubtedDate is a time at which an endpoint's certificate would be in force and
// which nothing signed speaks against.
func (m *Machine) doubtedDate(err error) (at time.Time, doubted bool) {
	shown, ok := errors.AsType[*tls.CertificateVerificationError](err)
	if !ok || m.time.fresh || len(shown.UnverifiedCertificates) == 0 {
		return at, false
	}
	invalid, ok := errors.AsType[x509.CertificateInvalidError](err)
	if !ok || invalid.Reason != x509.Expired {
		return at, false
	}
	leaf := shown.UnverifiedCertificates[0]
	at = later(m.time.atLeast(), leaf.NotBefore)
	return at, !at.After(leaf.NotAfter)
}

// eachEndpoint tries the endpoints in turn, beginning with the one that answered
// last, until try returns no error or one that another endpoint cannot mend. It
// returns everything that went wrong.
func (m *Machine) eachEndpoint(ctx context.Context, try func(*url.URL) error, final func(error) bool) error {
	endpoints := m.bundle.Endpoints()
	start := m.endpoint % len(endpoints)
	var failures []error
	for i := range endpoints {
		m.endpoint = (start + i) % len(endpoints)
		endpoint := endpoints[m.endpoint]
		err := try(endpoint)
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		m.log.Debug("an endpoint gave no usable answer", "endpoint", endpoint.String(), "error", err)
		failures = append(failures, fmt.Errorf("%s: %w", endpoint.Host, err))
		if final(err) {
			break
		}
	}
	// Whatever was wrong, the next exchange begins elsewhere.
	m.endpoint = (m.endpoint + 1) % len(endpoints)
	return errors.Join(failures...)
}
