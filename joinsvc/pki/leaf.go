package pki

import (
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"errors"
	"fmt"
	"math/big"
	"net/url"
	"time"

	"github.com/better-compute/join-operator/api/wire"
)

// backdate is how far a leaf's notBefore lies back, for clocks that lag.
const backdate = 5 * time.Minute

// NodeKeyOID is the extension that carries the statement about a node's key as a
// UTF8String. It lies under the UUID arc (ITU-T X.667), so nobody registers it.
var NodeKeyOID = asn1.ObjectIdentifier{2, 25, 1196118757, 1}

// Leaf is what a certificate is to say.
type Leaf struct {
	PublicKey   crypto.PublicKey
	TrustDomain string
	Tenant      string
	Role        wire.Role
	NodeID      string
	// Now is the database's time.
	Now      time.Time
	Lifetime time.Duration
	// NodeKeyURI is a statement about the key; empty where there is none.
	NodeKeyURI string
}

// SPIFFEID is the one name of a leaf: an X.509-SVID's (SPIFFE X509-SVID section 2).
func (l Leaf) SPIFFEID() *url.URL {
	return &url.URL{Scheme: "spiffe", Host: l.TrustDomain, Path: fmt.Sprintf("/tenant/%s/%s/%s", l.Tenant, l.Role, l.NodeID)}
}

// Issued is a signed leaf with its issuer.
type Issued struct {
	DER          []byte
	Serial       []byte // big-endian, as the database keeps it
	IssuerDER    []byte
	IssuerSKI    []byte
	IssuerSHA256 [32]byte
	NotAfter     time.Time
}

// ErrNoIssuer is returned while no CA is loaded that is valid now.
var ErrNoIssuer = errors.New("no node CA is loaded that is valid now")

// Issue signs a leaf with the newest CA that is valid at l.Now. The leaf never
// outlives its issuer, and none leaves that does not verify under it.
func (a *Authority) Issue(l Leaf) (*Issued, error) {
	ca := a.signer(l.Now)
	if ca == nil {
		return nil, ErrNoIssuer
	}
	template, err := l.template(ca)
	if err != nil {
		return nil, err
	}
	// CreateCertificate verifies what it signed under the signer's own key, and the
	// signer's key was held against the issuer's certificate when it was loaded.
	der, err := x509.CreateCertificate(rand.Reader, template, ca.cert, l.PublicKey, ca.key)
	if err != nil {
		return nil, fmt.Errorf("sign a leaf under %s: %w", ca.name, err)
	}
	return &Issued{
		DER: der, Serial: template.SerialNumber.Bytes(),
		IssuerDER: ca.cert.Raw, IssuerSKI: ca.cert.SubjectKeyId, IssuerSHA256: ca.sha256, NotAfter: template.NotAfter,
	}, nil
}

func (l Leaf) template(ca *authority) (*x509.Certificate, error) {
	serial := make([]byte, 16)
	rand.Read(serial)
	serial[0] = serial[0]&0x7f | 0x40 // positive, and always of 16 bytes
	t := &x509.Certificate{
		SerialNumber:          new(big.Int).SetBytes(serial),
		NotBefore:             l.Now.Add(-backdate).UTC().Truncate(time.Second),
		NotAfter:              l.Now.Add(l.Lifetime).UTC().Truncate(time.Second),
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		URIs:                  []*url.URL{l.SPIFFEID()},
		BasicConstraintsValid: true,
	}
	if t.NotBefore.Before(ca.cert.NotBefore) {
		t.NotBefore = ca.cert.NotBefore
	}
	if t.NotAfter.After(ca.cert.NotAfter) {
		t.NotAfter = ca.cert.NotAfter
	}
	if l.NodeKeyURI != "" {
		value, err := asn1.MarshalWithParams(l.NodeKeyURI, "utf8")
		if err != nil {
			return nil, fmt.Errorf("encode a node key statement: %w", err)
		}
		t.ExtraExtensions = []pkix.Extension{{Id: NodeKeyOID, Value: value}}
	}
	return t, nil
}
