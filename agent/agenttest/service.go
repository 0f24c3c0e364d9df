// Package agenttest is a join service for tests of a machine: it speaks the real
// protocol over real TLS with keys made in the test, and says and does whatever
// a test tells it to. Left alone it admits everybody, and renews by the rules of
// generations, so that a machine that behaves like a clone is found out.
package agenttest

import (
	"crypto"
	"crypto/hpke"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/better-compute/join-operator/api/wire"
)

// TrustDomain is that of every [Service].
const TrustDomain = "test.join.example"

// Join is a join that came, opened.
type Join struct {
	*wire.Join
	Body   []byte
	Sealed *wire.Sealed
	CSR    *x509.CertificateRequest
}

// CSRSHA256 is what an answer to this join says.
func (j *Join) CSRSHA256() string {
	sum := sha256.Sum256(j.Join.CSR)
	return hex.EncodeToString(sum[:])
}

// Service is a gateway and a join service in one.
type Service struct {
	t      testing.TB
	Clock  *Clock
	TLSCA  *Authority
	NodeCA *Authority
	// Signer signs answers, Rotator the next generation of the bundle.
	Signer, Rotator SigningKey
	Server          *httptest.Server
	// KeepKeys makes Rotate change the bundle key alone.
	KeepKeys bool
	// Lifetime is that of certificates; default 168 h.
	Lifetime time.Duration
	// Proof, where set, is what proves the statement of every certificate: renewals
	// and joins by a certificate are challenged.
	Proof []byte

	mu      sync.Mutex
	sealKey hpke.PrivateKey
	sealID  string
	bundle  wire.Bundle
	raw     []byte
	links   []string
	joins   []*Join
	issued  map[string]*wire.Answer
	// confirmed counts confirmations by the leaf's SHA-256 in hex.
	confirmed map[string]int
	walks     []int
	renewals  []*Renewal
	certs     map[string]*cert
	conflicts int
	onRenew   func(w http.ResponseWriter, r *Renewal)
	onJoin    func(w http.ResponseWriter, j *Join)
	onConfirm http.HandlerFunc
	onWalk    http.HandlerFunc
}

// New starts a service that admits every join. It ends with the test.
func New(t testing.TB) *Service {
	t.Helper()
	s := &Service{
		t: t, Clock: NewClock(), TLSCA: NewAuthority(t, "tls"), NodeCA: NewAuthority(t, "node-ca-1"),
		Signer: NewSigningKey(t), Rotator: NewSigningKey(t),
		issued: map[string]*wire.Answer{}, confirmed: map[string]int{}, certs: map[string]*cert{}, Lifetime: 168 * time.Hour,
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+wire.PathJoin, s.serveJoin)
	mux.HandleFunc("POST "+wire.PathRenew, s.serveRenew)
	mux.HandleFunc("POST "+wire.PathConfirm, s.serveConfirm)
	mux.HandleFunc("GET "+wire.PathRotations, s.serveRotations)
	s.Server = s.Serve(mux, s.TLSCA)
	s.newSealingKey()
	s.publish(wire.Bundle{
		Protocol: wire.Protocol, Generation: 1, TrustDomain: TrustDomain, Endpoints: []string{s.Server.URL},
		IssuedAt: Start.AddDate(0, 0, -1), TLSCA: s.TLSCA.PEM(), NodeCAs: s.NodeCA.PEM(),
		SigningKeys: jwks(t, s.Signer), BundleKeys: jwks(t, s.Rotator),
	})
	return s
}

// Serve starts one more HTTPS server whose certificate is by the given CA.
func (s *Service) Serve(h http.Handler, ca *Authority) *httptest.Server {
	s.t.Helper()
	server := httptest.NewUnstartedServer(h)
	server.TLS = &tls.Config{Certificates: []tls.Certificate{ca.serve(s.t)}, MinVersion: tls.VersionTLS13}
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.StartTLS()
	s.t.Cleanup(server.Close)
	return server
}

func (s *Service) newSealingKey() {
	key, err := hpke.MLKEM768X25519().GenerateKey()
	if err != nil {
		s.t.Fatal(err)
	}
	sum := sha256.Sum256(key.PublicKey().Bytes())
	s.sealKey, s.sealID = key, hex.EncodeToString(sum[:8])
}

// publish makes b the newest bundle.
func (s *Service) publish(b wire.Bundle) []byte {
	b.Sealing = []wire.SealingKey{{
		KeyID: s.sealID, KEM: wire.KEMMLKEM768X25519, KDF: wire.KDFHKDFSHA256, AEAD: wire.AEADChaCha20Poly1305,
		PublicKey: wire.EncodeBase64(s.sealKey.PublicKey().Bytes()),
	}}
	raw, err := json.Marshal(b)
	if err != nil {
		s.t.Fatal(err)
	}
	s.bundle, s.raw = b, raw
	return raw
}

// Bundle is the newest bundle's bytes.
func (s *Service) Bundle() []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.raw
}

// EditBundle replaces the newest bundle without a new generation, as if it had
// been published so from the start.
func (s *Service) EditBundle(edit func(*wire.Bundle)) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.bundle
	edit(&b)
	return s.publish(b)
}

// Rotate publishes the next generation, signed as it should be, with new keys;
// edit may change the rest.
func (s *Service) Rotate(edit func(*wire.Bundle)) string {
	s.t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	by := s.Rotator
	s.Rotator = NewSigningKey(s.t)
	if !s.KeepKeys {
		s.Signer = NewSigningKey(s.t)
		s.newSealingKey()
	}
	b := s.bundle
	b.Generation++
	b.IssuedAt = s.Clock.Now()
	b.SigningKeys, b.BundleKeys = jwks(s.t, s.Signer), jwks(s.t, s.Rotator)
	if edit != nil {
		edit(&b)
	}
	link := by.Sign(s.t, wire.TypeBundle, s.publish(b))
	s.links = append(s.links, link)
	return link
}

// SetLinks replaces what the rotations answer says, from generation 1 on.
func (s *Service) SetLinks(links ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.links = links
}

// NextBundle is the bundle that Rotate would publish, without publishing it.
func (s *Service) NextBundle(edit func(*wire.Bundle)) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.bundle
	b.Generation++
	edit(&b)
	raw, err := json.Marshal(b)
	if err != nil {
		s.t.Fatal(err)
	}
	return raw
}

// OnJoin replaces what answers joins; nil admits again.
func (s *Service) OnJoin(f func(w http.ResponseWriter, j *Join)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.onJoin = f
}

// OnConfirm replaces what answers confirmations; nil takes them again.
func (s *Service) OnConfirm(f http.HandlerFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.onConfirm = f
}

// OnRotations replaces what answers walks.
func (s *Service) OnRotations(f http.HandlerFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.onWalk = f
}

// Joins lists the joins that came.
func (s *Service) Joins() []*Join {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.joins)
}

// Walks lists the generations after which rotations were asked for.
func (s *Service) Walks() []int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.walks)
}

// Nodes is how many different requests were admitted.
func (s *Service) Nodes() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.issued)
}

// Confirmed is how often the leaf's storage was confirmed.
func (s *Service) Confirmed(leafSHA256 string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.confirmed[leafSHA256]
}

// Answer is an answer to a join with the fields that every answer has.
func (s *Service) Answer(j *Join, o wire.Outcome) *wire.Answer {
	return &wire.Answer{Protocol: wire.Protocol, CSRSHA256: j.CSRSHA256(), Outcome: o, IssuedAt: s.Clock.Now().Truncate(time.Second)}
}

// Admit is the answer that lets a machine in: the same one for the same CSR.
func (s *Service) Admit(j *Join) *wire.Answer {
	s.mu.Lock()
	defer s.mu.Unlock()
	if a, ok := s.issued[j.CSRSHA256()]; ok {
		return a
	}
	a := s.AdmitAs(j, j.CSR.PublicKey, Leaf{})
	s.issued[j.CSRSHA256()] = a
	s.keep(&cert{answer: a, node: a.NodeID, generation: 1, csr: j.CSRSHA256()})
	return a
}

// AdmitAs makes a fresh joined answer around a certificate for any key. Fields of
// l that are set replace what it would say.
func (s *Service) AdmitAs(j *Join, key crypto.PublicKey, l Leaf) *wire.Answer {
	a := s.Answer(j, wire.OutcomeJoined)
	a.NodeID, a.Tenant, a.Pool, a.Site, a.Role = "n-"+j.CSRSHA256()[:20], "acme", "gpu", "lab", j.Role
	now := a.IssuedAt
	l.PublicKey = key
	if l.URIs == nil {
		l.URIs = []string{"spiffe://" + TrustDomain + "/tenant/" + a.Tenant + "/" + string(a.Role) + "/" + a.NodeID}
	}
	if l.NotBefore.IsZero() {
		l.NotBefore = now.Add(-5 * time.Minute)
	}
	if l.NotAfter.IsZero() {
		l.NotAfter = now.Add(s.Lifetime)
	}
	a.Certificates = []string{wire.EncodeBase64(s.NodeCA.Issue(s.t, l)), wire.EncodeBase64(s.NodeCA.Cert.Raw)}
	a.NotAfter = &l.NotAfter
	return a
}

// Sign makes an answer's JWS.
func (s *Service) Sign(a *wire.Answer) string {
	raw, err := json.Marshal(a)
	if err != nil {
		s.t.Error(err)
	}
	return s.Signer.Sign(s.t, wire.TypeJoin, raw)
}

// Write sends a signed answer.
func (s *Service) Write(w http.ResponseWriter, a *wire.Answer) { WriteJWS(w, s.Sign(a)) }

// WriteJWS sends any text as if it were a signed answer.
func WriteJWS(w http.ResponseWriter, compact string) {
	w.Header().Set("Content-Type", wire.MediaTypeJOSE)
	_, _ = io.WriteString(w, compact)
}

// WriteProblem sends a problem.
func WriteProblem(w http.ResponseWriter, code wire.Code, retryAfter time.Duration) {
	w.Header().Set("Content-Type", wire.MediaTypeProblem)
	if retryAfter > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(int(retryAfter/time.Second)))
	}
	w.WriteHeader(code.Status())
	_ = json.NewEncoder(w).Encode(code.Problem(""))
}

func (s *Service) serveJoin(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, wire.MaxBody))
	if err != nil {
		WriteProblem(w, wire.TooLarge, 0)
		return
	}
	j, code := s.open(body)
	if code != "" {
		WriteProblem(w, code, 0)
		return
	}
	s.mu.Lock()
	s.joins = append(s.joins, j)
	answer := s.onJoin
	s.mu.Unlock()
	switch {
	case answer != nil:
		answer(w, j)
	case j.Attestor == "x509pop":
		s.AnswerRejoin(w, j)
	default:
		s.Write(w, s.Admit(j))
	}
}

// open does what a service does before it decides.
func (s *Service) open(body []byte) (*Join, wire.Code) {
	in, err := wire.DecodeJoin(body)
	if err != nil {
		return nil, wire.InvalidInput
	}
	csr, err := x509.ParseCertificateRequest(in.CSR)
	if err != nil || csr.CheckSignature() != nil {
		return nil, wire.InvalidInput
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	sealed, code := s.unseal(in.KeyID, in.Sealed, wire.SealAAD(in.Attestor, in.Role, in.CSR))
	if code != "" {
		return nil, code
	}
	return &Join{Join: in, Body: body, Sealed: sealed, CSR: csr}, ""
}

// unseal is called with the lock held.
func (s *Service) unseal(kid string, raw, aad []byte) (*wire.Sealed, wire.Code) {
	if kid != s.sealID {
		return nil, wire.StaleBundle
	}
	encSize := s.encSize()
	if len(raw) < encSize {
		return nil, wire.AccessDenied
	}
	recipient, err := hpke.NewRecipient(raw[:encSize], s.sealKey, hpke.HKDFSHA256(), hpke.ChaCha20Poly1305(), []byte(wire.SealInfo))
	if err != nil {
		return nil, wire.AccessDenied
	}
	plaintext, err := recipient.Open(aad, raw[encSize:])
	if err != nil {
		return nil, wire.AccessDenied
	}
	sealed, err := wire.DecodeSealed(plaintext)
	if err != nil {
		return nil, wire.AccessDenied
	}
	return sealed, ""
}

// encSize is the length of MLKEM768-X25519's encapsulated key, in bytes.
func (*Service) encSize() int { return 1120 }

func (s *Service) serveConfirm(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	handler := s.onConfirm
	s.mu.Unlock()
	if handler != nil {
		handler(w, r)
		return
	}
	body, _ := io.ReadAll(http.MaxBytesReader(w, r.Body, wire.MaxBody))
	c, err := wire.DecodeConfirm(body)
	if err != nil {
		WriteProblem(w, wire.InvalidInput, 0)
		return
	}
	leaf, _ := x509.ParseCertificate(c.Certificate)
	if wire.VerifyStatement(leaf.PublicKey, wire.ConfirmStatement(c.Certificate), c.Signature) != nil {
		WriteProblem(w, wire.AccessDenied, 0)
		return
	}
	sum := sha256.Sum256(c.Certificate)
	s.mu.Lock()
	s.confirmed[hex.EncodeToString(sum[:])]++
	if k := s.certs[hex.EncodeToString(sum[:])]; k != nil {
		k.used = true
	}
	s.mu.Unlock()
	w.WriteHeader(http.StatusNoContent)
}

func (s *Service) serveRotations(w http.ResponseWriter, r *http.Request) {
	after, err := strconv.Atoi(r.URL.Query().Get("after"))
	if err != nil {
		WriteProblem(w, wire.InvalidInput, 0)
		return
	}
	s.mu.Lock()
	s.walks = append(s.walks, after)
	handler := s.onWalk
	page := wire.Rotations{Protocol: wire.Protocol, Rotations: []string{}}
	if i := after - 1; i >= 0 && i < len(s.links) {
		page.Rotations = s.links[i:min(len(s.links), i+wire.MaxRotations)]
	}
	s.mu.Unlock()
	if handler != nil {
		handler(w, r)
		return
	}
	w.Header().Set("Content-Type", wire.MediaTypeJSON)
	_ = json.NewEncoder(w).Encode(page)
}
