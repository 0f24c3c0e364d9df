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

// backdate is how far before now certificates and revocation lists begin, for
// clocks that lag.
const backdate = 5 * time.Minute

// NodeKeyStatement is the extension that holds a node-key statement (an IA5String,
// as "urn:bc:tpm-ak:<hex>"; RFC 5280 section 4.2 leaves such to their makers). It
// is under the arc for UUIDs (2.25); its number fits 31 bits, since common parsers,
// Go's among them, refuse certificates with larger ones.
var NodeKeyStatement = asn1.ObjectIdentifier{2, 25, 1796305481, 1}

// Leaf is what a node's certificate says.
type Leaf struct {
	// PublicKey is one that ParseCSR took.
	PublicKey   crypto.PublicKey
	TrustDomain string
	Tenant      string
	// Role is the certificate's, which may be ramdisk.
	Role   wire.Role
	NodeID string
	// Now is the database's time.
	Now      time.Time
	Lifetime time.Duration
	// NodeKeyURI is a node-key statement, or empty.
	NodeKeyURI string
}

// Issued is a certificate and the issuer that it verifies under.
type Issued struct {
	DER []byte
	// Serial is the serial number's bytes, big endian without leading zeros.
	Serial    []byte
	IssuerDER []byte
	// IssuerSKI is the issuer's subject key identifier (RFC 5280 section 4.2.1.2).
	IssuerSKI    []byte
	IssuerSHA256 [32]byte
	// IssuerName is the name of the issuer's Secret.
	IssuerName     string
	IssuerNotAfter time.Time
	// NotAfter is the end of the certificate, in whole seconds.
	NotAfter time.Time
}

// ErrNoIssuer is returned while no loaded CA is valid: an outage, no refusal.
var ErrNoIssuer = errors.New("no node CA that is valid is loaded")

// Issue signs a leaf with the newest valid CA. The leaf has one URI SAN and an
// empty subject (so the SAN is critical), is for client and server authentication,
// is no CA, begins five minutes back and never outlives its issuer: a valid
// X.509-SVID. It returns ErrNoIssuer where there is no CA to sign with.
func (a *Authority) Issue(l Leaf) (*Issued, error) {
	by := a.current.Load().signing(l.Now)
	if by == nil {
		return nil, ErrNoIssuer
	}
	return by.issue(l)
}

func (i *issuer) issue(l Leaf) (*Issued, error) {
	id, err := ID(l.TrustDomain, l.Tenant, l.Role, l.NodeID)
	if err != nil {
		return nil, fmt.Errorf("issue a certificate: %w", err)
	}
	if l.Lifetime <= 0 {
		return nil, fmt.Errorf("issue a certificate: lifetime %s", l.Lifetime)
	}
	serial, err := newSerial()
	if err != nil {
		return nil, err
	}
	notAfter := l.Now.Add(l.Lifetime).Truncate(time.Second).UTC()
	if i.cert.NotAfter.Before(notAfter) {
		notAfter = i.cert.NotAfter
	}
	template := &x509.Certificate{
		SerialNumber: serial, NotBefore: l.Now.Add(-backdate), NotAfter: notAfter,
		URIs: []*url.URL{id}, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}
	if l.NodeKeyURI != "" {
		value, err := asn1.MarshalWithParams(l.NodeKeyURI, "ia5")
		if err != nil {
			return nil, fmt.Errorf("issue a certificate: node-key statement: %w", err)
		}
		template.ExtraExtensions = []pkix.Extension{{Id: NodeKeyStatement, Value: value}}
	}
	// CreateCertificate verifies what it signed under the key that load found to be
	// the CA certificate's: no leaf leaves that its issuer would not vouch for.
	der, err := x509.CreateCertificate(rand.Reader, template, i.cert, l.PublicKey, i.key)
	if err != nil {
		return nil, fmt.Errorf("issue a certificate by %s: %w", i.name, err)
	}
	return &Issued{
		DER: der, Serial: serial.Bytes(), NotAfter: notAfter,
		IssuerDER: i.cert.Raw, IssuerSKI: i.cert.SubjectKeyId, IssuerSHA256: i.sha256, IssuerName: i.name, IssuerNotAfter: i.cert.NotAfter,
	}, nil
}

// newSerial is a positive number of 128 random bits.
func newSerial() (*big.Int, error) {
	var raw [16]byte
	for {
		if _, err := rand.Read(raw[:]); err != nil {
			return nil, fmt.Errorf("random serial: %w", err)
		}
		if serial := new(big.Int).SetBytes(raw[:]); serial.Sign() > 0 {
			return serial, nil
		}
	}
}
