package agenttest

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"math/big"
	"net"
	"net/url"
	"testing"
	"time"
)

// Authority is a CA made for a test.
type Authority struct {
	Cert *x509.Certificate
	Key  crypto.Signer
	// ServeFrom and ServeUntil, where set, are the dates of serving certificates.
	ServeFrom, ServeUntil time.Time
}

// NewAuthority makes a self-signed CA that is valid long before and after [Start].
func NewAuthority(t testing.TB, name string) *Authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: serial(), Subject: pkix.Name{CommonName: name},
		NotBefore: Start.AddDate(-5, 0, 0), NotAfter: Start.AddDate(90, 0, 0),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &Authority{Cert: cert, Key: key}
}

// PEM is the CA's certificate.
func (a *Authority) PEM() string {
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.Cert.Raw}))
}

// Leaf is what a node certificate says.
type Leaf struct {
	PublicKey           crypto.PublicKey
	URIs                []string
	NotBefore, NotAfter time.Time
	IsCA                bool
}

// Issue makes a certificate and returns its DER.
func (a *Authority) Issue(t testing.TB, l Leaf) []byte {
	t.Helper()
	template := &x509.Certificate{
		SerialNumber: serial(), NotBefore: l.NotBefore, NotAfter: l.NotAfter, IsCA: l.IsCA, BasicConstraintsValid: true,
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}
	for _, text := range l.URIs {
		u, err := url.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		template.URIs = append(template.URIs, u)
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.Cert, l.PublicKey, a.Key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

// serve makes a serving certificate for the loopback address.
func (a *Authority) serve(t testing.TB) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: serial(), NotBefore: Start.AddDate(-4, 0, 0), NotAfter: Start.AddDate(80, 0, 0),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	if !a.ServeUntil.IsZero() {
		template.NotBefore, template.NotAfter = a.ServeFrom, a.ServeUntil
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.Cert, key.Public(), a.Key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func serial() *big.Int {
	var raw [16]byte
	rand.Read(raw[:])
	raw[0] |= 1
	return new(big.Int).SetBytes(raw[:])
}

// SigningKey is an Ed25519 key with its id.
type SigningKey struct {
	ID  string
	Key ed25519.PrivateKey
}

// NewSigningKey makes a key whose id is made of its public half.
func NewSigningKey(t testing.TB) SigningKey {
	t.Helper()
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(pub)
	return SigningKey{hex.EncodeToString(sum[:8]), key}
}

// Sign makes a compact JWS with alg EdDSA.
func (k SigningKey) Sign(t testing.TB, typ string, payload []byte) string {
	t.Helper()
	return k.SignHeader(t, map[string]any{"alg": "EdDSA", "kid": k.ID, "typ": typ}, payload)
}

// SignHeader signs under any header at all, by RFC 7515 section 5.1 done by
// hand: what a library refuses to write is what a forger sends.
func (k SigningKey) SignHeader(t testing.TB, header map[string]any, payload []byte) string {
	t.Helper()
	raw, err := json.Marshal(header)
	if err != nil {
		t.Fatal(err)
	}
	input := base64.RawURLEncoding.EncodeToString(raw) + "." + base64.RawURLEncoding.EncodeToString(payload)
	return input + "." + base64.RawURLEncoding.EncodeToString(ed25519.Sign(k.Key, []byte(input)))
}

// jwks is the public halves as a JWK set (RFC 7517, RFC 8037).
func jwks(t testing.TB, keys ...SigningKey) json.RawMessage {
	t.Helper()
	list := []map[string]string{}
	for _, k := range keys {
		list = append(list, map[string]string{
			"kty": "OKP", "crv": "Ed25519", "alg": "EdDSA", "use": "sig", "kid": k.ID,
			"x": base64.RawURLEncoding.EncodeToString(k.Key.Public().(ed25519.PublicKey)),
		})
	}
	raw, err := json.Marshal(map[string]any{"keys": list})
	if err != nil {
		t.Fatal(err)
	}
	return raw
}
