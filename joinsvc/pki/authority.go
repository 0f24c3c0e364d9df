package pki

import (
	"bytes"
	"cmp"
	"crypto"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"sync/atomic"
	"time"
)

// SecretPattern matches the names of the Secrets that hold node CAs; the highest
// number that is valid signs.
var SecretPattern = regexp.MustCompile(`^node-ca-([0-9]{1,6})$`)

// Authority is the live set of node CAs. Its zero value has none.
type Authority struct {
	cas atomic.Pointer[[]*authority]
}

// authority is one CA with its key.
type authority struct {
	name   string
	number int
	cert   *x509.Certificate
	key    crypto.Signer
	sha256 [32]byte
}

// CA is a loaded CA as it is shown to others, without its key.
type CA struct {
	Name        string
	Certificate *x509.Certificate
	SHA256      [32]byte
}

// Load replaces the set by what Secrets hold, by the Secret's name: the data of
// tls.crt and tls.key. A Secret whose certificate and key do not belong together
// (it is written in two steps) keeps the pair that was loaded before; the error
// says which and why, and everything else is loaded all the same.
func (a *Authority) Load(secrets map[string]map[string][]byte) error {
	before := map[string]*authority{}
	for _, ca := range a.all() {
		before[ca.name] = ca
	}
	var next []*authority
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(secrets)) {
		m := SecretPattern.FindStringSubmatch(name)
		if m == nil {
			continue
		}
		ca, err := parse(secrets[name])
		if err != nil {
			errs = append(errs, fmt.Errorf("secret %s: %w", name, err))
			if ca = before[name]; ca == nil {
				continue
			}
		}
		ca.name = name
		ca.number, _ = strconv.Atoi(m[1])
		next = append(next, ca)
	}
	slices.SortFunc(next, func(x, y *authority) int { return cmp.Compare(y.number, x.number) })
	a.cas.Store(&next)
	return errors.Join(errs...)
}

func parse(data map[string][]byte) (*authority, error) {
	pair, err := tls.X509KeyPair(data["tls.crt"], data["tls.key"])
	if err != nil {
		return nil, fmt.Errorf("certificate and key: %w", err)
	}
	key, ok := pair.PrivateKey.(crypto.Signer)
	if !ok {
		return nil, errors.New("the key cannot sign")
	}
	cert := pair.Leaf
	switch {
	case !cert.IsCA || !cert.BasicConstraintsValid:
		return nil, errors.New("the certificate is no CA's")
	case cert.KeyUsage&x509.KeyUsageCertSign == 0:
		return nil, errors.New("the certificate may not sign others")
	case len(cert.SubjectKeyId) == 0:
		return nil, errors.New("the certificate has no subject key identifier")
	}
	return &authority{cert: cert, key: key, sha256: sha256.Sum256(cert.Raw)}, nil
}

func (a *Authority) all() []*authority {
	if cas := a.cas.Load(); cas != nil {
		return *cas
	}
	return nil
}

// signer is the newest CA that is valid at a time.
func (a *Authority) signer(now time.Time) *authority {
	for _, ca := range a.all() {
		if !now.Before(ca.cert.NotBefore) && now.Before(ca.cert.NotAfter) {
			return ca
		}
	}
	return nil
}

// CAs lists the loaded CAs, newest first.
func (a *Authority) CAs() []CA {
	var out []CA
	for _, ca := range a.all() {
		out = append(out, CA{ca.name, ca.cert, ca.sha256})
	}
	return out
}

// Ready reports whether leaves can be signed at a time.
func (a *Authority) Ready(now time.Time) bool { return a.signer(now) != nil }

// bySKI finds the newest CA with a key identifier: several certificates may have
// one key.
func (a *Authority) bySKI(ski []byte) *authority {
	for _, ca := range a.all() {
		if bytes.Equal(ca.cert.SubjectKeyId, ski) {
			return ca
		}
	}
	return nil
}
