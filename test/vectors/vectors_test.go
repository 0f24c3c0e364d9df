// Package vectors holds the protocol's test vectors and checks that this code
// agrees with them. docs/protocol says what they are.
//
// The files are made by "go test ./test/vectors -update", most keys from fixed
// seeds. Sealed parts and ECDSA and RSA signatures are random by
// nature: these come out anew, and a run without -update only verifies them.
package vectors

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/hpke"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"flag"
	"math/big"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/join-operator/agent/trust"
	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/attestors/jointoken"
)

var update = flag.Bool("update", false, "write the vectors anew")

// The private halves of all vectors are SHA-256 of these words: known to all.
func seed(word string) []byte {
	s := sha256.Sum256([]byte("join-operator test vectors: " + word))
	return s[:]
}

func load(t *testing.T, name string, v any) {
	t.Helper()
	raw, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
}

func save(t *testing.T, name string, v any) {
	t.Helper()
	raw, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, append(raw, '\n'), 0o644); err != nil {
		t.Fatal(err)
	}
}

// ---- Sealed part -----------------------------------------------------------

type sealedFile struct {
	About string `json:"about"`
	// KID, RecipientPrivate and RecipientPublic are the sealing key: HPKE private
	// key bytes and public key bytes of MLKEM768-X25519 in hex.
	KID              string       `json:"kid"`
	RecipientPrivate string       `json:"recipientPrivateHex"`
	RecipientPublic  string       `json:"recipientPublicHex"`
	CSR              string       `json:"csrBase64"`
	CSRSHA256        string       `json:"csrSHA256"`
	Cases            []sealedCase `json:"cases"`
}

type sealedCase struct {
	Attestor  string          `json:"attestor"`
	Role      wire.Role       `json:"role"`
	AADInput  string          `json:"aadInputHex"`
	AAD       string          `json:"aadHex"`
	Plaintext string          `json:"plaintext"`
	Envelope  json.RawMessage `json:"envelope"`
}

// encSize is the length of MLKEM768-X25519's encapsulated key.
const encSize = 1120

func recipient(t *testing.T) hpke.PrivateKey {
	t.Helper()
	key, err := hpke.MLKEM768X25519().NewPrivateKey(seed("sealing"))
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func keyID(public []byte) string {
	sum := sha256.Sum256(public)
	return hex.EncodeToString(sum[:8])
}

// TestSealedPart opens each envelope and makes its AAD anew.
func TestSealedPart(t *testing.T) {
	const name = "sealed.json"
	key := recipient(t)
	if *update {
		save(t, name, makeSealed(t, key))
	}
	var f sealedFile
	load(t, name, &f)
	csr := unbase64(t, f.CSR)
	if raw, err := key.Bytes(); err != nil || hex.EncodeToString(raw) != f.RecipientPrivate || hex.EncodeToString(key.PublicKey().Bytes()) != f.RecipientPublic {
		t.Fatalf("the sealing key differs (error %v)", err)
	}
	if sum := sha256.Sum256(csr); hex.EncodeToString(sum[:]) != f.CSRSHA256 {
		t.Error("csrSHA256 differs")
	}
	for _, c := range f.Cases {
		aad := wire.SealAAD(c.Attestor, c.Role, csr)
		if hex.EncodeToString(aad) != c.AAD {
			t.Errorf("attestor %q: AAD %x", c.Attestor, aad)
		}
		if sum := sha256.Sum256(unhex(t, c.AADInput)); hex.EncodeToString(sum[:]) != c.AAD {
			t.Errorf("attestor %q: the AAD's input does not hash to it", c.Attestor)
		}
		j, err := wire.DecodeJoin(c.Envelope)
		if err != nil || j.Attestor != c.Attestor || j.Role != c.Role || !bytes.Equal(j.CSR, csr) || j.KeyID != f.KID {
			t.Fatalf("attestor %q: envelope %v, error %v", c.Attestor, j, err)
		}
		r, err := hpke.NewRecipient(j.Sealed[:encSize], key, hpke.HKDFSHA256(), hpke.ChaCha20Poly1305(), []byte(wire.SealInfo))
		if err != nil {
			t.Fatal(err)
		}
		plaintext, err := r.Open(aad, j.Sealed[encSize:])
		if err != nil || string(plaintext) != c.Plaintext {
			t.Errorf("attestor %q: opened %q, error %v", c.Attestor, plaintext, err)
		}
		if _, err := wire.DecodeSealed(plaintext); err != nil {
			t.Errorf("attestor %q: %v", c.Attestor, err)
		}
		if _, err := r.Open(wire.SealAAD(c.Attestor+"x", c.Role, csr), j.Sealed[encSize:]); err == nil {
			t.Error("opens for another attestor")
		}
	}
}

func makeSealed(t *testing.T, key hpke.PrivateKey) sealedFile {
	t.Helper()
	raw, err := key.Bytes()
	if err != nil {
		t.Fatal(err)
	}
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, ed25519.NewKeyFromSeed(seed("machine")))
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(csr)
	f := sealedFile{
		About: "HPKE base mode, MLKEM768-X25519 (0x647a), HKDF-SHA256 (1), ChaCha20-Poly1305 (3), info bc-join/v1; sealed = enc (1120 bytes) || ciphertext",
		KID:   keyID(key.PublicKey().Bytes()), RecipientPrivate: hex.EncodeToString(raw), RecipientPublic: hex.EncodeToString(key.PublicKey().Bytes()),
		CSR: wire.EncodeBase64(csr), CSRSHA256: hex.EncodeToString(sum[:]),
	}
	for _, c := range []struct {
		attestor string
		role     wire.Role
		sealed   wire.Sealed
	}{
		{"", wire.RoleNode, wire.Sealed{Token: "bcjt_" + strings.Repeat("a", 12) + "_" + strings.Repeat("2", 32) + "_00000000"}},
		{"join-token", wire.RoleRamdisk, wire.Sealed{Claims: wire.Claims{SerialNumber: "S1", MACAddresses: []string{"02:00:00:00:00:01"}}}},
		{"tpm", wire.RoleSite, wire.Sealed{Evidence: []byte{0, 1, 2, 255}}},
	} {
		plaintext, err := json.Marshal(&c.sealed)
		if err != nil {
			t.Fatal(err)
		}
		enc, sender, err := hpke.NewSender(key.PublicKey(), hpke.HKDFSHA256(), hpke.ChaCha20Poly1305(), []byte(wire.SealInfo))
		if err != nil {
			t.Fatal(err)
		}
		aad := wire.SealAAD(c.attestor, c.role, csr)
		ciphertext, err := sender.Seal(aad, plaintext)
		if err != nil {
			t.Fatal(err)
		}
		envelope, err := json.Marshal(&wire.Join{Attestor: c.attestor, Role: c.role, CSR: csr, KeyID: f.KID, Sealed: append(enc, ciphertext...)})
		if err != nil {
			t.Fatal(err)
		}
		input := append([]byte("bc-join/v1\x00"+c.attestor+"\x00"+string(c.role)+"\x00"), csr...)
		f.Cases = append(f.Cases, sealedCase{c.attestor, c.role, hex.EncodeToString(input), hex.EncodeToString(aad), string(plaintext), envelope})
	}
	return f
}

// ---- Statements ------------------------------------------------------------

type statementsFile struct {
	About string `json:"about"`
	// Leaf and CSR stand for DER; statements are over their SHA-256.
	Leaf       string            `json:"leafHex"`
	CSR        string            `json:"csrHex"`
	Statements map[string]string `json:"statementsHex"`
	Signatures []signatureCase   `json:"signatures"`
}

type signatureCase struct {
	Key       string `json:"key"`
	PublicKey string `json:"publicKeyPEM"`
	Statement string `json:"statement"`
	Signature string `json:"signatureBase64"`
}

// TestStatements makes each statement anew and verifies each signature.
func TestStatements(t *testing.T) {
	const name = "statements.json"
	leaf, csr := []byte("leaf"), []byte("request")
	want := map[string][]byte{
		"renew": wire.RenewStatement(leaf, csr), "x509pop": wire.X509POPStatement(leaf, csr), "confirm": wire.ConfirmStatement(leaf),
	}
	if *update {
		save(t, name, makeStatements(t, leaf, csr, want))
	}
	var f statementsFile
	load(t, name, &f)
	if !bytes.Equal(unhex(t, f.Leaf), leaf) || !bytes.Equal(unhex(t, f.CSR), csr) || len(f.Statements) != len(want) {
		t.Fatal("the vectors are of other inputs")
	}
	for label, statement := range want {
		if f.Statements[label] != hex.EncodeToString(statement) {
			t.Errorf("%s: %x", label, statement)
		}
	}
	if len(f.Signatures) != 4 {
		t.Fatalf("%d signatures", len(f.Signatures))
	}
	for _, s := range f.Signatures {
		block, _ := pem.Decode([]byte(s.PublicKey))
		pub, err := x509.ParsePKIXPublicKey(block.Bytes)
		if err != nil {
			t.Fatal(err)
		}
		signature := unbase64(t, s.Signature)
		if err := wire.VerifyStatement(pub, want[s.Statement], signature); err != nil {
			t.Errorf("%s: %v", s.Key, err)
		}
		if err := wire.VerifyStatement(pub, want["renew"], signature); err == nil {
			t.Errorf("%s: verifies for another statement", s.Key)
		}
	}
}

func makeStatements(t *testing.T, leaf, csr []byte, statements map[string][]byte) statementsFile {
	t.Helper()
	f := statementsFile{
		About: "leaf and CSR are the ASCII words; ECDSA is ASN.1 with SHA-256 (P-256) or SHA-384 (P-384), Ed25519 pure, RSA PSS with SHA-256 and salt 32",
		Leaf:  hex.EncodeToString(leaf), CSR: hex.EncodeToString(csr), Statements: map[string]string{},
	}
	for label, s := range statements {
		f.Statements[label] = hex.EncodeToString(s)
	}
	p256, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	p384, err := ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	rsaKey, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range []struct {
		name string
		key  crypto.Signer
	}{{"ECDSA P-256", p256}, {"ECDSA P-384", p384}, {"Ed25519", ed25519.NewKeyFromSeed(seed("machine"))}, {"RSA-2048", rsaKey}} {
		spki, err := x509.MarshalPKIXPublicKey(k.key.Public())
		if err != nil {
			t.Fatal(err)
		}
		signature, err := wire.SignStatement(k.key, statements["confirm"])
		if err != nil {
			t.Fatal(err)
		}
		f.Signatures = append(f.Signatures, signatureCase{
			k.name, string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: spki})), "confirm", wire.EncodeBase64(signature),
		})
	}
	return f
}

// ---- Tokens ----------------------------------------------------------------

type tokensFile struct {
	About string      `json:"about"`
	Valid []tokenCase `json:"valid"`
	// Invalid are texts that are no tokens, with the reason.
	Invalid map[string]string `json:"invalid"`
}

type tokenCase struct {
	Text         string `json:"text"`
	ID           string `json:"id"`
	Namespace    string `json:"namespace"`
	HashInput    string `json:"hashInputHex"`
	SecretSHA256 string `json:"secretSHA256"`
}

// TestTokens reads each text and hashes its secret.
func TestTokens(t *testing.T) {
	const name = "token.json"
	if *update {
		save(t, name, makeTokens())
	}
	var f tokensFile
	load(t, name, &f)
	if len(f.Valid) < 2 || len(f.Invalid) < 8 {
		t.Fatal("vectors are missing")
	}
	for _, c := range f.Valid {
		token, err := jointoken.Parse(c.Text)
		if err != nil || token.ID != c.ID || token.Text() != c.Text {
			t.Errorf("%s: id %q, error %v", c.Text, token.ID, err)
		}
		if sum := token.SecretSHA256(c.Namespace); hex.EncodeToString(sum[:]) != c.SecretSHA256 {
			t.Errorf("%s in %s: %x", c.Text, c.Namespace, sum)
		}
		if sum := sha256.Sum256(unhex(t, c.HashInput)); hex.EncodeToString(sum[:]) != c.SecretSHA256 {
			t.Errorf("%s: the hash's input does not hash to it", c.Text)
		}
	}
	for why, text := range f.Invalid {
		if _, err := jointoken.Parse(text); err == nil {
			t.Errorf("%s: %q passes", why, text)
		}
	}
}

func makeTokens() tokensFile {
	// CRC-32 (IEEE) by hand from the polynomial, not by the code under test.
	crc := func(s string) string {
		sum := uint32(0xffffffff)
		for _, b := range []byte(s) {
			sum ^= uint32(b)
			for range 8 {
				sum = sum>>1 ^ 0xedb88320*(sum&1)
			}
		}
		sum = ^sum
		return hex.EncodeToString([]byte{byte(sum >> 24), byte(sum >> 16), byte(sum >> 8), byte(sum)})
	}
	f := tokensFile{About: "bcjt_<id>_<secret>_<crc32>; secretSHA256 = SHA-256(bcjt/v1 NUL namespace NUL id NUL secret)"}
	for _, c := range [][3]string{
		{"abcdefghijkl", "abcdefghijklmnopqrstuvwxyz234567", "acme"},
		{"777777777777", "22222222222222222222222222222222", "join-system"},
	} {
		body := "bcjt_" + c[0] + "_" + c[1]
		input := "bcjt/v1\x00" + c[2] + "\x00" + c[0] + "\x00" + c[1]
		sum := sha256.Sum256([]byte(input))
		f.Valid = append(f.Valid, tokenCase{body + "_" + crc(body), c[0], c[2], hex.EncodeToString([]byte(input)), hex.EncodeToString(sum[:])})
	}
	good := f.Valid[0].Text
	body := good[:len(good)-9]
	digit := "bcjt_abcdefghijk1_" + strings.Repeat("a", 32)
	f.Invalid = map[string]string{
		"empty": "", "no checksum": body, "wrong checksum": body + "_00000000", "checksum in capitals": body + "_" + strings.ToUpper(good[len(good)-8:]),
		"in capitals": strings.ToUpper(good), "space before": " " + good, "newline after": good + "\n", "NUL after": good + "\x00",
		"one character changed": strings.Replace(good, "abc", "abd", 1), "another prefix": "bcjx" + good[4:],
		"a character outside base32, checksum right": digit + "_" + crc(digit),
	}
	return f
}

// ---- Answers ---------------------------------------------------------------

type answersFile struct {
	About string          `json:"about"`
	Keys  json.RawMessage `json:"signingKeys"`
	Seed  string          `json:"signingSeedHex"`
	// Bundle is one that pins the keys.
	Bundle string       `json:"bundle"`
	Cases  []answerCase `json:"cases"`
}

type answerCase struct {
	Name string `json:"name"`
	JWS  string `json:"jws"`
	// Valid says whether a machine that pinned the bundle believes the signature;
	// then Payload is what it reads.
	Valid   bool   `json:"valid"`
	Payload string `json:"payload,omitempty"`
}

// TestAnswers opens each answer with the pinned bundle.
func TestAnswers(t *testing.T) {
	const name = "answers.json"
	if *update {
		save(t, name, makeAnswers(t))
	}
	var f answersFile
	load(t, name, &f)
	b, err := trust.Parse([]byte(f.Bundle))
	if err != nil {
		t.Fatal(err)
	}
	valid := 0
	for _, c := range f.Cases {
		a, err := b.OpenAnswer([]byte(c.JWS))
		if (err == nil) != c.Valid {
			t.Errorf("%s: error %v, want valid %t", c.Name, err, c.Valid)
			continue
		}
		if !c.Valid {
			continue
		}
		valid++
		var want wire.Answer
		if err := json.Unmarshal([]byte(c.Payload), &want); err != nil || want.Outcome != a.Outcome || want.CSRSHA256 != a.CSRSHA256 || !want.IssuedAt.Equal(a.IssuedAt) {
			t.Errorf("%s: read %+v (error %v)", c.Name, a, err)
		}
	}
	if valid != 3 || len(f.Cases) < 10 {
		t.Errorf("%d of %d cases are valid", valid, len(f.Cases))
	}
}

func sign(key ed25519.PrivateKey, header, payload string) string {
	input := base64.RawURLEncoding.EncodeToString([]byte(header)) + "." + base64.RawURLEncoding.EncodeToString([]byte(payload))
	return input + "." + base64.RawURLEncoding.EncodeToString(ed25519.Sign(key, []byte(input)))
}

func signer(word string) (key ed25519.PrivateKey, kid string, jwks json.RawMessage) {
	key = ed25519.NewKeyFromSeed(seed(word))
	pub := key.Public().(ed25519.PublicKey)
	kid = keyID(pub)
	return key, kid, json.RawMessage(`{"keys":[{"kty":"OKP","crv":"Ed25519","alg":"EdDSA","use":"sig","kid":"` + kid + `","x":"` + base64.RawURLEncoding.EncodeToString(pub) + `"}]}`)
}

func makeAnswers(t *testing.T) answersFile {
	t.Helper()
	key, kid, keys := signer("signing")
	stranger, _, _ := signer("stranger")
	_, _, bundleKeys := signer("bundle-1")
	hash := strings.Repeat("ab", 32)
	pending := `{"protocol":1,"csrSHA256":"` + hash + `","outcome":"pending","issuedAt":"2026-03-01T12:00:00Z","joinRequest":"jr-abcdefghijklmnop","retryAfterSeconds":15}`
	header := func(change string) string {
		return `{"alg":"EdDSA","kid":"` + kid + `","typ":"bc-join+jws"` + change + `}`
	}
	whole := sign(key, header(""), pending)
	return answersFile{
		About: "the CSR hash stands for one; certificates are left out of joined: these vectors are about the signature",
		Keys:  keys, Seed: hex.EncodeToString(seed("signing")), Bundle: string(makeBundle(t, 1, keys, bundleKeys)),
		Cases: []answerCase{
			{"pending", whole, true, pending},
			{"challenge", sign(key, header(""), strings.Replace(pending, `"pending"`, `"challenge","attestor":"tpm","challenge":"AAEC","state":"AwQF"`, 1)), true, strings.Replace(pending, `"pending"`, `"challenge","attestor":"tpm","challenge":"AAEC","state":"AwQF"`, 1)},
			{"joined, with a field of the future", sign(key, header(""), `{"protocol":1,"csrSHA256":"`+hash+`","outcome":"joined","issuedAt":"2026-03-01T12:00:00Z","nodeID":"n-a","future":1}`), true, `{"protocol":1,"csrSHA256":"` + hash + `","outcome":"joined","issuedAt":"2026-03-01T12:00:00Z","nodeID":"n-a","future":1}`},
			{"a stranger under the pinned kid", sign(stranger, header(""), pending), false, ""},
			{"an unknown kid", sign(key, `{"alg":"EdDSA","kid":"0000000000000000","typ":"bc-join+jws"}`, pending), false, ""},
			{"no kid", sign(key, `{"alg":"EdDSA","typ":"bc-join+jws"}`, pending), false, ""},
			{"alg none", sign(key, `{"alg":"none","kid":"`+kid+`","typ":"bc-join+jws"}`, pending), false, ""},
			{"alg HS256", sign(key, `{"alg":"HS256","kid":"`+kid+`","typ":"bc-join+jws"}`, pending), false, ""},
			{"typ of a bundle", sign(key, `{"alg":"EdDSA","kid":"`+kid+`","typ":"bc-bundle+jws"}`, pending), false, ""},
			{"no typ", sign(key, `{"alg":"EdDSA","kid":"`+kid+`"}`, pending), false, ""},
			{"a critical header", sign(key, header(`,"crit":["exp"],"exp":1`), pending), false, ""},
			{"protocol 2", sign(key, header(""), strings.Replace(pending, `"protocol":1`, `"protocol":2`, 1)), false, ""},
			{"a doubled name", sign(key, header(""), strings.Replace(pending, `"outcome"`, `"outcome":"joined","outcome"`, 1)), false, ""},
			{"no signature", whole[:strings.LastIndexByte(whole, '.')+1], false, ""},
		},
	}
}

// ---- Bundle and rotations --------------------------------------------------

type rotationsFile struct {
	About string `json:"about"`
	// Pinned is generation 1, byte for byte; SHA256 are the hashes of generations
	// 1, 2 and 3.
	Pinned string   `json:"pinned"`
	SHA256 []string `json:"sha256"`
	// Answer is that of GET /v1/bundle/rotations?after=1.
	Answer wire.Rotations `json:"answer"`
	// Refused are links that must not be adopted after generation 1.
	Refused map[string]string `json:"refused"`
}

// TestRotations follows the links and none of the false ones.
func TestRotations(t *testing.T) {
	const name = "rotations.json"
	if *update {
		save(t, name, makeRotations(t))
	}
	var f rotationsFile
	load(t, name, &f)
	b, err := trust.Parse([]byte(f.Pinned))
	if err != nil {
		t.Fatal(err)
	}
	if len(f.Refused) < 6 || len(f.Answer.Rotations) != 2 || len(f.SHA256) != 3 {
		t.Fatal("vectors are missing")
	}
	for why, link := range f.Refused {
		if _, err := b.Follow(link); err == nil {
			t.Errorf("%s: followed", why)
		}
	}
	for i, link := range append([]string{""}, f.Answer.Rotations...) {
		if i > 0 {
			if b, err = b.Follow(link); err != nil {
				t.Fatal(err)
			}
		}
		if b.Generation() != i+1 || b.SHA256() != f.SHA256[i] {
			t.Errorf("generation %d with hash %s", b.Generation(), b.SHA256())
		}
	}
}

// makeBundle is one with the fixed authority and sealing key.
func makeBundle(t *testing.T, generation int, signing, rotating json.RawMessage) []byte {
	t.Helper()
	key := recipient(t)
	raw, err := json.Marshal(wire.Bundle{
		Protocol: 1, Generation: generation, TrustDomain: "test.join.example", Endpoints: []string{"https://join.example"},
		IssuedAt: time.Date(2026, 3, generation, 0, 0, 0, 0, time.UTC), TLSCA: authority(t), NodeCAs: authority(t),
		SigningKeys: signing, BundleKeys: rotating,
		Sealing: []wire.SealingKey{{KeyID: keyID(key.PublicKey().Bytes()), KEM: wire.KEMMLKEM768X25519, KDF: wire.KDFHKDFSHA256, AEAD: wire.AEADChaCha20Poly1305, PublicKey: wire.EncodeBase64(key.PublicKey().Bytes())}},
	})
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func authority(t *testing.T) string {
	t.Helper()
	key := ed25519.NewKeyFromSeed(seed("authority"))
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC), NotAfter: time.Date(2126, 1, 1, 0, 0, 0, 0, time.UTC),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
}

func makeRotations(t *testing.T) rotationsFile {
	t.Helper()
	_, _, signing := signer("signing")
	one, oneID, oneSet := signer("bundle-1")
	two, twoID, twoSet := signer("bundle-2")
	_, _, threeSet := signer("bundle-3")
	answers, answersID, _ := signer("signing")
	first, second, third := makeBundle(t, 1, signing, oneSet), makeBundle(t, 2, signing, twoSet), makeBundle(t, 3, signing, threeSet)
	header := func(kid string) string { return `{"alg":"EdDSA","kid":"` + kid + `","typ":"bc-bundle+jws"}` }
	f := rotationsFile{
		About:  "each link's payload is a whole bundle, signed by a bundle key of the generation before",
		Pinned: string(first),
		Answer: wire.Rotations{Protocol: 1, Rotations: []string{sign(one, header(oneID), string(second)), sign(two, header(twoID), string(third))}},
		Refused: map[string]string{
			"a skipped generation":                        sign(one, header(oneID), string(third)),
			"the same generation":                         sign(one, header(oneID), string(first)),
			"the next link, signed by generation 2's key": sign(two, header(twoID), string(third)),
			"signed by its own new key":                   sign(two, header(twoID), string(second)),
			"signed by the answers' key":                  sign(answers, header(answersID), string(second)),
			"typ of an answer":                            sign(one, `{"alg":"EdDSA","kid":"`+oneID+`","typ":"bc-join+jws"}`, string(second)),
			"another trust domain":                        sign(one, header(oneID), strings.Replace(string(second), "test.join.example", "evil.join.example", 1)),
		},
	}
	for _, raw := range [][]byte{first, second, third} {
		sum := sha256.Sum256(raw)
		f.SHA256 = append(f.SHA256, hex.EncodeToString(sum[:]))
	}
	return f
}

func unhex(t *testing.T, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func unbase64(t *testing.T, s string) []byte {
	t.Helper()
	b, err := wire.DecodeBase64(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
