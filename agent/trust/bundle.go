// Package trust is what a machine believes: the join bundle that it pinned, what
// it seals to, which answers it takes, and how one bundle leads to the next.
package trust

import (
	"bytes"
	"crypto/hpke"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/better-compute/join-operator/api/wire"
)

// MaxBundle is the largest bundle that is read, in bytes.
const MaxBundle = wire.MaxAnswer

// Bundle is a checked join bundle. It does not change.
type Bundle struct {
	raw       []byte
	parsed    wire.Bundle
	endpoints []*url.URL
	tlsCA     *x509.CertPool
	nodeCAs   []*x509.Certificate
	signers   keySet
	rotators  keySet
	sealing   sealer
}

var trustDomainPattern = regexp.MustCompile(`^[a-z0-9._-]{1,255}$`)

// Parse reads and checks a bundle. Nobody has signed it: the caller has it from a
// place that it trusts.
func Parse(raw []byte) (*Bundle, error) {
	if len(raw) > MaxBundle {
		return nil, fmt.Errorf("bundle: longer than %d bytes", MaxBundle)
	}
	b := &Bundle{raw: bytes.Clone(raw)}
	if err := decode(raw, &b.parsed); err != nil {
		return nil, fmt.Errorf("bundle: not one JSON object of the protocol's form: %w", err)
	}
	switch {
	case b.parsed.Protocol != wire.Protocol:
		return nil, fmt.Errorf("bundle: protocol %d, this machine speaks %d", b.parsed.Protocol, wire.Protocol)
	case b.parsed.Generation < 1:
		return nil, fmt.Errorf("bundle: generation %d", b.parsed.Generation)
	case !trustDomainPattern.MatchString(b.parsed.TrustDomain):
		return nil, errors.New("bundle: trustDomain is not a trust domain name")
	}
	var err error
	if b.endpoints, err = parseEndpoints(b.parsed.Endpoints); err != nil {
		return nil, fmt.Errorf("bundle: endpoints: %w", err)
	}
	tlsCAs, err := parseCertificates(b.parsed.TLSCA)
	if err != nil {
		return nil, fmt.Errorf("bundle: tlsCA: %w", err)
	}
	b.tlsCA = x509.NewCertPool()
	for _, c := range tlsCAs {
		b.tlsCA.AddCert(c)
	}
	if b.nodeCAs, err = parseCertificates(b.parsed.NodeCAs); err != nil {
		return nil, fmt.Errorf("bundle: nodeCAs: %w", err)
	}
	if b.signers, err = parseKeySet(b.parsed.SigningKeys); err != nil {
		return nil, fmt.Errorf("bundle: signingKeys: %w", err)
	}
	if b.rotators, err = parseKeySet(b.parsed.BundleKeys); err != nil {
		return nil, fmt.Errorf("bundle: bundleKeys: %w", err)
	}
	if b.sealing, err = firstSealer(b.parsed.Sealing); err != nil {
		return nil, fmt.Errorf("bundle: sealing: %w", err)
	}
	return b, nil
}

// Follow reads one link of the rotations: a compact JWS whose payload is the
// bundle of the next generation, signed by one of this bundle's bundle keys.
func (b *Bundle) Follow(link string) (*Bundle, error) {
	payload, err := b.rotators.open(wire.TypeBundle, []byte(link))
	if err != nil {
		return nil, fmt.Errorf("rotation after generation %d: %w", b.Generation(), err)
	}
	next, err := Parse(payload)
	if err != nil {
		return nil, fmt.Errorf("rotation after generation %d: %w", b.Generation(), err)
	}
	if next.Generation() != b.Generation()+1 {
		return nil, fmt.Errorf("rotation after generation %d: it leads to generation %d", b.Generation(), next.Generation())
	}
	if next.TrustDomain() != b.TrustDomain() {
		return nil, fmt.Errorf("rotation after generation %d: it leads into another trust domain", b.Generation())
	}
	return next, nil
}

// OpenAnswer verifies that an answer is signed by one of the pinned signing keys,
// and reads it. What it answers is for the caller to check.
func (b *Bundle) OpenAnswer(compact []byte) (*wire.Answer, error) {
	payload, err := b.signers.open(wire.TypeJoin, compact)
	if err != nil {
		return nil, err
	}
	var a wire.Answer
	if err := decode(payload, &a); err != nil {
		return nil, fmt.Errorf("the signed answer cannot be read: %w", err)
	}
	if a.Protocol != wire.Protocol {
		return nil, fmt.Errorf("the signed answer has protocol %d", a.Protocol)
	}
	return &a, nil
}

// TLS is how to connect to an endpoint: TLS 1.3 (RFC 8446) with a certificate
// under the pinned authority and nothing else. now judges the certificate's dates.
func (b *Bundle) TLS(now func() time.Time) *tls.Config {
	return &tls.Config{RootCAs: b.tlsCA, MinVersion: tls.VersionTLS13, Time: now}
}

// Raw is the bundle's bytes as it was published. The caller must not change them.
func (b *Bundle) Raw() []byte { return b.raw }

// SHA256 is the lower-case hexadecimal SHA-256 of the bundle's bytes.
func (b *Bundle) SHA256() string {
	sum := sha256.Sum256(b.raw)
	return hex.EncodeToString(sum[:])
}

// Generation counts a trust domain's bundles from 1.
func (b *Bundle) Generation() int { return b.parsed.Generation }

// IssuedAt is when the bundle was made: a machine's clock cannot be right and
// before it.
func (b *Bundle) IssuedAt() time.Time { return b.parsed.IssuedAt }

// TrustDomain is the SPIFFE trust domain that all identities are in.
func (b *Bundle) TrustDomain() string { return b.parsed.TrustDomain }

// Endpoints are the gateways' base URLs. The caller must not change them.
func (b *Bundle) Endpoints() []*url.URL { return slices.Clone(b.endpoints) }

// NodeCAs are the authorities of node certificates, newest first.
func (b *Bundle) NodeCAs() []*x509.Certificate { return slices.Clone(b.nodeCAs) }

func parseEndpoints(texts []string) ([]*url.URL, error) {
	if len(texts) == 0 {
		return nil, errors.New("there is none")
	}
	endpoints := make([]*url.URL, 0, len(texts))
	for _, t := range texts {
		u, err := url.Parse(t)
		if err != nil || u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
			return nil, fmt.Errorf("%.200q is not an https URL without user, query and fragment", t)
		}
		endpoints = append(endpoints, u)
	}
	return endpoints, nil
}

// parseCertificates reads PEM (RFC 7468) that holds certificates and nothing else.
func parseCertificates(text string) ([]*x509.Certificate, error) {
	var certs []*x509.Certificate
	rest := []byte(text)
	for {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if block.Type != "CERTIFICATE" || err != nil {
			return nil, errors.New("holds something that is not a certificate")
		}
		certs = append(certs, c)
	}
	if len(certs) == 0 || strings.TrimSpace(string(rest)) != "" {
		return nil, errors.New("is not a list of certificates in PEM")
	}
	return certs, nil
}

// sealer is the first sealing key of a bundle whose suite this machine knows.
type sealer struct {
	kid  string
	key  hpke.PublicKey
	kdf  hpke.KDF
	aead hpke.AEAD
}

// exportOnly is the AEAD that seals nothing (RFC 9180 section 7.3).
const exportOnly = 0xffff

func firstSealer(keys []wire.SealingKey) (sealer, error) {
	for _, k := range keys {
		kem, kemErr := hpke.NewKEM(k.KEM)
		kdf, kdfErr := hpke.NewKDF(k.KDF)
		aead, aeadErr := hpke.NewAEAD(k.AEAD)
		if kemErr != nil || kdfErr != nil || aeadErr != nil || k.AEAD == exportOnly {
			continue
		}
		raw, err := wire.DecodeBase64(k.PublicKey)
		if err != nil {
			return sealer{}, fmt.Errorf("key %.64q: not base64", k.KeyID)
		}
		pub, err := kem.NewPublicKey(raw)
		if err != nil {
			return sealer{}, fmt.Errorf("key %.64q: %w", k.KeyID, err)
		}
		if k.KeyID == "" {
			return sealer{}, errors.New("a key has no kid")
		}
		return sealer{kid: k.KeyID, key: pub, kdf: kdf, aead: aead}, nil
	}
	return sealer{}, errors.New("no key of a suite that this machine knows")
}

// Seal encrypts what is secret or private in a join to the service (HPKE, RFC
// 9180, base mode), bound to the rest of the envelope. It returns the key's id
// and enc || ciphertext.
func (b *Bundle) Seal(attestor string, role wire.Role, csr, plaintext []byte) (kid string, sealed []byte, err error) {
	enc, sender, err := hpke.NewSender(b.sealing.key, b.sealing.kdf, b.sealing.aead, []byte(wire.SealInfo))
	if err != nil {
		return "", nil, fmt.Errorf("seal: %w", err)
	}
	ciphertext, err := sender.Seal(wire.SealAAD(attestor, role, csr), plaintext)
	if err != nil {
		return "", nil, fmt.Errorf("seal: %w", err)
	}
	return b.sealing.kid, append(enc, ciphertext...), nil
}
