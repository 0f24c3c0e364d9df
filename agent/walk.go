package agent

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/better-compute/join-operator/agent/trust"
	"github.com/better-compute/join-operator/api/wire"
)

// walk remembers when the rotations were last asked for, and for which hint.
type walk struct {
	once bool
	at   time.Duration
	hint string
}

// mayBeStale reports whether an error is one that a newer bundle could mend.
func mayBeStale(err error) bool {
	p, ok := errors.AsType[*ProblemError](err)
	return ok && p.Code == wire.StaleBundle || errors.Is(err, trust.ErrUnknownKey) || unverifiedTLS(err)
}

// followHint walks the rotations where an answer says that there is a newer
// bundle. A hint that led nowhere is not followed twice.
func (m *Machine) followHint(ctx context.Context, hint string) {
	if hint == "" || hint == m.bundle.SHA256() || hint == m.walked.hint {
		return
	}
	if _, err := m.walkRotations(ctx, hint); err != nil {
		m.log.Info("there is a newer bundle, but it was not reached", "error", err)
	}
}

// errWalkedLately keeps walks apart.
var errWalkedLately = errors.New("the rotations were walked less than a minute ago")

// walkRotations follows the signed rotations from the pinned bundle to the
// newest, storing each on the way, and reports whether there was one. At most
// one walk begins in a minute.
func (m *Machine) walkRotations(ctx context.Context, hint string) (adopted bool, err error) {
	now := m.clock.Elapsed()
	if m.walked.once && now-m.walked.at < walkEvery {
		return false, errWalkedLately
	}
	m.walked.once, m.walked.at = true, now
	before := m.bundle.Generation()
	err = m.eachEndpoint(ctx, func(endpoint *url.URL) error { return m.walkAt(ctx, endpoint) }, func(error) bool { return false })
	if err == nil {
		m.walked.hint = hint
	}
	adopted = m.bundle.Generation() > before
	return adopted, err
}

// walkAt asks one endpoint, page by page, until it has no more.
func (m *Machine) walkAt(ctx context.Context, endpoint *url.URL) error {
	for {
		page, err := m.rotationsAfter(ctx, endpoint, m.bundle.Generation())
		if err != nil || len(page) == 0 {
			return err
		}
		for _, link := range page {
			if err := m.follow(link); err != nil {
				return err
			}
		}
	}
}

func (m *Machine) follow(link string) error {
	next, err := m.bundle.Follow(link)
	if err != nil {
		return &UntrustedError{err}
	}
	if err := m.state.StoreBundle(next.Raw()); err != nil {
		return &LocalError{err}
	}
	m.bundle = next
	m.time.notBefore(next.IssuedAt())
	m.log.Info("adopted a newer bundle", "generation", next.Generation(), "sha256", next.SHA256())
	m.observe(BundleAdopted{next.Generation()})
	return nil
}

// rotationsAfter gets one page. The endpoint's certificate is verified first; a
// machine that was off while the authority changed cannot, and takes the page
// from anybody: every link is signed, and nothing secret is sent.
func (m *Machine) rotationsAfter(ctx context.Context, endpoint *url.URL, generation int) ([]string, error) {
	query := "after=" + strconv.Itoa(generation)
	conf := m.bundle.TLS(m.now)
	r, err := m.http.get(ctx, conf, endpoint, wire.PathRotations, query)
	if unverifiedTLS(err) {
		m.log.Info("asking for rotations without verified TLS", "endpoint", endpoint.String(), "reason", err)
		//nolint:gosec // G402: see above.
		conf = &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13}
		r, err = m.http.get(ctx, conf, endpoint, wire.PathRotations, query)
	}
	if err != nil {
		return nil, err
	}
	if r.status != http.StatusOK || r.mediaType != wire.MediaTypeJSON {
		return nil, r.problem(m.now())
	}
	var page wire.Rotations
	if err := json.Unmarshal(r.body, &page); err != nil || page.Protocol != wire.Protocol {
		return nil, &UntrustedError{fmt.Errorf("the rotations cannot be read")}
	}
	return page.Rotations, nil
}
