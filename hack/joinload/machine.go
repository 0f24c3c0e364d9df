package main

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hpke"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"runtime"
	"time"

	"github.com/go-jose/go-jose/v4"
	"golang.org/x/sync/errgroup"

	"github.com/better-compute/join-operator/api/wire"
)

// target is the system under load, as a machine's bundle describes it.
type target struct {
	url     string
	tls     *tls.Config
	kid     string
	sealTo  hpke.PublicKey
	signers jose.JSONWebKeySet
}

func openTarget(endpoint, caFile, bundleFile string) (*target, error) {
	if endpoint == "" || caFile == "" || bundleFile == "" {
		return nil, fmt.Errorf("no endpoint, CA or bundle given: source .dev/env first (make dev-up writes it)")
	}
	ca, err := os.ReadFile(caFile)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return nil, fmt.Errorf("%s holds no certificate", caFile)
	}
	raw, err := os.ReadFile(bundleFile)
	if err != nil {
		return nil, err
	}
	var b wire.Bundle
	if err := json.Unmarshal(raw, &b); err != nil {
		return nil, fmt.Errorf("%s: %w", bundleFile, err)
	}
	t := &target{url: endpoint + wire.PathJoin, tls: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS13}}
	if err := json.Unmarshal(b.SigningKeys, &t.signers); err != nil {
		return nil, fmt.Errorf("%s: signing keys: %w", bundleFile, err)
	}
	for _, k := range b.Sealing {
		if k.KEM != wire.KEMMLKEM768X25519 || k.KDF != wire.KDFHKDFSHA256 || k.AEAD != wire.AEADChaCha20Poly1305 {
			continue
		}
		pub, err := wire.DecodeBase64(k.PublicKey)
		if err != nil {
			return nil, fmt.Errorf("%s: sealing key %s: %w", bundleFile, k.KeyID, err)
		}
		if t.sealTo, err = hpke.MLKEM768X25519().NewPublicKey(pub); err != nil {
			return nil, fmt.Errorf("%s: sealing key %s: %w", bundleFile, k.KeyID, err)
		}
		t.kid = k.KeyID
		return t, nil
	}
	return nil, fmt.Errorf("%s lists no sealing key of the default suite", bundleFile)
}

// machine is one that has not joined yet: everything that a real one has on disk.
type machine struct {
	csr   []byte
	token string
}

func makeMachines(n int, tokens []string) ([]machine, error) {
	machines := make([]machine, n)
	var g errgroup.Group
	g.SetLimit(runtime.NumCPU())
	for i := range machines {
		g.Go(func() error {
			key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
			if err != nil {
				return err
			}
			csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
			machines[i] = machine{csr: csr, token: tokens[i%len(tokens)]}
			return err
		})
	}
	return machines, g.Wait()
}

// join does one join over a connection of its own and verifies the answer.
func (t *target) join(ctx context.Context, m machine) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	body, err := t.seal(m)
	if err != nil {
		return err
	}
	transport := &http.Transport{TLSClientConfig: t.tls, DisableKeepAlives: true, Proxy: nil}
	defer transport.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, t.url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", wire.MediaTypeJSON)
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, wire.MaxAnswer))
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", resp.Status, answer)
	}
	return t.verify(answer, m.csr)
}

func (t *target) seal(m machine) ([]byte, error) {
	plaintext, err := json.Marshal(&wire.Sealed{Token: m.token})
	if err != nil {
		return nil, err
	}
	enc, sender, err := hpke.NewSender(t.sealTo, hpke.HKDFSHA256(), hpke.ChaCha20Poly1305(), []byte(wire.SealInfo))
	if err != nil {
		return nil, err
	}
	ciphertext, err := sender.Seal(wire.SealAAD("", wire.RoleNode, m.csr), plaintext)
	if err != nil {
		return nil, err
	}
	return json.Marshal(&wire.Join{Role: wire.RoleNode, CSR: m.csr, KeyID: t.kid, Sealed: append(enc, ciphertext...)})
}

func (t *target) verify(answer, csr []byte) error {
	jws, err := jose.ParseSignedCompact(string(answer), []jose.SignatureAlgorithm{jose.EdDSA})
	if err != nil {
		return err
	}
	keys := t.signers.Key(jws.Signatures[0].Protected.KeyID)
	if len(keys) != 1 {
		return fmt.Errorf("the answer is signed by a key that the bundle does not have")
	}
	payload, err := jws.Verify(keys[0])
	if err != nil {
		return err
	}
	var a wire.Answer
	if err := json.Unmarshal(payload, &a); err != nil {
		return err
	}
	hash := sha256.Sum256(csr)
	if a.Outcome != wire.OutcomeJoined || a.CSRSHA256 != hex.EncodeToString(hash[:]) {
		return fmt.Errorf("the answer says %q for request %s", a.Outcome, a.CSRSHA256)
	}
	return nil
}
