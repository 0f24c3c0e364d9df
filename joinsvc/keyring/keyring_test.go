package keyring

import (
	"bytes"
	"crypto/ed25519"
	"crypto/hpke"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"

	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/joinsvc/secrets"
)

var start = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// clock is a time that a test moves.
type clock struct{ now time.Time }

func (c *clock) Now() time.Time { return c.now }

func newKey(tb testing.TB, a Algorithm, useFrom time.Time) Key {
	tb.Helper()
	k, err := NewKey(a, start)
	if err != nil {
		tb.Fatal(err)
	}
	k.UseFrom = useFrom
	return k
}

func file(tb testing.TB, keys ...Key) map[string][]byte {
	tb.Helper()
	raw, err := (&File{Keys: keys}).Marshal()
	if err != nil {
		tb.Fatal(err)
	}
	return map[string][]byte{Item: raw}
}

// ring is a keyring with the given keys of one kind and one of each other.
func ring(tb testing.TB, c *clock, keys ...Key) (*Keyring, secrets.Snapshot) {
	tb.Helper()
	r := New(slog.New(slog.DiscardHandler), c.Now)
	s := secrets.Snapshot{
		SigningSecret:   file(tb, newKey(tb, Ed25519, start)),
		SealingSecret:   file(tb, newKey(tb, MLKEM768X25519, start)),
		ChallengeSecret: file(tb, newKey(tb, AES256GCM, start)),
	}
	if len(keys) > 0 {
		s[map[Algorithm]string{Ed25519: SigningSecret, MLKEM768X25519: SealingSecret, AES256GCM: ChallengeSecret}[keys[0].Algorithm]] = file(tb, keys...)
	}
	r.Load(s)
	return r, s
}

func seal(tb testing.TB, k Key, aad, plaintext []byte) []byte {
	tb.Helper()
	raw, err := k.HPKEPublic()
	if err != nil {
		tb.Fatal(err)
	}
	public, err := hpke.MLKEM768X25519().NewPublicKey(raw)
	if err != nil {
		tb.Fatal(err)
	}
	enc, sender, err := hpke.NewSender(public, hpke.HKDFSHA256(), hpke.ChaCha20Poly1305(), []byte("bc-join/v1"))
	if err != nil {
		tb.Fatal(err)
	}
	ciphertext, err := sender.Seal(aad, plaintext)
	if err != nil {
		tb.Fatal(err)
	}
	return append(enc, ciphertext...)
}

func TestSealedPartsOpenForTheirEnvelopeOnly(t *testing.T) {
	c := &clock{start}
	k := newKey(t, MLKEM768X25519, start)
	r, _ := ring(t, c, k)
	csr := []byte("request")
	aad := wire.SealAAD("tpm", wire.RoleNode, csr)
	sealed := seal(t, k, aad, []byte("secret"))
	if got, err := r.Open(k.KeyID, aad, sealed); err != nil || string(got) != "secret" {
		t.Fatalf("opened %q: %v", got, err)
	}
	flip := func(i int) []byte {
		out := bytes.Clone(sealed)
		out[i] ^= 1
		return out
	}
	for name, try := range map[string]struct {
		aad, sealed []byte
	}{
		"another attestor":      {wire.SealAAD("", wire.RoleNode, csr), sealed},
		"another role":          {wire.SealAAD("tpm", wire.RoleSite, csr), sealed},
		"another CSR":           {wire.SealAAD("tpm", wire.RoleNode, []byte("other")), sealed},
		"no AAD":                {nil, sealed},
		"empty":                 {aad, nil},
		"the key alone":         {aad, sealed[:encSize]},
		"less than the key":     {aad, sealed[:encSize-1]},
		"cut":                   {aad, sealed[:len(sealed)-1]},
		"longer":                {aad, append(bytes.Clone(sealed), 0)},
		"flipped in ML-KEM":     {aad, flip(3)},
		"flipped in X25519":     {aad, flip(encSize - 1)},
		"flipped in the text":   {aad, flip(encSize)},
		"sealed to another key": {aad, seal(t, newKey(t, MLKEM768X25519, start), aad, []byte("secret"))},
		"zeroes":                {aad, make([]byte, len(sealed))},
	} {
		t.Run(name, func(t *testing.T) {
			if got, err := r.Open(k.KeyID, try.aad, try.sealed); !errors.Is(err, ErrSealed) || got != nil {
				t.Errorf("opened %q: %v", got, err)
			}
		})
	}
	if _, err := r.Open("0000000000000000", aad, sealed); !errors.Is(err, ErrUnknownKey) || r.Knows("0000000000000000") || r.Knows("") {
		t.Errorf("an unknown key: %v", err)
	}
}

// TestKeysComeIntoUseAndAreDroppedInTime walks the clock along a rotation.
func TestKeysComeIntoUseAndAreDroppedInTime(t *testing.T) {
	day := 24 * time.Hour
	for _, a := range []Algorithm{Ed25519, MLKEM768X25519, AES256GCM} {
		t.Run(string(a), func(t *testing.T) {
			c := &clock{start}
			first, second, third := newKey(t, a, start), newKey(t, a, start.Add(day)), newKey(t, a, time.Time{})
			first.DropAfter = start.Add(2 * day)
			r, _ := ring(t, c, first, second, third)
			for _, step := range []struct {
				at      time.Duration
				current Key
				opens   []Key
			}{
				{0, first, []Key{first, second, third}},
				{day - time.Second, first, []Key{first, second, third}},
				{day, second, []Key{first, second, third}},
				{2*day - time.Second, second, []Key{first, second, third}},
				{2 * day, second, []Key{second, third}},
				{300 * day, second, []Key{second, third}},
			} {
				c.now = start.Add(step.at)
				if got := current(t, r, a); got != step.current.KeyID {
					t.Errorf("after %v: key %s is used, want %s", step.at, got, step.current.KeyID)
				}
				ids := r.KeyIDs()
				for _, k := range []Key{first, second, third} {
					want := slices.ContainsFunc(step.opens, func(o Key) bool { return o.KeyID == k.KeyID })
					if got := slices.Contains(ids, k.KeyID); got != want {
						t.Errorf("after %v: key %s loaded: %t, want %t", step.at, k.KeyID, got, want)
					}
					if a == MLKEM768X25519 && r.Knows(k.KeyID) != want {
						t.Errorf("after %v: knows %s: %t", step.at, k.KeyID, !want)
					}
				}
			}
		})
	}
}

// current is the id of the key that a keyring works with.
func current(t *testing.T, r *Keyring, a Algorithm) string {
	t.Helper()
	switch a {
	case Ed25519:
		text, err := r.Sign(wire.TypeJoin, []byte("{}"))
		if err != nil {
			t.Fatal(err)
		}
		jws, err := jose.ParseSignedCompact(text, []jose.SignatureAlgorithm{jose.EdDSA})
		if err != nil {
			t.Fatal(err)
		}
		return jws.Signatures[0].Protected.KeyID
	case AES256GCM:
		sealed, err := r.SealState("p", nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		return hex.EncodeToString(sealed[1:9])
	default:
		return r.sealing.Load().current(r.now()).KeyID
	}
}

func TestAnswersAreCompactJWS(t *testing.T) {
	k := newKey(t, Ed25519, start)
	r, _ := ring(t, &clock{start}, k)
	for _, typ := range []string{wire.TypeJoin, "bc-command+jws", wire.TypeJoin} {
		text, err := r.Sign(typ, []byte(`{"protocol":1}`))
		if err != nil {
			t.Fatal(err)
		}
		jws, err := jose.ParseSignedCompact(text, []jose.SignatureAlgorithm{jose.EdDSA})
		if err != nil {
			t.Fatal(err)
		}
		public, err := k.Ed25519Public()
		if err != nil {
			t.Fatal(err)
		}
		payload, err := jws.Verify(public)
		if err != nil || string(payload) != `{"protocol":1}` {
			t.Errorf("payload %q: %v", payload, err)
		}
		h := jws.Signatures[0].Protected
		if h.Algorithm != "EdDSA" || h.KeyID != k.KeyID || h.ExtraHeaders["typ"] != typ || len(h.ExtraHeaders) != 1 || h.JSONWebKey != nil {
			t.Errorf("header %+v", h)
		}
		if len(jws.Signatures[0].Unprotected.ExtraHeaders) > 0 {
			t.Error("it has unprotected headers")
		}
	}
}

func TestAStateOpensForItsPurposeAndBindingOnly(t *testing.T) {
	r, _ := ring(t, &clock{start})
	sealed, err := r.SealState("challenge", []byte("csr"), []byte("secret"))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := r.OpenState("challenge", []byte("csr"), sealed); err != nil || string(got) != "secret" {
		t.Fatalf("opened %q: %v", got, err)
	}
	if bytes.Contains(sealed, []byte("secret")) {
		t.Error("it is not sealed")
	}
	if again, err := r.SealState("challenge", []byte("csr"), []byte("secret")); err != nil || bytes.Equal(again, sealed) {
		t.Error("sealing twice gives the same bytes")
	}
	other, _ := ring(t, &clock{start})
	if _, err := other.OpenState("challenge", []byte("csr"), sealed); !errors.Is(err, ErrSealed) {
		t.Errorf("by another keyring: %v", err)
	}
	for name, try := range map[string]struct {
		purpose string
		aad     []byte
		sealed  []byte
	}{
		"another purpose":          {"renew", []byte("csr"), sealed},
		"another binding":          {"challenge", []byte("csR"), sealed},
		"no binding":               {"challenge", nil, sealed},
		"purpose and binding swap": {"challenge\x00csr", nil, sealed},
		"empty":                    {"challenge", []byte("csr"), nil},
		"the header alone":         {"challenge", []byte("csr"), sealed[:stateHeader]},
		"cut":                      {"challenge", []byte("csr"), sealed[:len(sealed)-1]},
		"longer":                   {"challenge", []byte("csr"), append(bytes.Clone(sealed), 0)},
	} {
		t.Run(name, func(t *testing.T) {
			if got, err := r.OpenState(try.purpose, try.aad, try.sealed); !errors.Is(err, ErrSealed) || got != nil {
				t.Errorf("opened %q: %v", got, err)
			}
		})
	}
	for i := range sealed {
		flipped := bytes.Clone(sealed)
		flipped[i] ^= 0x40
		if _, err := r.OpenState("challenge", []byte("csr"), flipped); !errors.Is(err, ErrSealed) {
			t.Fatalf("with byte %d flipped: %v", i, err)
		}
	}
}

// TestAnyReplicaOpensWhatAnotherSealed shares the Secrets, not the process.
func TestAnyReplicaOpensWhatAnotherSealed(t *testing.T) {
	c := &clock{start}
	one, snapshot := ring(t, c)
	two := New(slog.New(slog.DiscardHandler), c.Now)
	two.Load(snapshot)
	sealed, err := one.SealState("challenge", []byte("csr"), []byte("secret"))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := two.OpenState("challenge", []byte("csr"), sealed); err != nil || string(got) != "secret" {
		t.Errorf("opened %q: %v", got, err)
	}
}

func TestAnEmptyKeyringSaysSo(t *testing.T) {
	r := New(slog.New(slog.DiscardHandler), nil)
	r.Load(secrets.Snapshot{})
	if _, err := r.Sign(wire.TypeJoin, nil); !errors.Is(err, ErrNoKey) {
		t.Errorf("sign: %v", err)
	}
	if _, err := r.SealState("p", nil, nil); !errors.Is(err, ErrNoKey) {
		t.Errorf("seal: %v", err)
	}
	if r.Ready() || len(r.KeyIDs()) > 0 {
		t.Error("ready")
	}
}

// TestFilesThatCannotBeUsedKeepWhatWasLoaded spoils the file in many ways.
func TestFilesThatCannotBeUsedKeepWhatWasLoaded(t *testing.T) {
	k := newKey(t, Ed25519, start)
	good := string(file(t, k)[Item])
	spoiled := func(edit func(map[string]any)) []byte {
		var f map[string][]map[string]any
		if err := json.Unmarshal([]byte(good), &f); err != nil {
			t.Fatal(err)
		}
		edit(f["keys"][0])
		raw, err := json.Marshal(f)
		if err != nil {
			t.Fatal(err)
		}
		return raw
	}
	for name, raw := range map[string][]byte{
		"empty":             {},
		"not JSON":          []byte("keys"),
		"no keys":           []byte(`{"keys":[]}`),
		"unknown field":     spoiled(func(k map[string]any) { k["public"] = "x" }),
		"another algorithm": spoiled(func(k map[string]any) { k["algorithm"] = "AES-256-GCM" }),
		"unknown algorithm": spoiled(func(k map[string]any) { k["algorithm"] = "RSA" }),
		"another kid":       spoiled(func(k map[string]any) { k["kid"] = "0123456789abcdef" }),
		"short":             spoiled(func(k map[string]any) { k["private"] = "AAAA" }),
		"no time":           spoiled(func(k map[string]any) { k["useFrom"] = "tomorrow" }),
		"twice":             []byte(strings.Replace(good, "[", "["+good[len(`{"keys":[`):len(good)-2]+",", 1)),
		"other capitals":    []byte(strings.Replace(good, `"keys"`, `"Keys"`, 1)),
		"trailing":          []byte(good + "{}"),
	} {
		t.Run(name, func(t *testing.T) {
			log := &strings.Builder{}
			r := New(slog.New(slog.NewTextHandler(log, nil)), (&clock{start}).Now)
			_, snapshot := ring(t, &clock{start}, k)
			r.Load(snapshot)
			log.Reset()
			next := secrets.Snapshot{SigningSecret: {Item: raw}, SealingSecret: snapshot[SealingSecret], ChallengeSecret: snapshot[ChallengeSecret]}
			r.Load(next)
			r.Load(next)
			if got := current(t, r, Ed25519); got != k.KeyID {
				t.Errorf("key %s is used", got)
			}
			if n := strings.Count(log.String(), "level=ERROR"); n != 1 {
				t.Errorf("%d errors in the log, want 1:\n%s", n, log)
			}
			if private, err := k.ed25519Private(); err != nil || strings.Contains(log.String(), wire.EncodeBase64(private.Seed())) {
				t.Error("the log holds the key")
			}
			if _, err := ParseFile(raw, Ed25519); name != "no keys" && err == nil {
				t.Error("the file passes")
			}
		})
	}
}

func TestAKeyLeftOutOfItsFileIsGoneAtOnce(t *testing.T) {
	stolen, next := newKey(t, MLKEM768X25519, start), newKey(t, MLKEM768X25519, start.Add(time.Minute))
	r, snapshot := ring(t, &clock{start.Add(time.Hour)}, stolen, next)
	if !r.Knows(stolen.KeyID) {
		t.Fatal("not loaded")
	}
	snapshot[SealingSecret] = file(t, next)
	r.Load(snapshot)
	if r.Knows(stolen.KeyID) || !r.Knows(next.KeyID) {
		t.Error("still there, or the other is gone")
	}
	select {
	case <-r.changed:
	default:
		t.Error("the change is not reported")
	}
	// A Secret that goes as a whole is an accident.
	delete(snapshot, SealingSecret)
	r.Load(snapshot)
	if !r.Knows(next.KeyID) {
		t.Error("gone with its Secret")
	}
}

func TestIDsAreMadeOfTheKey(t *testing.T) {
	for _, a := range []Algorithm{Ed25519, MLKEM768X25519, AES256GCM} {
		k := newKey(t, a, start)
		if len(k.KeyID) != 16 {
			t.Errorf("%s: id %q", a, k.KeyID)
		}
		f, err := ParseFile(file(t, k)[Item], a)
		if err != nil || len(f.Keys) != 1 {
			t.Fatalf("%s: %v", a, err)
		}
		got := f.Keys[0]
		if got.KeyID != k.KeyID || !bytes.Equal(got.Private, k.Private) || !got.UseFrom.Equal(k.UseFrom) || !got.CreatedAt.Equal(start) {
			t.Errorf("%s: read back as %s", a, got.KeyID)
		}
	}
	if _, err := NewKey("RSA", start); err == nil {
		t.Error("a key of an unknown algorithm was made")
	}
	// The public half is what the bundle shows, never more.
	k := newKey(t, Ed25519, start)
	public, err := k.Ed25519Public()
	if err != nil || !bytes.Equal(public, ed25519.NewKeyFromSeed(k.Private).Public().(ed25519.PublicKey)) {
		t.Errorf("public half: %v", err)
	}
	if _, err := newKey(t, AES256GCM, start).HPKEPublic(); err == nil {
		t.Error("a symmetric key has a public half")
	}
}

// FuzzOpenState must neither panic nor open what was not sealed.
func FuzzOpenState(f *testing.F) {
	r, _ := ring(f, &clock{start})
	sealed, err := r.SealState("challenge", []byte("csr"), []byte("secret"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add("challenge", []byte("csr"), sealed)
	f.Add("challenge", []byte("csr"), sealed[:stateHeader])
	f.Add("", []byte{}, []byte{})
	f.Add("challenge", []byte("csr"), []byte{stateVersion})
	f.Fuzz(func(t *testing.T, purpose string, aad, text []byte) {
		got, err := r.OpenState(purpose, aad, text)
		if err == nil && (purpose != "challenge" || string(aad) != "csr" || !bytes.Equal(text, sealed)) {
			t.Errorf("opened %q", got)
		}
	})
}

// FuzzOpen is the same for what machines seal.
func FuzzOpen(f *testing.F) {
	k := newKey(f, MLKEM768X25519, start)
	r, _ := ring(f, &clock{start}, k)
	sealed := seal(f, k, []byte("aad"), []byte("secret"))
	f.Add([]byte("aad"), sealed)
	f.Add([]byte("aad"), sealed[:encSize])
	f.Add([]byte{}, []byte{})
	f.Fuzz(func(t *testing.T, aad, text []byte) {
		got, err := r.Open(k.KeyID, aad, text)
		if err == nil && string(got) != "secret" {
			t.Errorf("opened %q", got)
		}
		if err != nil && !errors.Is(err, ErrSealed) {
			t.Errorf("error %v", err)
		}
	})
}

func BenchmarkOpen(b *testing.B) {
	k := newKey(b, MLKEM768X25519, start)
	r, _ := ring(b, &clock{start}, k)
	sealed := seal(b, k, []byte("aad"), bytes.Repeat([]byte("x"), 200))
	for b.Loop() {
		if _, err := r.Open(k.KeyID, []byte("aad"), sealed); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkSign(b *testing.B) {
	r, _ := ring(b, &clock{start})
	payload := bytes.Repeat([]byte("x"), 2500)
	for b.Loop() {
		if _, err := r.Sign(wire.TypeJoin, payload); err != nil {
			b.Fatal(err)
		}
	}
}

func ExampleCurrent() {
	old := Key{KeyID: "old", UseFrom: start, DropAfter: start.Add(48 * time.Hour)}
	next := Key{KeyID: "next", UseFrom: start.Add(24 * time.Hour)}
	fmt.Println(Current([]Key{old, next}, start).KeyID)
	fmt.Println(Current([]Key{old, next}, start.Add(24*time.Hour)).KeyID)
	// Output:
	// old
	// next
}
