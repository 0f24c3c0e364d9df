package pki

import (
	"bytes"
	"crypto"
	"crypto/dsa" //nolint:staticcheck // a key that must be refused
	"crypto/ecdh"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"math/big"
	"net"
	"net/url"
	"strings"
	"testing"

	"golang.org/x/crypto/cryptobyte"
	cbasn1 "golang.org/x/crypto/cryptobyte/asn1"
)

func makeCSR(tb testing.TB, key crypto.Signer, template *x509.CertificateRequest) []byte {
	tb.Helper()
	if template == nil {
		template = &x509.CertificateRequest{}
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, template, key)
	if err != nil {
		tb.Fatal(err)
	}
	return der
}

func ecKey(tb testing.TB, c elliptic.Curve) *ecdsa.PrivateKey {
	tb.Helper()
	key, err := ecdsa.GenerateKey(c, rand.Reader)
	if err != nil {
		tb.Fatal(err)
	}
	return key
}

func rsaKey(tb testing.TB, bits int) *rsa.PrivateKey {
	tb.Helper()
	tb.Setenv("GODEBUG", "rsa1024min=0")
	key, err := rsa.GenerateKey(rand.Reader, bits)
	if err != nil {
		tb.Fatal(err)
	}
	return key
}

// TestEveryAcceptedKeyAndItsHashes shows that each kind of key that the protocol
// names is taken, by whatever signature algorithm of its own it proves itself.
func TestEveryAcceptedKeyAndItsHashes(t *testing.T) {
	_, edKey, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	rsa2048, rsa4096 := rsaKey(t, 2048), rsaKey(t, 4096)
	for name, c := range map[string]struct {
		key       crypto.Signer
		algorithm x509.SignatureAlgorithm
	}{
		"P-256":                  {ecKey(t, elliptic.P256()), 0},
		"P-256 with SHA-512":     {ecKey(t, elliptic.P256()), x509.ECDSAWithSHA512},
		"P-384":                  {ecKey(t, elliptic.P384()), 0},
		"Ed25519":                {edKey, 0},
		"RSA 2048":               {rsa2048, 0},
		"RSA 2048 with PSS":      {rsa2048, x509.SHA256WithRSAPSS},
		"RSA 4096 with SHA-512":  {rsa4096, x509.SHA512WithRSA},
		"RSA 4096 PSS and SHA-2": {rsa4096, x509.SHA384WithRSAPSS},
	} {
		t.Run(name, func(t *testing.T) {
			der := makeCSR(t, c.key, &x509.CertificateRequest{SignatureAlgorithm: c.algorithm})
			csr, err := ParseCSR(der)
			if err != nil {
				t.Fatal(err)
			}
			if !c.key.Public().(interface{ Equal(crypto.PublicKey) bool }).Equal(csr.PublicKey) {
				t.Error("another key")
			}
			spki, err := x509.MarshalPKIXPublicKey(c.key.Public())
			if err != nil {
				t.Fatal(err)
			}
			if csr.SHA256 != sha256.Sum256(der) || csr.PublicKeySHA256 != sha256.Sum256(spki) || !bytes.Equal(csr.DER, der) {
				t.Error("hashes or bytes are not those of the request")
			}
		})
	}
}

// TestKeysAndRequestsThatAreRefused is the list of bad requests, one wrong thing each.
func TestKeysAndRequestsThatAreRefused(t *testing.T) {
	good := makeCSR(t, ecKey(t, elliptic.P256()), nil)
	if _, err := ParseCSR(good); err != nil {
		t.Fatal(err)
	}
	rsa2048 := rsaKey(t, 2048)
	large := &rsa.PublicKey{N: new(big.Int).SetBit(big.NewInt(1), 16383, 1), E: 65537}
	with := func(e int) *rsa.PublicKey { return &rsa.PublicKey{N: rsa2048.N, E: e} }
	ecdhKey, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	flipped := bytes.Clone(good)
	flipped[len(flipped)-1] ^= 1
	p256 := ecKey(t, elliptic.P256())
	for name, c := range map[string]struct {
		der  []byte
		want string
	}{
		"empty":               {nil, "DER"},
		"not DER":             {[]byte("hello"), "DER"},
		"too long":            {makeCSR(t, p256, &x509.CertificateRequest{DNSNames: []string{strings.Repeat("a", MaxCSR)}}), "longer"},
		"a trailing byte":     {append(bytes.Clone(good), 0), "DER"},
		"cut":                 {good[:len(good)-1], "DER"},
		"two requests":        {append(bytes.Clone(good), good...), "DER"},
		"BER length":          {berLength(t, good), "DER"},
		"indefinite length":   {append(append([]byte{0x30, 0x80}, inner(t, good)...), 0, 0), "DER"},
		"a bad signature":     {flipped, "signature"},
		"another's signature": {resign(t, info(t, p256.Public()), ecKey(t, elliptic.P256())), "signature"},
		"no attributes field": {resign(t, infoOf(t, p256.Public(), 0, nil), p256), "DER"},
		"more in the info":    {resign(t, infoOf(t, p256.Public(), 0, []byte{0xa0, 0, 5, 0}), p256), "DER"},
		"another version":     {resign(t, infoOf(t, p256.Public(), 1, []byte{0xa0, 0}), p256), "DER"},
		"more in the request": {moreInRequest(t, good), "DER"},
		"deep nesting":        {resign(t, infoOf(t, p256.Public(), 0, nested(t, 200)), p256), "DER"},
		"RSA 1024":            {makeCSR(t, rsaKey(t, 1024), nil), "1024 bits"},
		"RSA 2047":            {unsigned(t, &rsa.PublicKey{N: new(big.Int).SetBit(big.NewInt(1), 2046, 1), E: 65537}), "2047 bits"},
		"RSA 4097":            {unsigned(t, &rsa.PublicKey{N: new(big.Int).SetBit(big.NewInt(1), 4096, 1), E: 65537}), "4097 bits"},
		"RSA 16384":           {unsigned(t, large), "16384 bits"},
		"exponent 1":          {unsigned(t, with(1)), "exponent"},
		"exponent 3":          {unsigned(t, with(3)), "exponent"},
		"exponent 17":         {unsigned(t, with(17)), "exponent"},
		"an even exponent":    {unsigned(t, with(65538)), "exponent"},
		"an even modulus":     {unsigned(t, &rsa.PublicKey{N: new(big.Int).SetBit(new(big.Int), 2047, 1), E: 65537}), "exponent"},
		"a huge exponent":     {resignRSA(t, spkiRSA(t, rsa2048.N, new(big.Int).Lsh(big.NewInt(1), 64)), rsa2048), "can be read"},
		"a negative exponent": {resignRSA(t, spkiRSA(t, rsa2048.N, big.NewInt(-65537)), rsa2048), "can be read"},
		"exponent 0":          {resignRSA(t, spkiRSA(t, rsa2048.N, big.NewInt(0)), rsa2048), "can be read"},
		"P-224":               {makeCSR(t, ecKey(t, elliptic.P224()), nil), "P-256 nor P-384"},
		"P-521":               {makeCSR(t, ecKey(t, elliptic.P521()), nil), "P-256 nor P-384"},
		"X25519":              {unsigned(t, ecdhKey.PublicKey()), "not ECDSA, Ed25519 or RSA"},
		"DSA":                 {resignSPKI(t, spkiDSA(t), p256), "not ECDSA, Ed25519 or RSA"},
		"an unknown key":      {resignSPKI(t, spkiUnknown(t), p256), "not ECDSA, Ed25519 or RSA"},
		"SHA-1":               {sha1RSA(t, rsa2048), "algorithm"},
		"an odd encoding":     {oddEncoding(t), "unusual encoding"},
	} {
		t.Run(name, func(t *testing.T) {
			csr, err := ParseCSR(c.der)
			if err == nil {
				t.Fatalf("taken, with a key of type %T", csr.PublicKey)
			}
			if !strings.Contains(err.Error(), c.want) {
				t.Errorf("refused because it %q, want something about %q", err, c.want)
			}
		})
	}
}

func TestARequestThatFillsTheCapIsRead(t *testing.T) {
	key := ecKey(t, elliptic.P256())
	size := len(makeCSR(t, key, &x509.CertificateRequest{DNSNames: []string{strings.Repeat("a", MaxCSR/2)}})) - MaxCSR/2
	// ECDSA signatures vary by a few bytes.
	if _, err := ParseCSR(makeCSR(t, key, &x509.CertificateRequest{DNSNames: []string{strings.Repeat("a", MaxCSR-size-10)}})); err != nil {
		t.Error(err)
	}
}

// everyExtension is a request that asks for all that a certificate can say.
func everyExtension(tb testing.TB, key crypto.Signer) []byte {
	tb.Helper()
	ca, err := asn1.Marshal(struct {
		CA  bool
		Len int
	}{true, 3})
	if err != nil {
		tb.Fatal(err)
	}
	statement, err := asn1.MarshalWithParams("urn:bc:tpm-ak:"+strings.Repeat("0", 64), "ia5")
	if err != nil {
		tb.Fatal(err)
	}
	return makeCSR(tb, key, &x509.CertificateRequest{
		Subject:  pkix.Name{CommonName: "root", Organization: []string{"system:masters"}, SerialNumber: "1"},
		DNSNames: []string{"join-service.join-system.svc", "*"}, EmailAddresses: []string{"root@example.com"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		URIs: []*url.URL{{Scheme: "spiffe", Host: "test.join.example", Path: "/tenant/other/node/n-1"}},
		ExtraExtensions: []pkix.Extension{
			{Id: asn1.ObjectIdentifier{2, 5, 29, 19}, Critical: true, Value: ca},                                  // basic constraints
			{Id: asn1.ObjectIdentifier{2, 5, 29, 15}, Critical: true, Value: []byte{3, 2, 1, 6}},                  // key usage: cert sign, CRL sign
			{Id: asn1.ObjectIdentifier{2, 5, 29, 37}, Value: []byte{0x30, 6, 6, 4, 0x55, 0x1d, 0x25, 0}},          // any extended key usage
			{Id: asn1.ObjectIdentifier{2, 5, 29, 30}, Value: []byte{0x30, 0}},                                     // name constraints
			{Id: asn1.ObjectIdentifier{2, 5, 29, 32}, Value: []byte{0x30, 8, 0x30, 6, 6, 4, 0x55, 0x1d, 0x20, 0}}, // any policy
			{Id: asn1.ObjectIdentifier{2, 5, 29, 14}, Value: []byte{4, 1, 1}},                                     // subject key id
			{Id: asn1.ObjectIdentifier{2, 5, 29, 35}, Value: []byte{0x30, 3, 0x80, 1, 1}},                         // authority key id
			{Id: asn1.ObjectIdentifier{1, 3, 6, 1, 5, 5, 7, 1, 24}, Value: []byte{0x30, 3, 2, 1, 5}},              // must staple
			{Id: asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 11129, 2, 4, 3}, Critical: true, Value: []byte{5, 0}},    // CT poison
			{Id: NodeKeyStatement, Value: statement},
			{Id: asn1.ObjectIdentifier{1, 2, 3, 4}, Critical: true, Value: []byte("anything")},
		},
	})
}

// What follows builds requests that no library writes.

// info is a CertificationRequestInfo (RFC 2986 section 4.1) without subject and attributes.
func info(tb testing.TB, public crypto.PublicKey) []byte {
	return infoOf(tb, public, 0, []byte{0xa0, 0})
}

func infoOf(tb testing.TB, public crypto.PublicKey, version int64, attributes []byte) []byte {
	tb.Helper()
	spki, err := x509.MarshalPKIXPublicKey(public)
	if err != nil {
		tb.Fatal(err)
	}
	return infoWith(tb, spki, version, attributes)
}

func infoWith(tb testing.TB, spki []byte, version int64, attributes []byte) []byte {
	tb.Helper()
	return build(tb, func(b *cryptobyte.Builder) {
		b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) {
			b.AddASN1Int64(version)
			b.AddASN1(cbasn1.SEQUENCE, func(*cryptobyte.Builder) {})
			b.AddBytes(spki)
			b.AddBytes(attributes)
		})
	})
}

func build(tb testing.TB, f func(*cryptobyte.Builder)) []byte {
	tb.Helper()
	var b cryptobyte.Builder
	f(&b)
	der, err := b.Bytes()
	if err != nil {
		tb.Fatal(err)
	}
	return der
}

var (
	ecdsaSHA256 = []byte{0x30, 0x0a, 6, 8, 0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 2}
	rsaSHA256   = []byte{0x30, 0x0d, 6, 9, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 1, 0x0b, 5, 0}
	rsaSHA1     = []byte{0x30, 0x0d, 6, 9, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 1, 5, 5, 0}
)

func request(tb testing.TB, info, algorithm, signature []byte) []byte {
	tb.Helper()
	return build(tb, func(b *cryptobyte.Builder) {
		b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) {
			b.AddBytes(info)
			b.AddBytes(algorithm)
			b.AddASN1BitString(signature)
		})
	})
}

// resign signs an info with an ECDSA key.
func resign(tb testing.TB, info []byte, key *ecdsa.PrivateKey) []byte {
	tb.Helper()
	digest := sha256.Sum256(info)
	signature, err := ecdsa.SignASN1(rand.Reader, key, digest[:])
	if err != nil {
		tb.Fatal(err)
	}
	return request(tb, info, ecdsaSHA256, signature)
}

func resignSPKI(tb testing.TB, spki []byte, key *ecdsa.PrivateKey) []byte {
	tb.Helper()
	return resign(tb, infoWith(tb, spki, 0, []byte{0xa0, 0}), key)
}

func resignRSA(tb testing.TB, spki []byte, key *rsa.PrivateKey) []byte {
	tb.Helper()
	i := infoWith(tb, spki, 0, []byte{0xa0, 0})
	digest := sha256.Sum256(i)
	signature, err := rsa.SignPKCS1v15(rand.Reader, key, crypto.SHA256, digest[:])
	if err != nil {
		tb.Fatal(err)
	}
	return request(tb, i, rsaSHA256, signature)
}

// unsigned is for keys that have no private half here: they must be refused before
// their signature is looked at.
func unsigned(tb testing.TB, public crypto.PublicKey) []byte {
	tb.Helper()
	return request(tb, info(tb, public), rsaSHA256, make([]byte, 256))
}

func sha1RSA(tb testing.TB, key *rsa.PrivateKey) []byte {
	tb.Helper()
	i := info(tb, key.Public())
	h := crypto.SHA1.New()
	h.Write(i)
	signature, err := rsa.SignPKCS1v15(rand.Reader, key, crypto.SHA1, h.Sum(nil))
	if err != nil {
		tb.Fatal(err)
	}
	return request(tb, i, rsaSHA1, signature)
}

func spkiRSA(tb testing.TB, n, e *big.Int) []byte {
	tb.Helper()
	return build(tb, func(b *cryptobyte.Builder) {
		b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) {
			b.AddBytes([]byte{0x30, 0x0d, 6, 9, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 1, 1, 5, 0})
			b.AddASN1(cbasn1.BIT_STRING, func(b *cryptobyte.Builder) {
				b.AddUint8(0)
				b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) {
					b.AddASN1BigInt(n)
					b.AddASN1BigInt(e)
				})
			})
		})
	})
}

func spkiDSA(tb testing.TB) []byte {
	tb.Helper()
	var p dsa.Parameters
	if err := dsa.GenerateParameters(&p, rand.Reader, dsa.L1024N160); err != nil {
		tb.Fatal(err)
	}
	key := dsa.PrivateKey{PublicKey: dsa.PublicKey{Parameters: p}}
	if err := dsa.GenerateKey(&key, rand.Reader); err != nil {
		tb.Fatal(err)
	}
	return build(tb, func(b *cryptobyte.Builder) {
		b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) {
			b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) {
				b.AddBytes([]byte{6, 7, 0x2a, 0x86, 0x48, 0xce, 0x38, 4, 1})
				b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) {
					b.AddASN1BigInt(p.P)
					b.AddASN1BigInt(p.Q)
					b.AddASN1BigInt(p.G)
				})
			})
			b.AddASN1(cbasn1.BIT_STRING, func(b *cryptobyte.Builder) {
				b.AddUint8(0)
				b.AddASN1BigInt(key.Y)
			})
		})
	})
}

func spkiUnknown(tb testing.TB) []byte {
	tb.Helper()
	return build(tb, func(b *cryptobyte.Builder) {
		b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) {
			b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) { b.AddASN1ObjectIdentifier(asn1.ObjectIdentifier{1, 2, 3, 4, 5}) })
			b.AddASN1BitString([]byte("a key of tomorrow"))
		})
	})
}

// oddEncoding is an Ed25519 key whose SubjectPublicKeyInfo has one field too many,
// which common parsers ignore.
func oddEncoding(tb testing.TB) []byte {
	tb.Helper()
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		tb.Fatal(err)
	}
	spki := build(tb, func(b *cryptobyte.Builder) {
		b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) {
			b.AddBytes(ed25519Algorithm)
			b.AddASN1BitString(public)
			b.AddASN1NULL()
		})
	})
	i := infoWith(tb, spki, 0, []byte{0xa0, 0})
	return request(tb, i, ed25519Algorithm, ed25519.Sign(private, i))
}

var ed25519Algorithm = []byte{0x30, 5, 6, 3, 0x2b, 0x65, 0x70}

// inner is the content of the outermost sequence.
func inner(tb testing.TB, der []byte) []byte {
	tb.Helper()
	s := cryptobyte.String(der)
	var content cryptobyte.String
	if !s.ReadASN1(&content, cbasn1.SEQUENCE) {
		tb.Fatal("no sequence")
	}
	return content
}

// berLength writes the outermost length with one byte too many.
func berLength(tb testing.TB, der []byte) []byte {
	tb.Helper()
	content := inner(tb, der)
	return append([]byte{0x30, 0x83, 0, byte(len(content) >> 8), byte(len(content))}, content...)
}

func moreInRequest(tb testing.TB, der []byte) []byte {
	tb.Helper()
	return build(tb, func(b *cryptobyte.Builder) {
		b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) {
			b.AddBytes(inner(tb, der))
			b.AddASN1NULL()
		})
	})
}

// nested is attributes that nest sequences.
func nested(tb testing.TB, depth int) []byte {
	tb.Helper()
	out := []byte{5, 0}
	for range depth {
		out = build(tb, func(b *cryptobyte.Builder) {
			b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) { b.AddBytes(out) })
		})
	}
	return build(tb, func(b *cryptobyte.Builder) {
		b.AddASN1(cbasn1.Tag(0).ContextSpecific().Constructed(), func(b *cryptobyte.Builder) { b.AddBytes(out) })
	})
}

// FuzzParseCSR must neither panic nor take what the standard library would not.
func FuzzParseCSR(f *testing.F) {
	_, ed, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		f.Fatal(err)
	}
	for _, key := range []crypto.Signer{ecKey(f, elliptic.P256()), ecKey(f, elliptic.P384()), ed} {
		f.Add(makeCSR(f, key, nil))
		f.Add(everyExtension(f, key))
	}
	f.Add(oddEncoding(f))
	f.Add(nested(f, 20))
	f.Fuzz(func(t *testing.T, der []byte) {
		csr, err := ParseCSR(der)
		if err != nil {
			if csr != nil || err.Error() == "" || len(err.Error()) > 200 {
				t.Errorf("refused with %v and %q", csr, err)
			}
			return
		}
		parsed, err := x509.ParseCertificateRequest(der)
		if err != nil || parsed.CheckSignature() != nil {
			t.Error("took what the standard library does not")
		}
		if checkKey(csr.PublicKey) != nil {
			t.Error("took a key that is not accepted")
		}
	})
}
