package pki

import (
	"bytes"
	"crypto"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/better-compute/join-operator/joinsvc/secrets"
)

// Authority is the live set of node CAs. All methods may be called by many
// goroutines.
type Authority struct {
	log     *slog.Logger
	current atomic.Pointer[set]
	mu      sync.Mutex // held by Load
	// broken is what was wrong with a Secret, so that it is said once.
	broken map[string]string
	// changed has room for one: other CAs are loaded than before.
	changed chan struct{}
}

// NewAuthority makes an authority without a CA. log hears of CAs that come, go, or
// cannot be used.
func NewAuthority(log *slog.Logger) *Authority {
	return &Authority{log: log, changed: make(chan struct{}, 1)}
}

// set is CAs, newest first. It does not change.
type set struct{ issuers []*issuer }

// issuer is a CA certificate with its key.
type issuer struct {
	// name is that of its Secret; number the n in node-ca-<n>.
	name   string
	number uint64
	cert   *x509.Certificate
	key    crypto.Signer
	sha256 [32]byte
}

var secretPattern = regexp.MustCompile(`^node-ca-([1-9][0-9]{0,8})$`)

// Load takes the keys' namespace as it is now. A Secret whose certificate and key
// do not match (it is written in two steps) or that cannot be used keeps the last
// good pair; one that is gone takes its CA with it.
func (a *Authority) Load(snapshot secrets.Snapshot) {
	a.mu.Lock()
	defer a.mu.Unlock()
	old := a.current.Load()
	next := &set{}
	broken := map[string]string{}
	for name, data := range snapshot {
		number, ok := secretNumber(name)
		if !ok {
			continue
		}
		i, err := load(name, number, data)
		before := old.named(name)
		if err != nil {
			broken[name] = err.Error()
			if a.broken[name] != err.Error() {
				a.log.Error("a node CA's Secret cannot be used", "secret", name, "error", err, "keepsLastGood", before != nil)
			}
			if before == nil {
				continue
			}
			i = before
		} else if before == nil || before.sha256 != i.sha256 {
			a.log.Info("loaded a node CA", "secret", name, "notAfter", i.cert.NotAfter, "ski", fmt.Sprintf("%x", i.cert.SubjectKeyId))
			if !i.signsLists() {
				a.log.Error("a node CA may not sign revocation lists: give its Certificate the usages \"cert sign\" and \"crl sign\"", "secret", name)
			}
		}
		next.issuers = append(next.issuers, i)
	}
	for _, i := range old.all() {
		if next.named(i.name) == nil {
			a.log.Warn("a node CA's Secret is gone; it signs no more", "secret", i.name)
		}
	}
	slices.SortFunc(next.issuers, func(x, y *issuer) int {
		if x.number > y.number {
			return -1
		}
		return 1
	})
	a.broken = broken
	a.current.Store(next)
	if !slices.EqualFunc(old.all(), next.all(), func(x, y *issuer) bool { return x.sha256 == y.sha256 }) {
		select {
		case a.changed <- struct{}{}:
		default:
		}
	}
}

// secretNumber is the n of a Secret's name.
func secretNumber(name string) (uint64, bool) {
	m := secretPattern.FindStringSubmatch(name)
	if m == nil {
		return 0, false
	}
	n, err := strconv.ParseUint(m[1], 10, 32)
	return n, err == nil
}

// load makes a CA of a Secret of type kubernetes.io/tls. tls.crt may hold a chain:
// the first certificate is the CA's own.
func load(name string, number uint64, data map[string][]byte) (*issuer, error) {
	pair, err := tls.X509KeyPair(data["tls.crt"], data["tls.key"])
	if err != nil {
		// What the standard library says of a key that it cannot read says nothing
		// of the key.
		return nil, fmt.Errorf("certificate and key: %w", err)
	}
	cert, err := x509.ParseCertificate(pair.Certificate[0])
	if err != nil {
		return nil, fmt.Errorf("certificate: %w", err)
	}
	key, ok := pair.PrivateKey.(crypto.Signer)
	switch {
	case !ok:
		return nil, errors.New("its key cannot sign")
	case !cert.IsCA || !cert.BasicConstraintsValid:
		return nil, errors.New("its certificate is no CA's")
	case cert.KeyUsage&x509.KeyUsageCertSign == 0:
		return nil, errors.New("its certificate may not sign certificates (usage \"cert sign\")")
	case len(cert.SubjectKeyId) == 0:
		return nil, errors.New("its certificate has no subject key identifier")
	}
	return &issuer{name: name, number: number, cert: cert, key: key, sha256: sha256.Sum256(cert.Raw)}, nil
}

// Ready reports whether there is a CA to sign with.
func (a *Authority) Ready(now time.Time) bool { return a.current.Load().signing(now) != nil }

// SigningSKI is the subject key identifier of the CA that signs, or nil.
func (a *Authority) SigningSKI(now time.Time) []byte {
	if i := a.current.Load().signing(now); i != nil {
		return i.cert.SubjectKeyId
	}
	return nil
}

// signing is the newest CA that is valid, or nil.
func (s *set) signing(now time.Time) *issuer {
	for _, i := range s.all() {
		if i.valid(now) {
			return i
		}
	}
	return nil
}

// signsLists reports whether the CA may sign revocation lists. One that may not
// still issues: that nobody joins would be worse.
func (i *issuer) signsLists() bool { return i.cert.KeyUsage&x509.KeyUsageCRLSign != 0 }

func (i *issuer) valid(now time.Time) bool {
	return !now.Before(i.cert.NotBefore) && now.Before(i.cert.NotAfter)
}

func (s *set) all() []*issuer {
	if s == nil {
		return nil
	}
	return s.issuers
}

func (s *set) named(name string) *issuer {
	for _, i := range s.all() {
		if i.name == name {
			return i
		}
	}
	return nil
}

// keys are the CAs without those that share a key with a newer one.
func (s *set) keys() []*issuer {
	var out []*issuer
	for _, i := range s.all() {
		if !slices.ContainsFunc(out, func(o *issuer) bool { return bytes.Equal(o.cert.SubjectKeyId, i.cert.SubjectKeyId) }) {
			out = append(out, i)
		}
	}
	return out
}
