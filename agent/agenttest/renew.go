package agenttest

import (
	"bytes"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"io"
	"net/http"
	"slices"
	"time"

	"github.com/better-compute/join-operator/api/wire"
)

// Renewal is a renewal that came, with its signature verified.
type Renewal struct {
	*wire.Renew
	CSR *x509.CertificateRequest
	// Proof is what the sealed part holds as evidence.
	Proof []byte
}

// CSRSHA256 is what an answer to this renewal says.
func (r *Renewal) CSRSHA256() string { return hexSHA256(r.Renew.CSR) }

// cert is a certificate's row.
type cert struct {
	answer     *wire.Answer
	leaf       *x509.Certificate
	node       string
	generation int
	csr        string
	used       bool
	revoked    bool
}

const (
	sealedState = "state"
	challenge   = "prove it"
)

// keep is called with the lock held.
func (s *Service) keep(k *cert) {
	der, err := wire.DecodeBase64(k.answer.Certificates[0])
	if err != nil {
		s.t.Fatal(err)
	}
	if k.leaf, err = x509.ParseCertificate(der); err != nil {
		s.t.Fatal(err)
	}
	s.certs[hexSHA256(der)] = k
}

// OnRenew replaces what answers renewals; nil renews again.
func (s *Service) OnRenew(f func(w http.ResponseWriter, r *Renewal)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.onRenew = f
}

// Renewals lists the renewals that came.
func (s *Service) Renewals() []*Renewal {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.renewals)
}

// Conflicts is how often one identity was found to be two machines'.
func (s *Service) Conflicts() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.conflicts
}

// Issued is how many certificates there are, and how many of them were revoked as
// abandoned renewals.
func (s *Service) Issued() (all, abandoned int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range s.certs {
		all++
		if k.revoked {
			abandoned++
		}
	}
	return all, abandoned
}

func (s *Service) serveRenew(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, wire.MaxBody))
	if err != nil {
		WriteProblem(w, wire.TooLarge, 0)
		return
	}
	in, err := wire.DecodeRenew(body)
	if err != nil {
		WriteProblem(w, wire.InvalidInput, 0)
		return
	}
	csr, err := x509.ParseCertificateRequest(in.CSR)
	leaf, leafErr := x509.ParseCertificate(in.Certificate)
	if err != nil || leafErr != nil || csr.CheckSignature() != nil {
		WriteProblem(w, wire.InvalidInput, 0)
		return
	}
	renewal := &Renewal{Renew: in, CSR: csr}
	if in.HasSealed {
		s.mu.Lock()
		sealed, code := s.unseal(in.KeyID, in.Sealed, wire.SealAAD(wire.RenewAttestor, roleOf(leaf), in.CSR))
		s.mu.Unlock()
		if code != "" {
			WriteProblem(w, code, 0)
			return
		}
		renewal.Proof = sealed.Evidence
	}
	if wire.VerifyStatement(leaf.PublicKey, wire.RenewStatement(in.Certificate, in.CSR), in.Signature) != nil {
		WriteProblem(w, wire.AccessDenied, 0)
		return
	}
	s.mu.Lock()
	s.renewals = append(s.renewals, renewal)
	handler := s.onRenew
	s.mu.Unlock()
	if handler != nil {
		handler(w, renewal)
		return
	}
	s.AnswerRenewal(w, renewal)
}

// AnswerRenewal answers as the service would.
func (s *Service) AnswerRenewal(w http.ResponseWriter, r *Renewal) {
	a, code, retry := s.Renew(r)
	if code != "" {
		WriteProblem(w, code, retry)
		return
	}
	s.Write(w, a)
}

// Renew decides a renewal, or says what problem it is answered with.
func (s *Service) Renew(r *Renewal) (*wire.Answer, wire.Code, time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.Clock.Now()
	from := s.certs[hexSHA256(r.Certificate)]
	if from == nil || now.After(from.leaf.NotAfter) {
		return nil, wire.AccessDenied, 0
	}
	earliest := from.leaf.NotBefore.Add(from.leaf.NotAfter.Sub(from.leaf.NotBefore) * 2 / 5)
	if now.Before(earliest) {
		return nil, wire.RateLimited, earliest.Sub(now).Round(time.Second)
	}
	return s.next(from, r.Renew.CSR, r.CSR, wire.RenewAttestor, r.State, r.Proof)
}

// AnswerRejoin answers a join by x509pop as the service would.
func (s *Service) AnswerRejoin(w http.ResponseWriter, j *Join) {
	a, code := s.Rejoin(j)
	if code != "" {
		WriteProblem(w, code, 0)
		return
	}
	s.Write(w, a)
}

// Rejoin decides a join by x509pop.
func (s *Service) Rejoin(j *Join) (*wire.Answer, wire.Code) {
	evidence, err := wire.DecodeX509POP(j.Sealed.Evidence)
	if err != nil {
		return nil, wire.AccessDenied
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	from := s.certs[hexSHA256(evidence.Certificate)]
	if from == nil || roleOf(from.leaf) != j.Role || j.Role == wire.RoleRamdisk || s.Clock.Now().After(from.leaf.NotAfter.AddDate(0, 0, 90)) ||
		wire.VerifyStatement(from.leaf.PublicKey, wire.X509POPStatement(evidence.Certificate, j.Join.CSR), evidence.Signature) != nil {
		return nil, wire.AccessDenied
	}
	a, code, _ := s.next(from, j.Join.CSR, j.CSR, "x509pop", j.State, evidence.Proof)
	return a, code
}

// next is the certificate after one: the rules of generations.
func (s *Service) next(from *cert, der []byte, csr *x509.CertificateRequest, attestor string, state, proof []byte) (*wire.Answer, wire.Code, time.Duration) {
	now := s.Clock.Now().Truncate(time.Second)
	csrSHA256 := hexSHA256(der)
	newest, used := from, false
	var answered *cert
	for _, k := range s.certs {
		if k.csr == csrSHA256 {
			answered = k
		}
		if k.node != from.node || k.revoked {
			continue
		}
		if k.generation > from.generation {
			used = used || k.used
		}
		if k.generation > newest.generation {
			newest = k
		}
	}
	switch {
	case from.revoked, answered == nil && used:
		s.conflicts++
		return nil, wire.AccessDenied, 0
	case answered != nil && answered != newest:
		return nil, wire.AccessDenied, 0
	}
	if s.Proof != nil && string(state) != sealedState {
		return &wire.Answer{
			Protocol: wire.Protocol, CSRSHA256: csrSHA256, Outcome: wire.OutcomeChallenge, IssuedAt: now, Attestor: attestor,
			Challenge: wire.EncodeBase64([]byte(challenge)), State: wire.EncodeBase64([]byte(sealedState)),
		}, "", 0
	}
	if s.Proof != nil && !bytes.Equal(proof, append([]byte(challenge), s.Proof...)) {
		return nil, wire.AccessDenied, 0
	}
	if answered != nil {
		a := *answered.answer
		a.IssuedAt = now
		return &a, "", 0
	}
	for _, k := range s.certs {
		if k.node == from.node && k.generation > from.generation {
			k.revoked = true
		}
	}
	from.used = true
	a := *from.answer
	end := now.Add(s.Lifetime)
	a.CSRSHA256, a.IssuedAt, a.NotAfter = csrSHA256, now, &end
	a.Certificates = []string{wire.EncodeBase64(s.NodeCA.Issue(s.t, Leaf{
		PublicKey: csr.PublicKey, URIs: []string{from.leaf.URIs[0].String()}, NotBefore: now.Add(-5 * time.Minute), NotAfter: end,
	})), wire.EncodeBase64(s.NodeCA.Cert.Raw)}
	s.keep(&cert{answer: &a, node: from.node, generation: newest.generation + 1, csr: csrSHA256})
	return &a, "", 0
}

// roleOf reads the role in a certificate's SPIFFE id.
func roleOf(leaf *x509.Certificate) wire.Role {
	for _, r := range []wire.Role{wire.RoleSite, wire.RoleRamdisk} {
		if len(leaf.URIs) == 1 && bytes.Contains([]byte(leaf.URIs[0].Path), []byte("/"+string(r)+"/")) {
			return r
		}
	}
	return wire.RoleNode
}

func hexSHA256(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}
