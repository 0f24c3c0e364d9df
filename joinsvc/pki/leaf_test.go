package pki

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"errors"
	"io"
	"log/slog"
	"math/big"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/joinsvc/secrets"
)

// ca is a CA as cert-manager keeps it.
type ca struct {
	cert *x509.Certificate
	key  crypto.Signer
}

// newCA makes a CA of a key (a new one where it is nil); edit may spoil it.
func newCA(tb testing.TB, name string, key crypto.Signer, notBefore, notAfter time.Time, edit func(*x509.Certificate)) ca {
	tb.Helper()
	if key == nil {
		key = ecKey(tb, elliptic.P256())
	}
	serial, err := newSerial()
	if err != nil {
		tb.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: name}, NotBefore: notBefore, NotAfter: notAfter,
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	if edit != nil {
		edit(template)
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		tb.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		tb.Fatal(err)
	}
	return ca{cert, key}
}

// secret is the CA's Secret.
func (c ca) secret(tb testing.TB) map[string][]byte {
	tb.Helper()
	key, err := x509.MarshalPKCS8PrivateKey(c.key)
	if err != nil {
		tb.Fatal(err)
	}
	return map[string][]byte{
		"tls.crt": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.cert.Raw}),
		"tls.key": pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key}),
	}
}

var now = time.Now().Truncate(time.Second)

func aYear(tb testing.TB, name string) ca {
	tb.Helper()
	return newCA(tb, name, nil, now.Add(-time.Hour), now.AddDate(1, 0, 0), nil)
}

func authority(tb testing.TB, snapshot secrets.Snapshot) *Authority {
	tb.Helper()
	a := NewAuthority(slog.New(slog.DiscardHandler))
	a.Load(snapshot)
	return a
}

func leafFor(key crypto.PublicKey) Leaf {
	return Leaf{
		PublicKey: key, TrustDomain: "test.join.example", Tenant: "factory", Role: wire.RoleNode, NodeID: "n-abc",
		Now: now, Lifetime: 168 * time.Hour,
	}
}

func issue(tb testing.TB, a *Authority, l Leaf) (*Issued, *x509.Certificate) {
	tb.Helper()
	issued, err := a.Issue(l)
	if err != nil {
		tb.Fatal(err)
	}
	cert, err := x509.ParseCertificate(issued.DER)
	if err != nil {
		tb.Fatal(err)
	}
	return issued, cert
}

// TestLeavesAreSVIDs holds leaves against the rules of X.509-SVIDs and the design.
func TestLeavesAreSVIDs(t *testing.T) {
	signer := aYear(t, "node-ca-1")
	a := authority(t, secrets.Snapshot{"node-ca-1": signer.secret(t)})
	for name, key := range map[string]crypto.Signer{"ECDSA": ecKey(t, elliptic.P384()), "RSA": rsaKey(t, 2048)} {
		t.Run(name, func(t *testing.T) {
			csr, err := ParseCSR(everyExtension(t, key))
			if err != nil {
				t.Fatal(err)
			}
			issued, cert := issue(t, a, leafFor(csr.PublicKey))
			if len(cert.URIs) != 1 || cert.URIs[0].String() != "spiffe://test.join.example/tenant/factory/node/n-abc" {
				t.Errorf("URIs %v", cert.URIs)
			}
			if len(cert.DNSNames)+len(cert.IPAddresses)+len(cert.EmailAddresses) > 0 {
				t.Error("it has names beside its URI")
			}
			if cert.IsCA || !cert.BasicConstraintsValid || cert.MaxPathLen > 0 {
				t.Error("it is a CA, or does not say that it is none")
			}
			if cert.KeyUsage != x509.KeyUsageDigitalSignature {
				t.Errorf("key usage %b", cert.KeyUsage)
			}
			if !slices.Equal(cert.ExtKeyUsage, []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}) || len(cert.UnknownExtKeyUsage) > 0 {
				t.Errorf("extended key usage %v %v", cert.ExtKeyUsage, cert.UnknownExtKeyUsage)
			}
			if !bytes.Equal(cert.RawSubject, []byte{0x30, 0}) {
				t.Errorf("subject %v", cert.Subject)
			}
			if !bytes.Equal(cert.AuthorityKeyId, signer.cert.SubjectKeyId) || !bytes.Equal(cert.RawIssuer, signer.cert.RawSubject) {
				t.Error("it names another issuer")
			}
			if !cert.NotBefore.Equal(now.Add(-5*time.Minute)) || !cert.NotAfter.Equal(now.Add(168*time.Hour)) || !issued.NotAfter.Equal(cert.NotAfter) {
				t.Errorf("from %v to %v (%v)", cert.NotBefore, cert.NotAfter, issued.NotAfter)
			}
			if cert.SerialNumber.Sign() <= 0 || cert.SerialNumber.BitLen() > 128 || cert.SerialNumber.Cmp(new(big.Int).SetBytes(issued.Serial)) != 0 {
				t.Errorf("serial %v, said to be %x", cert.SerialNumber, issued.Serial)
			}
			if issued.IssuerSHA256 != sha256.Sum256(issued.IssuerDER) || !bytes.Equal(issued.IssuerDER, signer.cert.Raw) || !bytes.Equal(issued.IssuerSKI, signer.cert.SubjectKeyId) ||
				issued.IssuerName != "node-ca-1" || !issued.IssuerNotAfter.Equal(signer.cert.NotAfter) {
				t.Error("the issuer that is said is another")
			}
			// Nothing but these: whatever the request asked for.
			critical := map[string]bool{"2.5.29.15": true, "2.5.29.37": false, "2.5.29.19": true, "2.5.29.35": false, "2.5.29.17": true}
			for _, e := range cert.Extensions {
				want, ok := critical[e.Id.String()]
				if !ok || e.Critical != want {
					t.Errorf("extension %v, critical %t", e.Id, e.Critical)
				}
				delete(critical, e.Id.String())
			}
			if len(critical) > 0 {
				t.Errorf("without the extensions %v", critical)
			}
			openSSLVerifies(t, issued)
		})
	}
}

// openSSLVerifies asks another implementation, as strictly as it can be asked.
func openSSLVerifies(t *testing.T, issued *Issued) {
	t.Helper()
	openssl, err := exec.LookPath("openssl")
	if err != nil {
		t.Log("no openssl here: not asked")
		return
	}
	dir := t.TempDir()
	for name, der := range map[string][]byte{"leaf": issued.DER, "ca": issued.IssuerDER} {
		if err := os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, purpose := range []string{"sslclient", "sslserver"} {
		out, err := exec.CommandContext(t.Context(), openssl, "verify", "-purpose", purpose, "-check_ss_sig",
			"-CAfile", filepath.Join(dir, "ca"), filepath.Join(dir, "leaf")).CombinedOutput()
		if err != nil {
			t.Errorf("openssl verify -purpose %s: %v\n%s", purpose, err, out)
		}
	}
}

func TestALeafNeverOutlivesItsIssuer(t *testing.T) {
	short := newCA(t, "node-ca-1", nil, now.Add(-time.Hour), now.Add(time.Hour), nil)
	a := authority(t, secrets.Snapshot{"node-ca-1": short.secret(t)})
	issued, cert := issue(t, a, leafFor(ecKey(t, elliptic.P256()).Public()))
	if !cert.NotAfter.Equal(short.cert.NotAfter) || !issued.NotAfter.Equal(short.cert.NotAfter) {
		t.Errorf("ends at %v (said: %v), its issuer at %v", cert.NotAfter, issued.NotAfter, short.cert.NotAfter)
	}
}

func TestANodeKeyStatementIsInItsOwnExtension(t *testing.T) {
	a := authority(t, secrets.Snapshot{"node-ca-1": aYear(t, "node-ca-1").secret(t)})
	l := leafFor(ecKey(t, elliptic.P256()).Public())
	l.NodeKeyURI = "urn:bc:tpm-ak:" + strings.Repeat("ab", 32)
	_, cert := issue(t, a, l)
	var found string
	for _, e := range cert.Extensions {
		if e.Id.Equal(NodeKeyStatement) {
			if e.Critical {
				t.Error("it is critical: nobody else knows it")
			}
			if rest, err := asn1.UnmarshalWithParams(e.Value, &found, "ia5"); err != nil || len(rest) > 0 {
				t.Errorf("value %x: %v", e.Value, err)
			}
		}
	}
	if found != l.NodeKeyURI || len(cert.URIs) != 1 {
		t.Errorf("statement %q, URIs %v", found, cert.URIs)
	}
	l.NodeKeyURI = "urn:bc:tpm-ak:ü"
	if _, err := a.Issue(l); err == nil {
		t.Error("a statement that is no IA5String was issued")
	}
}

func TestNamesThatMakeNoSPIFFEIDAreNotIssued(t *testing.T) {
	a := authority(t, secrets.Snapshot{"node-ca-1": aYear(t, "node-ca-1").secret(t)})
	for name, spoil := range map[string]func(*Leaf){
		"tenant with a slash":    func(l *Leaf) { l.Tenant = "a/node/n-1" },
		"tenant ..":              func(l *Leaf) { l.Tenant = ".." },
		"no tenant":              func(l *Leaf) { l.Tenant = "" },
		"tenant in capitals":     func(l *Leaf) { l.Tenant = "Factory" },
		"a long tenant":          func(l *Leaf) { l.Tenant = strings.Repeat("a", 64) },
		"no node":                func(l *Leaf) { l.NodeID = "" },
		"a node with a query":    func(l *Leaf) { l.NodeID = "n?x" },
		"a node with a line":     func(l *Leaf) { l.NodeID = "n-1\n" },
		"a role of its own":      func(l *Leaf) { l.Role = "root" },
		"trust domain with port": func(l *Leaf) { l.TrustDomain = "a:1" },
		"no lifetime":            func(l *Leaf) { l.Lifetime = 0 },
	} {
		t.Run(name, func(t *testing.T) {
			l := leafFor(ecKey(t, elliptic.P256()).Public())
			spoil(&l)
			if issued, err := a.Issue(l); err == nil {
				t.Errorf("issued %x", issued.Serial)
			}
		})
	}
}

func TestSerialsAreRandomAndPositive(t *testing.T) {
	seen := map[string]bool{}
	var or [16]byte
	for range 2000 {
		s, err := newSerial()
		if err != nil {
			t.Fatal(err)
		}
		if s.Sign() <= 0 || s.BitLen() > 128 || seen[s.String()] {
			t.Fatalf("serial %v", s)
		}
		seen[s.String()] = true
		for i, b := range s.FillBytes(make([]byte, 16)) {
			or[i] |= b
		}
	}
	if or != [16]byte(bytes.Repeat([]byte{0xff}, 16)) {
		t.Errorf("not all 128 bits are ever set: %x", or)
	}
}

// TestTheNewestValidCASigns adds, ends and removes CAs.
func TestTheNewestValidCASigns(t *testing.T) {
	first, second := aYear(t, "node-ca-1"), aYear(t, "node-ca-2")
	tenth := aYear(t, "node-ca-10")
	future := newCA(t, "node-ca-11", nil, now.Add(time.Hour), now.AddDate(1, 0, 0), nil)
	past := newCA(t, "node-ca-12", nil, now.AddDate(-1, 0, 0), now, nil)
	a := authority(t, nil)
	key := ecKey(t, elliptic.P256()).Public()
	if _, err := a.Issue(leafFor(key)); !errors.Is(err, ErrNoIssuer) || a.Ready(now) {
		t.Errorf("without a CA: %v, ready %t", err, a.Ready(now))
	}
	for _, step := range []struct {
		snapshot secrets.Snapshot
		want     ca
	}{
		{secrets.Snapshot{"node-ca-1": first.secret(t)}, first},
		{secrets.Snapshot{"node-ca-1": first.secret(t), "node-ca-2": second.secret(t)}, second},
		{secrets.Snapshot{"node-ca-2": second.secret(t), "node-ca-10": tenth.secret(t)}, tenth}, // 10 is newer than 2
		{secrets.Snapshot{"node-ca-10": tenth.secret(t), "node-ca-11": future.secret(t), "node-ca-12": past.secret(t)}, tenth},
		{secrets.Snapshot{"node-ca-1": first.secret(t), "node-ca-01": tenth.secret(t), "node-ca-x": tenth.secret(t), "other": tenth.secret(t)}, first},
	} {
		a.Load(step.snapshot)
		issued, cert := issue(t, a, leafFor(key))
		if !bytes.Equal(issued.IssuerDER, step.want.cert.Raw) || cert.CheckSignatureFrom(step.want.cert) != nil {
			t.Errorf("signed by %s, want %s", issued.IssuerName, step.want.cert.Subject)
		}
		if !bytes.Equal(a.SigningSKI(now), step.want.cert.SubjectKeyId) {
			t.Error("says that another signs")
		}
	}
	a.Load(secrets.Snapshot{})
	if _, err := a.Issue(leafFor(key)); !errors.Is(err, ErrNoIssuer) {
		t.Errorf("after its Secret went: %v", err)
	}
}

// TestARenewedCAKeepsItsKey is cert-manager's renewal: the same key, a new certificate.
func TestARenewedCAKeepsItsKey(t *testing.T) {
	old := newCA(t, "node-ca-1", nil, now.Add(-time.Hour), now.Add(time.Hour), nil)
	renewed := newCA(t, "node-ca-1", old.key, now.Add(-time.Minute), now.AddDate(1, 0, 0), nil)
	a := authority(t, secrets.Snapshot{"node-ca-1": old.secret(t)})
	_, before := issue(t, a, leafFor(ecKey(t, elliptic.P256()).Public()))
	a.Load(secrets.Snapshot{"node-ca-1": renewed.secret(t)})
	issued, after := issue(t, a, leafFor(ecKey(t, elliptic.P256()).Public()))
	if !bytes.Equal(issued.IssuerDER, renewed.cert.Raw) {
		t.Error("the old certificate is still sent")
	}
	for _, leaf := range []*x509.Certificate{before, after} {
		if err := leaf.CheckSignatureFrom(renewed.cert); err != nil {
			t.Error(err)
		}
	}
}

// TestSecretsThatCannotBeUsedKeepTheLastGoodPair spoils the Secret in every way
// that its two-step writing and people can.
func TestSecretsThatCannotBeUsedKeepTheLastGoodPair(t *testing.T) {
	good, other := aYear(t, "node-ca-1"), aYear(t, "node-ca-1")
	with := func(edit func(*x509.Certificate)) map[string][]byte {
		return newCA(t, "node-ca-1", nil, now.Add(-time.Hour), now.AddDate(1, 0, 0), edit).secret(t)
	}
	mixed := other.secret(t)
	mixed["tls.key"] = good.secret(t)["tls.key"]
	for name, bad := range map[string]map[string][]byte{
		"certificate of another key": mixed,
		"empty":                      {},
		"no key yet":                 {"tls.crt": good.secret(t)["tls.crt"]},
		"no certificate yet":         {"tls.key": good.secret(t)["tls.key"]},
		"garbage":                    {"tls.crt": []byte("x"), "tls.key": []byte("y")},
		"no CA":                      with(func(c *x509.Certificate) { c.IsCA = false }),
		"may not sign certificates":  with(func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageCRLSign }),
	} {
		t.Run(name, func(t *testing.T) {
			a := authority(t, secrets.Snapshot{"node-ca-1": bad})
			if a.Ready(now) {
				t.Error("ready with it alone")
			}
			a.Load(secrets.Snapshot{"node-ca-1": good.secret(t)})
			a.Load(secrets.Snapshot{"node-ca-1": bad})
			issued, _ := issue(t, a, leafFor(ecKey(t, elliptic.P256()).Public()))
			if !bytes.Equal(issued.IssuerDER, good.cert.Raw) {
				t.Error("signed by another than the last good pair")
			}
			a.Load(secrets.Snapshot{"node-ca-1": other.secret(t)})
			if issued, _ := issue(t, a, leafFor(ecKey(t, elliptic.P256()).Public())); !bytes.Equal(issued.IssuerDER, other.cert.Raw) {
				t.Error("the next good pair was not taken")
			}
		})
	}
}

// liar is a key that signs with another.
type liar struct {
	*ecdsa.PrivateKey
	other *ecdsa.PrivateKey
}

func (l liar) Sign(r io.Reader, digest []byte, opts crypto.SignerOpts) ([]byte, error) {
	return l.other.Sign(r, digest, opts)
}

// TestNoLeafLeavesThatDoesNotVerify has a CA's key sign wrongly.
func TestNoLeafLeavesThatDoesNotVerify(t *testing.T) {
	good := aYear(t, "node-ca-1")
	i, err := load("node-ca-1", 1, good.secret(t))
	if err != nil {
		t.Fatal(err)
	}
	i.key = liar{good.key.(*ecdsa.PrivateKey), ecKey(t, elliptic.P256())}
	if issued, err := i.issue(leafFor(ecKey(t, elliptic.P256()).Public())); err == nil {
		t.Errorf("issued %x", issued.Serial)
	}
}

// TestIssuersMayHaveAnyKey is for CAs that people bring.
func TestIssuersMayHaveAnyKey(t *testing.T) {
	for name, key := range map[string]crypto.Signer{"P-384": ecKey(t, elliptic.P384()), "RSA": rsaKey(t, 2048)} {
		t.Run(name, func(t *testing.T) {
			c := newCA(t, "node-ca-3", key, now.Add(-time.Hour), now.AddDate(1, 0, 0), nil)
			secret := c.secret(t)
			switch k := key.(type) { // as cert-manager writes them by default
			case *ecdsa.PrivateKey:
				der, err := x509.MarshalECPrivateKey(k)
				if err != nil {
					t.Fatal(err)
				}
				secret["tls.key"] = pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})
			case *rsa.PrivateKey:
				secret["tls.key"] = pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(k)})
			}
			_, cert := issue(t, authority(t, secrets.Snapshot{"node-ca-3": secret}), leafFor(ecKey(t, elliptic.P256()).Public()))
			if err := cert.CheckSignatureFrom(c.cert); err != nil {
				t.Error(err)
			}
		})
	}
}

func BenchmarkParseCSR(b *testing.B) {
	der := makeCSR(b, ecKey(b, elliptic.P256()), nil)
	for b.Loop() {
		if _, err := ParseCSR(der); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkIssue(b *testing.B) {
	a := authority(b, secrets.Snapshot{"node-ca-1": aYear(b, "node-ca-1").secret(b)})
	l := leafFor(ecKey(b, elliptic.P256()).Public())
	for b.Loop() {
		if _, err := a.Issue(l); err != nil {
			b.Fatal(err)
		}
	}
}
