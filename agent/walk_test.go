package agent_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/join-operator/agent"
	"github.com/better-compute/join-operator/agent/agenttest"
	"github.com/better-compute/join-operator/agent/trust"
	"github.com/better-compute/join-operator/api/wire"
)

// pinned is the bundle that is on disk.
func (b *bench) pinned() *trust.Bundle {
	b.t.Helper()
	raw, err := b.dir.Bundle()
	if err != nil {
		b.t.Fatal(err)
	}
	p, err := trust.Parse(raw)
	if err != nil {
		b.t.Fatal(err)
	}
	return p
}

// TestStaleBundleIsMendedWithinOneExchange has all keys change twice while the
// machine was off: it walks, seals anew, and joins at its first exchange.
func TestStaleBundleIsMendedWithinOneExchange(t *testing.T) {
	b := newBench(t)
	m := b.machine()
	b.Rotate(nil)
	b.Rotate(nil)
	o := b.options()
	o.Once = true
	if _, err := m.Join(t.Context(), o); err != nil {
		t.Fatalf("%v\n%s", err, b.log.String())
	}
	if g := b.pinned().Generation(); g != 3 {
		t.Errorf("pinned generation %d, want 3", g)
	}
	if w := fmt.Sprint(b.Walks()); w != "[1 3]" {
		t.Errorf("walked %s, want from 1, then to see that nothing follows 3", w)
	}
}

// TestTwoYearsOffFindsItsWayWithoutAPerson has every key and the TLS authority
// change, over more links than one page holds.
func TestTwoYearsOffFindsItsWayWithoutAPerson(t *testing.T) {
	b := newBench(t)
	m := b.machine()
	for range wire.MaxRotations + 5 {
		b.Rotate(nil)
	}
	moved := agenttest.NewAuthority(t, "tls-2")
	gateway := b.Serve(b.Server.Config.Handler, moved)
	// The old address answers too, but with a certificate of the new authority.
	b.Server.TLS.Certificates = gateway.TLS.Certificates
	b.Rotate(func(x *wire.Bundle) { x.TLSCA, x.Endpoints = moved.PEM(), []string{gateway.URL} })
	o := b.options()
	o.Once = true
	if _, err := m.Join(t.Context(), o); err != nil {
		t.Fatalf("%v\n%s", err, b.log.String())
	}
	if g := b.pinned().Generation(); g != wire.MaxRotations+7 {
		t.Errorf("pinned generation %d", g)
	}
}

// TestHintLeadsToTheNewestBundle walks at a join that the old bundle verifies too.
func TestHintLeadsToTheNewestBundle(t *testing.T) {
	b := newBench(t)
	m := b.machine()
	b.KeepKeys = true
	next := agenttest.NewAuthority(t, "node-ca-2")
	b.Rotate(func(x *wire.Bundle) { x.NodeCAs = next.PEM() + x.NodeCAs })
	b.OnJoin(func(w http.ResponseWriter, j *agenttest.Join) {
		a := b.Admit(j)
		a.BundleSHA256 = b.pinnedHash(b.Bundle())
		b.Write(w, a)
	})
	o := b.options()
	o.Once = true
	j, err := m.Join(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if g := b.pinned().Generation(); g != 2 {
		t.Errorf("pinned generation %d after a hint", g)
	}
	if len(j.Identity.CAs) != 2 {
		t.Errorf("%d authorities stored, want the newer bundle's two", len(j.Identity.CAs))
	}
}

func (b *bench) pinnedHash(raw []byte) string {
	b.t.Helper()
	p, err := trust.Parse(raw)
	if err != nil {
		b.t.Fatal(err)
	}
	return p.SHA256()
}

// TestHintIsFollowedAtMostOnceAMinute and one that leads nowhere only once.
func TestHintIsFollowedAtMostOnceAMinute(t *testing.T) {
	b := newBench(t)
	polls := 0
	b.OnJoin(func(w http.ResponseWriter, j *agenttest.Join) {
		if polls++; polls > 20 {
			b.Write(w, b.Admit(j))
			return
		}
		a := b.Answer(j, wire.OutcomePending)
		a.JoinRequest, a.RetryAfterSeconds = "jr-1", 15
		a.BundleSHA256 = strings.Repeat("a", 64)
		if polls > 2 {
			// Ever another hint: the pace alone limits the walks.
			a.BundleSHA256 = fmt.Sprintf("%064d", polls)
		}
		b.Write(w, a)
	})
	began := b.clock.Now()
	b.mustJoin()
	minutes := int(b.clock.Now().Sub(began)/time.Minute) + 1
	if n := len(b.Walks()); n < 2 || n > minutes {
		t.Errorf("walked %d times in %d minutes", n, minutes)
	}
}

// TestStaleBundleForEverWalksOnceAMinute keeps a broken service from being asked
// for rotations in a loop.
func TestStaleBundleForEverWalksOnceAMinute(t *testing.T) {
	b := newBench(t)
	b.config.Random = func(limit time.Duration) time.Duration { return min(limit/2, 20*time.Second) }
	b.OnJoin(func(w http.ResponseWriter, j *agenttest.Join) {
		if len(b.clock.Sleeps()) >= 9 {
			b.Write(w, b.Admit(j))
			return
		}
		agenttest.WriteProblem(w, wire.StaleBundle, 0)
	})
	b.mustJoin()
	minutes := int(b.clock.Now().Sub(agenttest.Start)/time.Minute) + 1
	if n := len(b.Walks()); n < 2 || n > minutes {
		t.Errorf("walked %d times in %d minutes", n, minutes)
	}
}

// TestFalseRotationsAreNotFollowed sends links that must not be adopted. The
// pinned bundle stays as it is.
func TestFalseRotationsAreNotFollowed(t *testing.T) {
	for name, forge := range map[string]func(b *bench) []string{
		"signed by a stranger": func(b *bench) []string {
			return []string{agenttest.NewSigningKey(t).Sign(t, wire.TypeBundle, b.NextBundle(func(*wire.Bundle) {}))}
		},
		"a stranger under the pinned kid": func(b *bench) []string {
			k := agenttest.NewSigningKey(t)
			k.ID = b.Rotator.ID
			return []string{k.Sign(t, wire.TypeBundle, b.NextBundle(func(*wire.Bundle) {}))}
		},
		"signed by the answers' key": func(b *bench) []string {
			return []string{b.Signer.Sign(t, wire.TypeBundle, b.NextBundle(func(*wire.Bundle) {}))}
		},
		"signed by its own new key": func(b *bench) []string {
			next := b.NextBundle(func(*wire.Bundle) {})
			b.Rotate(nil)
			return []string{b.Rotator.Sign(t, wire.TypeBundle, next)}
		},
		"typ of an answer": func(b *bench) []string {
			return []string{b.Rotator.Sign(t, wire.TypeJoin, b.NextBundle(func(*wire.Bundle) {}))}
		},
		"the same generation": func(b *bench) []string {
			return []string{b.Rotator.Sign(t, wire.TypeBundle, b.NextBundle(func(x *wire.Bundle) { x.Generation = 1 }))}
		},
		"generation 0": func(b *bench) []string {
			return []string{b.Rotator.Sign(t, wire.TypeBundle, b.NextBundle(func(x *wire.Bundle) { x.Generation = 0 }))}
		},
		"a skipped generation": func(b *bench) []string {
			return []string{b.Rotator.Sign(t, wire.TypeBundle, b.NextBundle(func(x *wire.Bundle) { x.Generation = 3 }))}
		},
		"the second link alone": func(b *bench) []string {
			b.Rotate(nil)
			return []string{b.Rotate(nil)}
		},
		"another trust domain": func(b *bench) []string {
			return []string{b.Rotator.Sign(t, wire.TypeBundle, b.NextBundle(func(x *wire.Bundle) { x.TrustDomain = "evil.example" }))}
		},
		"no endpoint": func(b *bench) []string {
			return []string{b.Rotator.Sign(t, wire.TypeBundle, b.NextBundle(func(x *wire.Bundle) { x.Endpoints = nil }))}
		},
		"an endpoint without TLS": func(b *bench) []string {
			return []string{b.Rotator.Sign(t, wire.TypeBundle, b.NextBundle(func(x *wire.Bundle) { x.Endpoints = []string{"http://127.0.0.1"} }))}
		},
		"no key to seal to that is known": func(b *bench) []string {
			return []string{b.Rotator.Sign(t, wire.TypeBundle, b.NextBundle(func(x *wire.Bundle) { x.Sealing = []wire.SealingKey{{KeyID: "k", KEM: 9, KDF: 9, AEAD: 9}} }))}
		},
		"unsigned": func(b *bench) []string { return []string{string(b.NextBundle(func(*wire.Bundle) {}))} },
		"garbage":  func(*bench) []string { return []string{"a.b.c"} },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			m := b.machine()
			before, err := b.dir.Bundle()
			if err != nil {
				t.Fatal(err)
			}
			b.SetLinks(forge(b)...)
			b.OnJoin(func(w http.ResponseWriter, _ *agenttest.Join) { agenttest.WriteProblem(w, wire.StaleBundle, 0) })
			o := b.options()
			o.Once = true
			if _, err := m.Join(t.Context(), o); err == nil {
				t.Error("joined")
			}
			if len(b.Walks()) == 0 {
				t.Fatal("the rotations were not asked for: the test shows nothing")
			}
			after, err := b.dir.Bundle()
			if err != nil || string(after) != string(before) {
				t.Errorf("the pinned bundle changed (error %v)", err)
			}
		})
	}
}

// TestAnOlderBundleThatIsGivenChangesNothing, nor does a newer one: only signed
// rotations may.
func TestAnOlderBundleThatIsGivenChangesNothing(t *testing.T) {
	b := newBench(t)
	first := b.Bundle()
	m := b.machine()
	b.Rotate(nil)
	o := b.options()
	o.Once = true
	if _, err := m.Join(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	second, _ := b.dir.Bundle()
	newer := b.NextBundle(func(*wire.Bundle) {})
	for _, given := range [][]byte{first, newer, []byte("{}")} {
		b.restart()
		c := agent.Config{State: b.dir, FirstBundle: given, Logger: quiet(), Clock: b.clock}
		if _, err := agent.New(c); err != nil {
			t.Fatal(err)
		}
		if now, _ := b.dir.Bundle(); string(now) != string(second) {
			t.Error("a given bundle replaced the pinned one")
		}
	}
}

// TestIssuerNewerThanTheBundleIsVouchedForByTheAnswer has the node CA change
// before the bundle says so.
func TestIssuerNewerThanTheBundleIsVouchedForByTheAnswer(t *testing.T) {
	b := newBench(t)
	m := b.machine()
	old := b.NodeCA
	b.NodeCA = agenttest.NewAuthority(t, "node-ca-2")
	o := b.options()
	o.Once = true
	j, err := m.Join(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if j.IssuerPinned {
		t.Error("an unknown issuer passes for a pinned one")
	}
	if len(j.Identity.CAs) != 2 || string(j.Identity.CAs[0]) != string(b.NodeCA.Cert.Raw) || string(j.Identity.CAs[1]) != string(old.Cert.Raw) {
		t.Errorf("%d authorities stored, want the new one and the pinned one", len(j.Identity.CAs))
	}
}

// TestUnknownNamesInABundleAreIgnored lets a later service add some.
func TestUnknownNamesInABundleAreIgnored(t *testing.T) {
	b := newBench(t)
	var x map[string]any
	if err := json.Unmarshal(b.Bundle(), &x); err != nil {
		t.Fatal(err)
	}
	x["later"] = map[string]any{"a": 1}
	raw, _ := json.Marshal(x)
	if _, err := trust.Parse(raw); err != nil {
		t.Error(err)
	}
}
