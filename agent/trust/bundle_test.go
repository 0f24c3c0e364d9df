package trust_test

import (
	"crypto/ecdh"
	"crypto/hpke"
	"crypto/rand"
	"encoding/json"
	"strings"
	"testing"

	"github.com/better-compute/join-operator/agent/agenttest"
	"github.com/better-compute/join-operator/agent/trust"
	"github.com/better-compute/join-operator/api/wire"
)

// TestSealsToTheFirstSuiteThatItKnows skips what a later service may offer, and
// an AEAD that seals nothing.
func TestSealsToTheFirstSuiteThatItKnows(t *testing.T) {
	key, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	private, err := hpke.NewDHKEMPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	public := wire.EncodeBase64(key.PublicKey().Bytes())
	s := agenttest.New(t)
	var b wire.Bundle
	if err := json.Unmarshal(s.Bundle(), &b); err != nil {
		t.Fatal(err)
	}
	b.Sealing = append([]wire.SealingKey{
		{KeyID: "later", KEM: 0x7fff, KDF: 1, AEAD: 3, PublicKey: "AAAA"},
		{KeyID: "export", KEM: 0x20, KDF: 1, AEAD: 0xffff, PublicKey: public},
		{KeyID: "x25519", KEM: 0x20, KDF: 3, AEAD: 2, PublicKey: public},
	}, b.Sealing...)
	p := parse(t, b)
	csr := []byte("request")
	kid, sealed, err := p.Seal("tpm", wire.RoleSite, csr, []byte("secret"))
	if err != nil || kid != "x25519" {
		t.Fatalf("sealed to %q, error %v", kid, err)
	}
	r, err := hpke.NewRecipient(sealed[:32], private, hpke.HKDFSHA512(), hpke.AES256GCM(), []byte("bc-join/v1"))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := r.Open(wire.SealAAD("tpm", wire.RoleSite, csr), sealed[32:]); err != nil || string(got) != "secret" {
		t.Errorf("opened %q, error %v", got, err)
	}
}

func parse(t *testing.T, b wire.Bundle) *trust.Bundle {
	t.Helper()
	raw, err := json.Marshal(b)
	if err != nil {
		t.Fatal(err)
	}
	p, err := trust.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// TestBundlesThatCannotBeUsedAreRefused spoils one thing at a time.
func TestBundlesThatCannotBeUsedAreRefused(t *testing.T) {
	s := agenttest.New(t)
	for name, spoil := range map[string]func(*wire.Bundle){
		"another protocol":        func(b *wire.Bundle) { b.Protocol = 2 },
		"generation 0":            func(b *wire.Bundle) { b.Generation = 0 },
		"a negative generation":   func(b *wire.Bundle) { b.Generation = -1 },
		"no trust domain":         func(b *wire.Bundle) { b.TrustDomain = "" },
		"a trust domain and path": func(b *wire.Bundle) { b.TrustDomain = "a/tenant/b" },
		"no endpoint":             func(b *wire.Bundle) { b.Endpoints = nil },
		"a plain endpoint":        func(b *wire.Bundle) { b.Endpoints = []string{"http://x"} },
		"a user in an endpoint":   func(b *wire.Bundle) { b.Endpoints = []string{"https://u:p@x"} },
		"a query in an endpoint":  func(b *wire.Bundle) { b.Endpoints = []string{"https://x?a"} },
		"no host":                 func(b *wire.Bundle) { b.Endpoints = []string{"https:///v1"} },
		"no TLS authority":        func(b *wire.Bundle) { b.TLSCA = "" },
		"a cut authority":         func(b *wire.Bundle) { b.TLSCA = b.TLSCA[:len(b.TLSCA)/2] },
		"text after authorities":  func(b *wire.Bundle) { b.NodeCAs += "tail" },
		"a key as an authority":   func(b *wire.Bundle) { b.NodeCAs = "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n" },
		"no signing key":          func(b *wire.Bundle) { b.SigningKeys = json.RawMessage(`{"keys":[]}`) },
		"no key set":              func(b *wire.Bundle) { b.BundleKeys = json.RawMessage(`null`) },
		"a key without kid": func(b *wire.Bundle) {
			b.SigningKeys = json.RawMessage(strings.Replace(string(b.SigningKeys), `"kid"`, `"kod"`, 1))
		},
		"one kid for two keys": func(b *wire.Bundle) {
			one := strings.TrimSuffix(strings.TrimPrefix(string(b.SigningKeys), `{"keys":[`), `]}`)
			b.SigningKeys = json.RawMessage(`{"keys":[` + one + `,` + one + `]}`)
		},
		"no sealing key":         func(b *wire.Bundle) { b.Sealing = nil },
		"a sealing key cut":      func(b *wire.Bundle) { b.Sealing[0].PublicKey = b.Sealing[0].PublicKey[:400] },
		"a sealing key nameless": func(b *wire.Bundle) { b.Sealing[0].KeyID = "" },
	} {
		t.Run(name, func(t *testing.T) {
			var b wire.Bundle
			if err := json.Unmarshal(s.Bundle(), &b); err != nil {
				t.Fatal(err)
			}
			spoil(&b)
			raw, err := json.Marshal(b)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := trust.Parse(raw); err == nil {
				t.Error("passes")
			}
		})
	}
}

// FuzzFollow and the rest of what reads bytes from the network must not panic,
// and adopt nothing that is not signed.
func FuzzFollow(f *testing.F) {
	s := agenttest.New(f)
	b, err := trust.Parse(s.Bundle())
	if err != nil {
		f.Fatal(err)
	}
	link := s.Rotate(nil)
	f.Add(link)
	f.Add("e30.e30.")
	f.Add(string(s.Bundle()))
	f.Fuzz(func(t *testing.T, text string) {
		if next, err := b.Follow(text); err == nil && (text != link || next.Generation() != 2) {
			t.Errorf("followed %q", text)
		}
		if _, err := b.OpenAnswer([]byte(text)); err == nil {
			t.Errorf("believed %q", text)
		}
		_, _ = trust.Parse([]byte(text))
	})
}
