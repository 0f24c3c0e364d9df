package keys

import (
	"bytes"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/go-jose/go-jose/v4"

	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/joinsvc/keyring"
)

var trustDomainPattern = regexp.MustCompile(`^[a-z0-9._-]{1,255}$`)

// content is all that a bundle says but its generation and its time.
type content struct {
	trustDomain string
	endpoints   []string
	tlsCAs      [][]byte // DER, newest first
	nodeCAs     [][]byte // DER, newest first
	signing     []keyring.Key
	bundle      []keyring.Key
	sealing     []keyring.Key
}

// compose makes a bundle of what is published.
func (c content) compose(generation int, now time.Time) (*wire.Bundle, error) {
	b := &wire.Bundle{
		Protocol: wire.Protocol, Generation: generation, TrustDomain: c.trustDomain, Endpoints: c.endpoints,
		IssuedAt: now.UTC().Truncate(time.Second), TLSCA: encodePEM(c.tlsCAs), NodeCAs: encodePEM(c.nodeCAs),
	}
	var err error
	if b.SigningKeys, err = keySet(c.signing); err != nil {
		return nil, err
	}
	if b.BundleKeys, err = keySet(c.bundle); err != nil {
		return nil, err
	}
	for _, k := range inOrder(c.sealing, now) {
		public, err := k.HPKEPublic()
		if err != nil {
			return nil, fmt.Errorf("sealing key %s: %w", k.KeyID, err)
		}
		b.Sealing = append(b.Sealing, wire.SealingKey{
			KeyID: k.KeyID, KEM: wire.KEMMLKEM768X25519, KDF: wire.KDFHKDFSHA256, AEAD: wire.AEADChaCha20Poly1305, PublicKey: wire.EncodeBase64(public),
		})
	}
	return b, nil
}

// inOrder is how machines should prefer sealing keys: the one in use, the ones
// before it, and last those that are not in use yet.
func inOrder(list []keyring.Key, now time.Time) []keyring.Key {
	out := slices.Clone(list)
	slices.SortStableFunc(out, func(a, b keyring.Key) int {
		if x, y := a.InUse(now), b.InUse(now); x != y {
			if x {
				return -1
			}
			return 1
		}
		if c := b.UseFrom.Compare(a.UseFrom); c != 0 {
			return c
		}
		return strings.Compare(a.KeyID, b.KeyID)
	})
	return out
}

// keySet is public halves as a JWK set (RFC 7517, RFC 8037).
func keySet(list []keyring.Key) (json.RawMessage, error) {
	sorted := slices.Clone(list)
	slices.SortFunc(sorted, func(a, b keyring.Key) int { return strings.Compare(a.KeyID, b.KeyID) })
	set := jose.JSONWebKeySet{Keys: []jose.JSONWebKey{}}
	for _, k := range sorted {
		public, err := k.Ed25519Public()
		if err != nil {
			return nil, fmt.Errorf("key %s: %w", k.KeyID, err)
		}
		set.Keys = append(set.Keys, jose.JSONWebKey{Key: public, KeyID: k.KeyID, Algorithm: string(jose.EdDSA), Use: "sig"})
	}
	return json.Marshal(set)
}

// same reports whether two bundles say the same but for generation and time.
func same(a, b *wire.Bundle) (bool, error) {
	x, y := *a, *b
	x.Generation, x.IssuedAt = y.Generation, y.IssuedAt
	rawX, errX := json.Marshal(&x)
	rawY, errY := json.Marshal(&y)
	return bytes.Equal(rawX, rawY), errors.Join(errX, errY)
}

// keyIDs is the ids of a JWK set.
func keyIDs(set json.RawMessage) ([]string, error) {
	var parsed jose.JSONWebKeySet
	if err := json.Unmarshal(set, &parsed); err != nil {
		return nil, err
	}
	var ids []string
	for _, k := range parsed.Keys {
		ids = append(ids, k.KeyID)
	}
	return ids, nil
}

// published reports whether a bundle shows a key of a kind.
func published(b *wire.Bundle, kind Kind, kid string) (bool, error) {
	set := b.SigningKeys
	switch kind {
	case Sealing:
		return slices.ContainsFunc(b.Sealing, func(k wire.SealingKey) bool { return k.KeyID == kid }), nil
	case Bundle:
		set = b.BundleKeys
	}
	ids, err := keyIDs(set)
	return slices.Contains(ids, kid), err
}

// generation is a bundle that was published.
type generation struct {
	bundle      wire.Bundle
	publishedAt time.Time
}

// tlsCAs is the CAs that vouch for the endpoints: those of the file first, and for
// an overlap after they first were published those of the bundle before. history
// is newest first.
func tlsCAs(file [][]byte, history []generation, now time.Time, overlap time.Duration) ([][]byte, error) {
	out := slices.Clone(file)
	if len(history) == 0 {
		return out, nil
	}
	since := now
	for _, g := range history {
		listed, err := decodePEM(g.bundle.TLSCA)
		if err != nil {
			return nil, fmt.Errorf("generation %d: tlsCA: %w", g.bundle.Generation, err)
		}
		if !containsAll(listed, file) {
			break
		}
		since = g.publishedAt
	}
	if !now.Before(since.Add(overlap)) {
		return out, nil
	}
	before, err := decodePEM(history[0].bundle.TLSCA)
	if err != nil {
		return nil, err
	}
	for _, der := range before {
		cert, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, err
		}
		if now.Before(cert.NotAfter) && !containsAll(out, [][]byte{der}) {
			out = append(out, der)
		}
	}
	return out, nil
}

func containsAll(list, wanted [][]byte) bool {
	for _, w := range wanted {
		if !slices.ContainsFunc(list, func(d []byte) bool { return bytes.Equal(d, w) }) {
			return false
		}
	}
	return true
}

func encodePEM(ders [][]byte) string {
	var b strings.Builder
	for _, der := range ders {
		b.Write(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	}
	return b.String()
}

// decodePEM reads certificates (RFC 7468) and takes nothing else.
func decodePEM(text string) ([][]byte, error) {
	var ders [][]byte
	rest := []byte(text)
	for {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			return nil, fmt.Errorf("holds a %s, where only certificates belong", block.Type)
		}
		if _, err := x509.ParseCertificate(block.Bytes); err != nil {
			return nil, fmt.Errorf("holds a certificate that cannot be read: %w", err)
		}
		ders = append(ders, block.Bytes)
	}
	if len(ders) == 0 || len(bytes.TrimSpace(rest)) > 0 {
		return nil, errors.New("is not a list of certificates in PEM")
	}
	return ders, nil
}

// checkEndpoints refuses what machines would refuse.
func checkEndpoints(endpoints []string) error {
	if len(endpoints) == 0 {
		return errors.New("no endpoint is given")
	}
	for _, e := range endpoints {
		u, err := url.Parse(e)
		if err != nil || u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
			return fmt.Errorf("endpoint %q is not an https URL without user, query and fragment", e)
		}
	}
	return nil
}
