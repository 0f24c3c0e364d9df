package agent_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"io/fs"
	"net/http"
	"strings"
	"testing"
	"time"

	"errors"

	"github.com/better-compute/join-operator/agent"
	"github.com/better-compute/join-operator/agent/agenttest"
	"github.com/better-compute/join-operator/api/wire"
)

// TestR19_NothingButAVerifiedAnswerIsAJoin sends every false answer that could be
// thought of. None may store an identity, confirm, or change the request.
func TestR19_NothingButAVerifiedAnswerIsAJoin(t *testing.T) {
	stranger := agenttest.NewSigningKey(t)
	otherKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	payload := func(a *wire.Answer) []byte {
		raw, err := json.Marshal(a)
		if err != nil {
			t.Fatal(err)
		}
		return raw
	}
	header := func(b *bench, change map[string]any) map[string]any {
		h := map[string]any{"alg": "EdDSA", "kid": b.Signer.ID, "typ": wire.TypeJoin}
		for k, v := range change {
			if h[k] = v; v == nil {
				delete(h, k)
			}
		}
		return h
	}
	// forged signs a good answer under another header.
	forged := func(change map[string]any) func(*bench, *agenttest.Join) string {
		return func(b *bench, j *agenttest.Join) string {
			return b.Signer.SignHeader(t, header(b, change), payload(b.Admit(j)))
		}
	}
	// edited signs an answer that was changed, as a service with a bug would.
	edited := func(edit func(*bench, *agenttest.Join, *wire.Answer)) func(*bench, *agenttest.Join) string {
		return func(b *bench, j *agenttest.Join) string {
			a := b.AdmitAs(j, j.CSR.PublicKey, agenttest.Leaf{})
			edit(b, j, a)
			return b.Sign(a)
		}
	}
	// leaf is an answer whose certificate is not as it should be.
	leaf := func(l agenttest.Leaf) func(*bench, *agenttest.Join) string {
		return func(b *bench, j *agenttest.Join) string { return b.Sign(b.AdmitAs(j, j.CSR.PublicKey, l)) }
	}
	for name, answer := range map[string]func(*bench, *agenttest.Join) string{
		"for another request":          edited(func(_ *bench, _ *agenttest.Join, a *wire.Answer) { a.CSRSHA256 = strings.Repeat("0", 64) }),
		"for a request in capitals":    edited(func(_ *bench, _ *agenttest.Join, a *wire.Answer) { a.CSRSHA256 = strings.ToUpper(a.CSRSHA256) }),
		"for no request":               edited(func(_ *bench, _ *agenttest.Join, a *wire.Answer) { a.CSRSHA256 = "" }),
		"another protocol":             edited(func(_ *bench, _ *agenttest.Join, a *wire.Answer) { a.Protocol = 2 }),
		"an unknown outcome":           edited(func(_ *bench, _ *agenttest.Join, a *wire.Answer) { a.Outcome = "Joined" }),
		"no outcome":                   edited(func(_ *bench, _ *agenttest.Join, a *wire.Answer) { a.Outcome = "" }),
		"no time":                      edited(func(_ *bench, _ *agenttest.Join, a *wire.Answer) { a.IssuedAt = time.Time{} }),
		"another role":                 edited(func(_ *bench, _ *agenttest.Join, a *wire.Answer) { a.Role = wire.RoleSite }),
		"another node than the leaf's": edited(func(_ *bench, _ *agenttest.Join, a *wire.Answer) { a.NodeID = "n-other" }),
		"another tenant":               edited(func(_ *bench, _ *agenttest.Join, a *wire.Answer) { a.Tenant = "evil" }),
		"a tenant that is a path":      edited(func(_ *bench, _ *agenttest.Join, a *wire.Answer) { a.Tenant = "acme/node/n-1" }),
		"another end":                  edited(func(_ *bench, _ *agenttest.Join, a *wire.Answer) { x := a.NotAfter.Add(time.Hour); a.NotAfter = &x }),
		"no certificates":              edited(func(_ *bench, _ *agenttest.Join, a *wire.Answer) { a.Certificates = nil }),
		"no issuer":                    edited(func(_ *bench, _ *agenttest.Join, a *wire.Answer) { a.Certificates = a.Certificates[:1] }),
		"certificates that are none":   edited(func(_ *bench, _ *agenttest.Join, a *wire.Answer) { a.Certificates = []string{"AAAA", "AAAA"} }),
		"the leaf as its own issuer":   edited(func(_ *bench, _ *agenttest.Join, a *wire.Answer) { a.Certificates[1] = a.Certificates[0] }),
		"nine certificates": edited(func(_ *bench, _ *agenttest.Join, a *wire.Answer) {
			for len(a.Certificates) < 9 {
				a.Certificates = append(a.Certificates, a.Certificates[1])
			}
		}),
		"an issuer that did not sign": edited(func(b *bench, _ *agenttest.Join, a *wire.Answer) {
			stray := agenttest.NewAuthority(t, "node-ca-1")
			a.Certificates[0] = wire.EncodeBase64(stray.Issue(t, agenttest.Leaf{
				PublicKey: otherKey.Public(), URIs: []string{"spiffe://x/y"}, NotBefore: agenttest.Start, NotAfter: agenttest.Start.Add(time.Hour),
			}))
		}),
		"a deferral dressed as a join": edited(func(_ *bench, _ *agenttest.Join, a *wire.Answer) {
			*a = wire.Answer{Protocol: 1, CSRSHA256: a.CSRSHA256, Outcome: wire.OutcomeJoined, IssuedAt: a.IssuedAt, JoinRequest: "jr-1", RetryAfterSeconds: 15}
		}),
		"a join dressed as a deferral": edited(func(_ *bench, _ *agenttest.Join, a *wire.Answer) { a.Outcome = wire.OutcomePending }),
		"another machine's certificate": func(b *bench, j *agenttest.Join) string {
			return b.Sign(b.AdmitAs(j, otherKey.Public(), agenttest.Leaf{}))
		},
		"an expired leaf":       leaf(agenttest.Leaf{NotBefore: agenttest.Start.Add(-2 * time.Hour), NotAfter: agenttest.Start.Add(-time.Hour)}),
		"a leaf of the future":  leaf(agenttest.Leaf{NotBefore: agenttest.Start.Add(time.Hour), NotAfter: agenttest.Start.Add(2 * time.Hour)}),
		"a leaf that is a CA":   leaf(agenttest.Leaf{IsCA: true}),
		"a leaf with two names": leaf(agenttest.Leaf{URIs: []string{"spiffe://test.join.example/tenant/acme/node/n-1", "spiffe://test.join.example/tenant/acme/node/n-2"}}),
		"a leaf with one name more": func(b *bench, j *agenttest.Join) string {
			own := "spiffe://" + agenttest.TrustDomain + "/tenant/acme/node/n-" + j.CSRSHA256()[:20]
			return b.Sign(b.AdmitAs(j, j.CSR.PublicKey, agenttest.Leaf{URIs: []string{own, own + "x"}}))
		},
		"a leaf of another domain": leaf(agenttest.Leaf{URIs: []string{"spiffe://evil.example/tenant/acme/node/n-1"}}),
		"a signature by a stranger": func(b *bench, j *agenttest.Join) string {
			return stranger.Sign(t, wire.TypeJoin, payload(b.Admit(j)))
		},
		"a stranger under a pinned kid": func(b *bench, j *agenttest.Join) string {
			return stranger.SignHeader(t, header(b, nil), payload(b.Admit(j)))
		},
		"the bundle key's signature": func(b *bench, j *agenttest.Join) string {
			return b.Rotator.Sign(t, wire.TypeJoin, payload(b.Admit(j)))
		},
		"alg none": forged(map[string]any{"alg": "none"}),
		"alg none without signature": func(b *bench, j *agenttest.Join) string {
			whole := b.Signer.SignHeader(t, header(b, map[string]any{"alg": "none"}), payload(b.Admit(j)))
			return whole[:strings.LastIndexByte(whole, '.')+1]
		},
		"alg HS256 with the public key": func(b *bench, j *agenttest.Join) string {
			h, _ := json.Marshal(header(b, map[string]any{"alg": "HS256"}))
			input := base64.RawURLEncoding.EncodeToString(h) + "." + base64.RawURLEncoding.EncodeToString(payload(b.Admit(j)))
			mac := hmac.New(sha256.New, b.Signer.Key[32:])
			mac.Write([]byte(input))
			return input + "." + base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
		},
		"alg in small letters": forged(map[string]any{"alg": "eddsa"}),
		"alg ES256":            forged(map[string]any{"alg": "ES256"}),
		"no alg":               forged(map[string]any{"alg": nil}),
		"typ of a bundle":      forged(map[string]any{"typ": wire.TypeBundle}),
		"typ JWT":              forged(map[string]any{"typ": "JWT"}),
		"typ of a command":     forged(map[string]any{"typ": "bc-command+jws"}),
		"no typ":               forged(map[string]any{"typ": nil}),
		"no kid":               forged(map[string]any{"kid": nil}),
		"an unknown kid":       forged(map[string]any{"kid": "0000000000000000"}),
		"a critical header":    forged(map[string]any{"crit": []string{"exp"}, "exp": 1}),
		"an unencoded payload": forged(map[string]any{"crit": []string{"b64"}, "b64": false}),
		"its own key in the header": func(b *bench, j *agenttest.Join) string {
			pub := base64.RawURLEncoding.EncodeToString(stranger.Key[32:])
			return stranger.SignHeader(t, header(b, map[string]any{"kid": "x", "jwk": map[string]string{"kty": "OKP", "crv": "Ed25519", "x": pub}}), payload(b.Admit(j)))
		},
		"one bit of the signature": func(b *bench, j *agenttest.Join) string {
			whole := []byte(b.Sign(b.Admit(j)))
			whole[len(whole)-10] ^= 1
			return string(whole)
		},
		"another payload under the signature": func(b *bench, j *agenttest.Join) string {
			parts := strings.Split(b.Sign(b.Answer(j, wire.OutcomePending)), ".")
			return parts[0] + "." + base64.RawURLEncoding.EncodeToString(payload(b.Admit(j))) + "." + parts[2]
		},
		"the JSON form of a JWS": func(b *bench, j *agenttest.Join) string {
			p := strings.Split(b.Sign(b.Admit(j)), ".")
			raw, _ := json.Marshal(map[string]string{"protected": p[0], "payload": p[1], "signature": p[2]})
			return string(raw)
		},
		"a doubled name": func(b *bench, j *agenttest.Join) string {
			raw := payload(b.Admit(j))
			return b.Signer.Sign(t, wire.TypeJoin, append([]byte(`{"outcome":"pending",`), raw[1:]...))
		},
		"names in capitals": func(b *bench, j *agenttest.Join) string {
			raw := strings.Replace(string(payload(b.Admit(j))), `"outcome"`, `"Outcome"`, 1)
			return b.Signer.Sign(t, wire.TypeJoin, []byte(raw))
		},
		"something after the payload": func(b *bench, j *agenttest.Join) string {
			return b.Signer.Sign(t, wire.TypeJoin, append(payload(b.Admit(j)), "{}"...))
		},
		"empty":          func(*bench, *agenttest.Join) string { return "" },
		"unsigned JSON":  func(b *bench, j *agenttest.Join) string { return string(payload(b.Admit(j))) },
		"not even JSON":  func(*bench, *agenttest.Join) string { return "joined!" },
		"longer than it": func(*bench, *agenttest.Join) string { return strings.Repeat("a", wire.MaxAnswer+1) },
		"a second answer after the first": func(b *bench, j *agenttest.Join) string {
			return b.Sign(b.Admit(j)) + "\n" + b.Sign(b.Admit(j))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			b.OnJoin(func(w http.ResponseWriter, j *agenttest.Join) { agenttest.WriteJWS(w, answer(b, j)) })
			b.OnConfirm(func(http.ResponseWriter, *http.Request) { t.Error("confirmed") })
			_, err := b.once()
			if !agent.IsUntrusted(err) {
				t.Errorf("error %v, want an untrusted answer", err)
			}
			if _, err := b.dir.Identity(); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("an identity was stored: %v", err)
			}
			// The truth still gets it in, with the same request.
			b.OnJoin(nil)
			b.OnConfirm(nil)
			if _, err := b.once(); err != nil {
				t.Errorf("after the attack: %v", err)
			}
			seen := b.Joins()
			if string(seen[0].Join.CSR) != string(seen[len(seen)-1].Join.CSR) {
				t.Error("another request was made")
			}
		})
	}
}

// TestAnswersThatAreNotWhatTheySay come with wrong statuses and media types.
func TestAnswersThatAreNotWhatTheySay(t *testing.T) {
	elsewhere := 0
	for name, answer := range map[string]func(b *bench, w http.ResponseWriter, j *agenttest.Join){
		"a good answer as JSON": func(b *bench, w http.ResponseWriter, j *agenttest.Join) {
			w.Header().Set("Content-Type", wire.MediaTypeJSON)
			_, _ = w.Write([]byte(b.Sign(b.Admit(j))))
		},
		"a good answer without a type": func(b *bench, w http.ResponseWriter, j *agenttest.Join) {
			w.Header()["Content-Type"] = nil
			_, _ = w.Write([]byte(b.Sign(b.Admit(j))))
		},
		"a good answer as 201": func(b *bench, w http.ResponseWriter, j *agenttest.Join) {
			w.Header().Set("Content-Type", wire.MediaTypeJOSE)
			w.WriteHeader(http.StatusCreated)
			_, _ = w.Write([]byte(b.Sign(b.Admit(j))))
		},
		"a good answer as 403": func(b *bench, w http.ResponseWriter, j *agenttest.Join) {
			w.Header().Set("Content-Type", wire.MediaTypeJOSE)
			w.WriteHeader(http.StatusForbidden)
			_, _ = w.Write([]byte(b.Sign(b.Admit(j))))
		},
		"compressed": func(b *bench, w http.ResponseWriter, j *agenttest.Join) {
			w.Header().Set("Content-Encoding", "gzip")
			agenttest.WriteJWS(w, "\x1f\x8b")
		},
		"cut off": func(b *bench, w http.ResponseWriter, j *agenttest.Join) {
			w.Header().Set("Content-Length", "4000")
			agenttest.WriteJWS(w, b.Sign(b.Admit(j)))
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			b.OnJoin(func(w http.ResponseWriter, j *agenttest.Join) { answer(b, w, j) })
			if _, err := b.once(); err == nil || agent.IsRefused(err) {
				t.Errorf("error %v", err)
			}
			if _, err := b.dir.Identity(); !errors.Is(err, fs.ErrNotExist) {
				t.Error("an identity was stored")
			}
		})
	}
	t.Run("redirects", func(t *testing.T) {
		for _, code := range []int{301, 302, 303, 307, 308} {
			b := newBench(t)
			trap := b.Serve(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { elsewhere++ }), b.TLSCA)
			b.OnJoin(func(w http.ResponseWriter, j *agenttest.Join) {
				w.Header().Set("Location", trap.URL+wire.PathJoin)
				w.WriteHeader(code)
			})
			if _, err := b.once(); err == nil {
				t.Errorf("%d: joined", code)
			}
		}
		if elsewhere > 0 {
			t.Errorf("followed %d redirects", elsewhere)
		}
	})
}

// TestSlowAnswersEnd has an endpoint that sends a byte now and then, for ever.
func TestSlowAnswersEnd(t *testing.T) {
	b := newBench(t)
	b.config.RequestTimeout = 300 * time.Millisecond
	b.OnJoin(func(w http.ResponseWriter, _ *agenttest.Join) {
		w.Header().Set("Content-Type", wire.MediaTypeJOSE)
		for range 100 {
			if _, err := w.Write([]byte("e")); err != nil {
				return
			}
			_ = http.NewResponseController(w).Flush()
			time.Sleep(20 * time.Millisecond)
		}
	})
	began := time.Now()
	_, err := b.once()
	if took := time.Since(began); err == nil || took > 1900*time.Millisecond {
		t.Errorf("error %v after %v", err, took)
	}
}

// TestEndlessAnswersAreCutOff counts what an endpoint gets rid of: the limit, and
// what lies in buffers on the way.
func TestEndlessAnswersAreCutOff(t *testing.T) {
	b := newBench(t)
	const far = 64 << 20
	sent := make(chan int, 1)
	b.OnJoin(func(w http.ResponseWriter, _ *agenttest.Join) {
		w.Header().Set("Content-Type", wire.MediaTypeJOSE)
		n, chunk := 0, make([]byte, 64<<10)
		for n < far {
			if _, err := w.Write(chunk); err != nil {
				break
			}
			n += len(chunk)
		}
		sent <- n
	})
	if _, err := b.once(); !agent.IsUntrusted(err) {
		t.Errorf("error %v", err)
	}
	if n := <-sent; n >= far {
		t.Errorf("read %d bytes", n)
	}
}

// TestProxiesAreNotUsed sets what other programs obey.
func TestProxiesAreNotUsed(t *testing.T) {
	t.Setenv("HTTPS_PROXY", "http://127.0.0.1:1")
	t.Setenv("ALL_PROXY", "http://127.0.0.1:1")
	b := newBench(t)
	if _, err := b.once(); err != nil {
		t.Error(err)
	}
}

// TestEndpointOfAnotherAuthorityGetsNothing does not even see the request.
func TestEndpointOfAnotherAuthorityGetsNothing(t *testing.T) {
	b := newBench(t)
	got := 0
	stranger := b.Serve(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// A walk may come: it holds nothing, and is signed by what it brings.
		if r.Method == http.MethodPost {
			got++
		}
		w.WriteHeader(http.StatusNotFound)
	}), agenttest.NewAuthority(t, "other"))
	b.EditBundle(func(x *wire.Bundle) { x.Endpoints = []string{stranger.URL} })
	if _, err := b.once(); !agent.IsUntrusted(err) {
		t.Errorf("error %v", err)
	}
	if got > 0 {
		t.Error("a stranger was sent a request")
	}
}

// TestProblemTextsAreSafeInATerminal keeps escapes out of what a person sees.
func TestProblemTextsAreSafeInATerminal(t *testing.T) {
	b := newBench(t)
	b.OnJoin(func(w http.ResponseWriter, _ *agenttest.Join) {
		w.Header().Set("Content-Type", wire.MediaTypeProblem)
		w.WriteHeader(http.StatusBadRequest)
		_ = json.NewEncoder(w).Encode(wire.InvalidInput.Problem("csr: \x1b]0;owned\x07" + strings.Repeat("x", 1000)))
	})
	_, err := b.once()
	if err == nil || strings.ContainsAny(err.Error(), "\x1b\x07") || len(err.Error()) > 400 {
		t.Errorf("error %q", err)
	}
}
