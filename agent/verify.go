package agent

import (
	"crypto"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"time"

	"github.com/better-compute/join-operator/agent/state"
	"github.com/better-compute/join-operator/agent/trust"
	"github.com/better-compute/join-operator/api/wire"
)

// maxChain is the most certificates that an answer may carry.
const maxChain = 8

// label is what a tenant and a node id are: a DNS label (RFC 1123 section 2.1).
var label = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// asked is what an answer must answer.
type asked struct {
	csrSHA256 [32]byte
	publicKey crypto.PublicKey
	role      wire.Role
	// challenger is who may challenge.
	challenger string
	// attestor is what the identity will say that it was admitted by.
	attestor string
	// again is the node whose next certificate is asked for; nil for a first join.
	again *state.Identity
}

// check holds a signed answer against what was asked, before anything of it is
// used: only the same request's answer, and only an outcome that has its fields.
func (q asked) check(a *wire.Answer) error {
	if a.CSRSHA256 != hex.EncodeToString(q.csrSHA256[:]) {
		return errors.New("it answers another certificate request")
	}
	if a.IssuedAt.IsZero() {
		return errors.New("it does not say when it was issued")
	}
	switch a.Outcome {
	case wire.OutcomeJoined:
		return nil
	case wire.OutcomePending:
		if !label.MatchString(a.JoinRequest) {
			return errors.New("it names no join request")
		}
		if a.Tenant != "" && !label.MatchString(a.Tenant) {
			return errors.New("its tenant is not a DNS label")
		}
		return nil
	case wire.OutcomeChallenge:
		if a.Attestor != q.challenger {
			return fmt.Errorf("it is a challenge of attestor %.64q, not %q", a.Attestor, q.challenger)
		}
		return nil
	default:
		return fmt.Errorf("it has the outcome %.64q", a.Outcome)
	}
}

// identity checks a joined answer's certificates and makes an identity of them.
// now is the latest of the machine's clock and what was signed, so that a clock
// that lags does not make a new certificate look like a future one. pinned is
// false where the issuer leads to none of the bundle's node CAs: then
// only the signed answer vouches for it.
func (q asked) identity(a *wire.Answer, b *trust.Bundle, now time.Time) (id *state.Identity, pinned bool, err error) {
	if a.Outcome != wire.OutcomeJoined {
		return nil, false, errors.New("it is not a join")
	}
	if a.Role != q.role {
		return nil, false, fmt.Errorf("it admits as %.64q, not as %q", a.Role, q.role)
	}
	if !label.MatchString(a.Tenant) || !label.MatchString(a.NodeID) {
		return nil, false, errors.New("its tenant or node id is not a DNS label")
	}
	chain, ders, err := parseChain(a.Certificates)
	if err != nil {
		return nil, false, err
	}
	leaf := chain[0]
	if key, ok := q.publicKey.(interface{ Equal(crypto.PublicKey) bool }); !ok || !key.Equal(leaf.PublicKey) {
		return nil, false, errors.New("its certificate is for another key")
	}
	sum := sha256.Sum256(leaf.Raw)
	id = &state.Identity{
		TrustDomain: b.TrustDomain(), Tenant: a.Tenant, Site: printable(a.Site, 256), Pool: printable(a.Pool, 256),
		Role: a.Role, NodeID: a.NodeID, Attestor: q.attestor, AllowedKinds: a.AllowedKinds,
		NotBefore: leaf.NotBefore, NotAfter: leaf.NotAfter,
		CertificateSHA256: hex.EncodeToString(sum[:]), Serial: hex.EncodeToString(leaf.SerialNumber.Bytes()),
		JoinedAt: a.IssuedAt, Chain: ders,
	}
	if len(leaf.URIs) != 1 || leaf.URIs[0].String() != id.SPIFFEID() || len(leaf.DNSNames)+len(leaf.IPAddresses)+len(leaf.EmailAddresses) > 0 {
		return nil, false, errors.New("its certificate does not name the node that the answer names")
	}
	if leaf.IsCA {
		return nil, false, errors.New("its certificate is an authority's")
	}
	if o := q.again; o != nil && (o.TrustDomain != id.TrustDomain || o.Tenant != id.Tenant || o.NodeID != id.NodeID) {
		return nil, false, fmt.Errorf("it admits as %s, not as %s", id.SPIFFEID(), o.SPIFFEID())
	}
	if a.NotAfter != nil && !a.NotAfter.Equal(leaf.NotAfter) {
		return nil, false, errors.New("its certificate and the answer have two ends")
	}
	if q.again != nil && now.After(leaf.NotAfter) {
		// The answer was lost for longer than the certificate runs. It is stored all
		// the same: it is the node's newest, and the way to the next one.
		now = leaf.NotAfter
	}
	if pinned, err = verifyChain(chain, b.NodeCAs(), now); err != nil {
		return nil, false, fmt.Errorf("its certificate does not verify at %s: %w", now.UTC().Format(time.RFC3339), err)
	}
	id.CAs = authorities(b.NodeCAs(), chain[len(chain)-1], pinned)
	return id, pinned, nil
}

func parseChain(texts []string) ([]*x509.Certificate, [][]byte, error) {
	if len(texts) < 2 || len(texts) > maxChain {
		return nil, nil, fmt.Errorf("it carries %d certificates", len(texts))
	}
	chain, ders := make([]*x509.Certificate, len(texts)), make([][]byte, len(texts))
	for i, t := range texts {
		der, err := wire.DecodeBase64(t)
		if err != nil {
			return nil, nil, fmt.Errorf("certificate %d is not base64", i+1)
		}
		if chain[i], err = x509.ParseCertificate(der); err != nil {
			return nil, nil, fmt.Errorf("certificate %d: %w", i+1, err)
		}
		ders[i] = der
	}
	return chain, ders, nil
}

// verifyChain verifies what was sent as it stands, since peers will be shown it
// (RFC 5280 section 6), and says whether the pinned authorities vouch for it too.
func verifyChain(chain, cas []*x509.Certificate, at time.Time) (pinned bool, err error) {
	last := chain[len(chain)-1]
	if !last.IsCA {
		return false, errors.New("the issuer that was sent is no authority")
	}
	if err := verifyUnder(chain, []*x509.Certificate{last}, at); err != nil {
		return false, err
	}
	return verifyUnder(chain, cas, at) == nil, nil
}

func verifyUnder(chain, cas []*x509.Certificate, at time.Time) error {
	roots, between := x509.NewCertPool(), x509.NewCertPool()
	for _, c := range cas {
		roots.AddCert(c)
	}
	for _, c := range chain[1:] {
		between.AddCert(c)
	}
	// Any use: the node's own uses are the relying parties' to ask for.
	_, err := chain[0].Verify(x509.VerifyOptions{
		Roots: roots, Intermediates: between, CurrentTime: at,
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny},
	})
	return err
}

// authorities is what a machine trusts for its peers: the pinned node CAs, and
// its own issuer where that is newer than the bundle.
func authorities(cas []*x509.Certificate, issuer *x509.Certificate, pinned bool) [][]byte {
	var ders [][]byte
	if !pinned {
		ders = append(ders, issuer.Raw)
	}
	for _, c := range cas {
		ders = append(ders, c.Raw)
	}
	return ders
}
