package machine

import (
	"bytes"
	"context"
	"crypto/hpke"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"

	"github.com/go-jose/go-jose/v4"

	"github.com/better-compute/join-operator/api/wire"
)

// Target is a system to join, as a bundle describes it.
type Target struct {
	Endpoint string
	Bundle   wire.Bundle
	tls      *tls.Config
	kid      string
	sealTo   hpke.PublicKey
	signers  jose.JSONWebKeySet
}

// Open reads a bundle and the CA of the endpoint's certificate from files.
func Open(endpoint, caFile, bundleFile string) (*Target, error) {
	ca, err := os.ReadFile(caFile)
	if err != nil {
		return nil, err
	}
	bundle, err := os.ReadFile(bundleFile)
	if err != nil {
		return nil, err
	}
	return NewTarget(endpoint, ca, bundle)
}

// NewTarget is [Open] for what is read already.
func NewTarget(endpoint string, caPEM, bundle []byte) (*Target, error) {
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(caPEM) {
		return nil, fmt.Errorf("the TLS CA holds no certificate")
	}
	t := &Target{Endpoint: endpoint, tls: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS13}}
	if err := json.Unmarshal(bundle, &t.Bundle); err != nil {
		return nil, fmt.Errorf("bundle: %w", err)
	}
	if err := json.Unmarshal(t.Bundle.SigningKeys, &t.signers); err != nil {
		return nil, fmt.Errorf("bundle: signing keys: %w", err)
	}
	for _, k := range t.Bundle.Sealing {
		if k.KEM != wire.KEMMLKEM768X25519 || k.KDF != wire.KDFHKDFSHA256 || k.AEAD != wire.AEADChaCha20Poly1305 {
			continue
		}
		pub, err := wire.DecodeBase64(k.PublicKey)
		if err != nil {
			return nil, fmt.Errorf("bundle: sealing key %s: %w", k.KeyID, err)
		}
		if t.sealTo, err = hpke.MLKEM768X25519().NewPublicKey(pub); err != nil {
			return nil, fmt.Errorf("bundle: sealing key %s: %w", k.KeyID, err)
		}
		t.kid = k.KeyID
		return t, nil
	}
	return nil, fmt.Errorf("bundle: no sealing key of the default suite")
}

// Response is an answer as it came.
type Response struct {
	Status int
	Header http.Header
	Body   []byte
}

// Post sends a body over a connection of its own, as each machine does.
func (t *Target) Post(ctx context.Context, path string, body []byte) (*Response, error) {
	return t.Do(ctx, http.MethodPost, path, bytes.NewReader(body))
}

// Do sends any request over a connection of its own.
func (t *Target) Do(ctx context.Context, method, path string, body io.Reader) (*Response, error) {
	transport := &http.Transport{TLSClientConfig: t.tls, DisableKeepAlives: true}
	defer transport.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, method, t.Endpoint+path, body)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", wire.MediaTypeJSON)
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, wire.MaxAnswer))
	if err != nil {
		return nil, err
	}
	return &Response{Status: resp.StatusCode, Header: resp.Header, Body: answer}, nil
}

// ProblemError is an answer that was a problem.
type ProblemError struct {
	wire.Problem
	Header http.Header
}

func (e *ProblemError) Error() string {
	return fmt.Sprintf("%d %s: %s", e.Status, e.Code, e.Detail)
}

// JoinToken joins with a token and the built-in attestor. A problem comes back
// as a *ProblemError.
func (t *Target) JoinToken(ctx context.Context, m *Machine, token string) (*wire.Answer, error) {
	env, err := t.Envelope(m, "", wire.RoleNode, &wire.Sealed{Token: token})
	if err != nil {
		return nil, err
	}
	return t.Join(ctx, m, env)
}

// Join sends an envelope and verifies the answer against the bundle and the CSR.
func (t *Target) Join(ctx context.Context, m *Machine, env *wire.Join) (*wire.Answer, error) {
	body, err := json.Marshal(env)
	if err != nil {
		return nil, err
	}
	resp, err := t.Post(ctx, wire.PathJoin, body)
	if err != nil {
		return nil, err
	}
	if resp.Status != http.StatusOK {
		e := &ProblemError{Header: resp.Header}
		if err := json.Unmarshal(resp.Body, &e.Problem); err != nil {
			return nil, fmt.Errorf("status %d with a body that is no problem: %w", resp.Status, err)
		}
		return nil, e
	}
	return t.Verify(resp.Body, m)
}

// Verify opens a signed answer for a machine's CSR.
func (t *Target) Verify(answer []byte, m *Machine) (*wire.Answer, error) {
	jws, err := jose.ParseSignedCompact(string(answer), []jose.SignatureAlgorithm{jose.EdDSA})
	if err != nil {
		return nil, err
	}
	header := jws.Signatures[0].Protected
	if typ := header.ExtraHeaders[jose.HeaderType]; typ != wire.TypeJoin {
		return nil, fmt.Errorf("the answer's typ is %v", typ)
	}
	keys := t.signers.Key(header.KeyID)
	if len(keys) != 1 {
		return nil, fmt.Errorf("the answer is signed by key %q, which the bundle does not have", header.KeyID)
	}
	payload, err := jws.Verify(keys[0])
	if err != nil {
		return nil, err
	}
	var a wire.Answer
	if err := json.Unmarshal(payload, &a); err != nil {
		return nil, err
	}
	if a.CSRSHA256 != m.CSRSHA256() {
		return nil, fmt.Errorf("the answer is for request %s", a.CSRSHA256)
	}
	return &a, nil
}
