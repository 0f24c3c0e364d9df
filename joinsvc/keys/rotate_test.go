package keys

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"log/slog"
	"math/big"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/joinsvc/keyring"
	"github.com/better-compute/join-operator/test/kubetest"
	"github.com/better-compute/join-operator/test/pgtest"
)

const trustDomain = "test.join.example"

// world is an API server and a database, where the job has the rights of config/rbac.
type world struct {
	*testing.T
	cluster *kubetest.Cluster
	db      *pgtest.DB
	admin   *pgxpool.Pool
	cfg     Config
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{T: t, cluster: kubetest.Shared(t), db: pgtest.New(t)}
	w.admin = w.db.Pool(t, pgtest.Admin)
	keysNamespace, trustNamespace := w.cluster.Namespace(t, nil), w.cluster.Namespace(t, nil)
	w.grant(map[string]string{"join-keys": keysNamespace, "join-trust": trustNamespace})
	secrets, err := corev1client.NewForConfig(w.cluster.As(t, "keys-"+keysNamespace))
	w.must(err)
	w.cfg = Config{
		DB: w.db.Pool(t, pgtest.Keys), Secrets: secrets, KeysNamespace: keysNamespace, TrustNamespace: trustNamespace, SystemNamespace: "join-system",
		TrustDomain: trustDomain, Endpoints: []string{"https://join.example:8443"}, TLSCA: certificate(t, "tls-1", start.AddDate(20, 0, 0)),
		Overlap: overlap, MaxAge: maxAge, BundleMaxAge: 365 * day, Logger: slog.New(slog.DiscardHandler),
	}
	w.db.SetNow(t, start)
	w.issuer("node-ca-1", start.AddDate(10, 0, 0), []byte("ski-1"))
	return w
}

// grant gives the job's roles, as they are installed, in this test's namespaces.
func (w *world) grant(namespaces map[string]string) {
	w.Helper()
	for _, o := range kubetest.Kustomize(w.T, "config/rbac") {
		to, ok := namespaces[o.GetNamespace()]
		if o.GetKind() != "Role" || o.GetName() != "join-keys" || !ok {
			continue
		}
		o.SetNamespace(to)
		w.must(w.cluster.Client.Create(w.Context(), o))
		w.must(w.cluster.Client.Create(w.Context(), &rbacv1.RoleBinding{
			ObjectMeta: objectMeta(to, "join-keys"),
			Subjects:   []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: "keys-" + namespaces["join-keys"]}},
			RoleRef:    rbacv1.RoleRef{Kind: "Role", APIGroup: rbacv1.GroupName, Name: "join-keys"},
		}))
	}
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

func (w *world) exec(sql string, args ...any) {
	w.Helper()
	_, err := w.admin.Exec(w.Context(), sql, args...)
	w.must(err)
}

func (w *world) run(edit func(*Config)) Result {
	w.Helper()
	r, err := w.try(edit)
	w.must(err)
	return r
}

func (w *world) try(edit func(*Config)) (Result, error) {
	w.Helper()
	cfg := w.cfg
	if edit != nil {
		edit(&cfg)
	}
	return Rotate(w.Context(), cfg)
}

// issuer registers a CA as a replica does.
func (w *world) issuer(name string, notAfter time.Time, ski []byte) []byte {
	w.Helper()
	block, _ := pem.Decode(certificate(w.T, name, notAfter))
	sum := sha256.Sum256(block.Bytes)
	w.exec(`INSERT INTO issuers (cert_sha256, name, ski, der, not_after) VALUES ($1, $2, $3, $4, $5)`, sum[:], name, ski, block.Bytes, notAfter)
	return block.Bytes
}

// replica says that a replica runs and which keys it has.
func (w *world) replica(id string, kids ...string) {
	w.Helper()
	w.exec(`INSERT INTO replicas (id, keys) VALUES ($1, $2) ON CONFLICT (id) DO UPDATE SET keys = $2, seen_at = join_now()`, id, kids)
}

// file is the keys of a kind as they are stored.
func (w *world) file(kind Kind) []keyring.Key {
	w.Helper()
	namespace := w.cfg.KeysNamespace
	if kind == Bundle {
		namespace = w.cfg.TrustNamespace
	}
	var s corev1.Secret
	w.must(w.cluster.Client.Get(w.Context(), client.ObjectKey{Namespace: namespace, Name: kind.secret()}, &s))
	f, err := keyring.ParseFile(s.Data[keyring.Item], kind.algorithm())
	w.must(err)
	return f.Keys
}

func (w *world) allKeys() []string {
	w.Helper()
	var ids []string
	for _, kind := range []Kind{Signing, Sealing, Challenge} {
		for _, k := range w.file(kind) {
			ids = append(ids, k.KeyID)
		}
	}
	return ids
}

// chain follows all generations as a machine does and returns the newest.
func (w *world) chain(generations int) *wire.Bundle {
	w.Helper()
	rows, err := w.admin.Query(w.Context(), `SELECT generation, payload, jws FROM bundles ORDER BY generation`)
	w.must(err)
	type row struct {
		Generation int
		Payload    []byte
		JWS        string
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[row])
	w.must(err)
	if len(list) != generations {
		w.Fatalf("%d generations, want %d", len(list), generations)
	}
	var pinned *wire.Bundle
	for i, r := range list {
		jws, err := jose.ParseSignedCompact(r.JWS, []jose.SignatureAlgorithm{jose.EdDSA})
		w.must(err)
		var b wire.Bundle
		w.must(json.Unmarshal(r.Payload, &b))
		trusted := pinned
		if trusted == nil {
			trusted = &b // the first is signed by its own
		}
		var set jose.JSONWebKeySet
		w.must(json.Unmarshal(trusted.BundleKeys, &set))
		header := jws.Signatures[0].Protected
		keys := set.Key(header.KeyID)
		if len(keys) != 1 || header.ExtraHeaders[jose.HeaderType] != wire.TypeBundle {
			w.Fatalf("generation %d: signed by %q, typ %v", i+1, header.KeyID, header.ExtraHeaders[jose.HeaderType])
		}
		payload, err := jws.Verify(keys[0])
		w.must(err)
		if string(payload) != string(r.Payload) || b.Generation != i+1 || r.Generation != i+1 || b.TrustDomain != trustDomain || b.Protocol != 1 {
			w.Fatalf("generation %d says %+v", i+1, b)
		}
		pinned = &b
	}
	return pinned
}

func kids(t testing.TB, set json.RawMessage) []string {
	t.Helper()
	ids, err := keyIDs(set)
	if err != nil {
		t.Fatal(err)
	}
	return ids
}

func certificate(t testing.TB, name string, notAfter time.Time) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true, NotAfter: notAfter}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

func names(t testing.TB, text string) []string {
	t.Helper()
	ders, err := decodePEM(text)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, der := range ders {
		c, err := x509.ParseCertificate(der)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, c.Subject.CommonName)
	}
	return out
}

func TestTheFirstRunMakesKeysAndTheFirstGeneration(t *testing.T) {
	w := newWorld(t)
	got := w.run(nil)
	if got.Generation != 1 || !got.Published || len(got.Added) != 4 {
		t.Errorf("%+v", got)
	}
	b := w.chain(1)
	signing, sealing, bundle := w.file(Signing), w.file(Sealing), w.file(Bundle)
	public, err := sealing[0].HPKEPublic()
	w.must(err)
	if !slices.Equal(kids(t, b.SigningKeys), []string{signing[0].KeyID}) || !slices.Equal(kids(t, b.BundleKeys), []string{bundle[0].KeyID}) ||
		len(b.Sealing) != 1 || b.Sealing[0].KeyID != sealing[0].KeyID || b.Sealing[0].PublicKey != wire.EncodeBase64(public) ||
		b.Sealing[0].KEM != 0x647a || b.Sealing[0].KDF != 1 || b.Sealing[0].AEAD != 3 {
		t.Errorf("it publishes %+v", b)
	}
	if !slices.Equal(names(t, b.NodeCAs), []string{"node-ca-1"}) || !slices.Equal(names(t, b.TLSCA), []string{"tls-1"}) || !slices.Equal(b.Endpoints, w.cfg.Endpoints) || !b.IssuedAt.Equal(start) {
		t.Errorf("it says %+v", b)
	}
	raw, err := json.Marshal(b)
	w.must(err)
	for _, kind := range Kinds {
		k := w.file(kind)[0]
		if !k.InUse(start) {
			t.Errorf("the first %s key is not in use", kind)
		}
		if strings.Contains(string(raw), wire.EncodeBase64(k.Private)) {
			t.Errorf("the bundle holds the private half of the %s key", kind)
		}
	}
	var events, audits int
	w.must(w.admin.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM events WHERE type = 'bundle.published' AND tenant = 'join-system' AND data->>'generation' = '1'),
	  (SELECT count(*) FROM audit_log WHERE action = 'keys.rotate' AND actor = 'system:keys')`).Scan(&events, &audits))
	if events != 1 || audits != 4 {
		t.Errorf("%d events, %d audit rows", events, audits)
	}
	// Running again does nothing.
	if again := w.run(nil); again.Published || len(again.Added)+len(again.Activated)+len(again.Dropped) > 0 || again.Generation != 1 {
		t.Errorf("again: %+v", again)
	}
	w.chain(1)
}

// TestAKeyIsPublishedWhenEveryReplicaHasItAndUsedAnOverlapLater is a whole rotation.
func TestAKeyIsPublishedWhenEveryReplicaHasItAndUsedAnOverlapLater(t *testing.T) {
	w := newWorld(t)
	w.run(nil)
	w.replica("one", w.allKeys()...)
	w.replica("two", w.allKeys()...)
	w.db.Advance(t, maxAge)
	w.replica("one", w.allKeys()...)
	w.replica("two", w.allKeys()...)
	old := w.allKeys()
	first := w.run(nil)
	if len(first.Added) != 3 || len(first.Waiting) != 3 || first.Published || len(first.Activated) > 0 {
		t.Fatalf("no replica has the new keys: %+v", first)
	}
	w.replica("one", w.allKeys()...)
	if half := w.run(nil); half.Published || len(half.Activated) > 0 || len(half.Added) > 0 {
		t.Fatalf("one replica lacks the new keys: %+v", half)
	}
	// A replica that ended does not hold it up.
	w.exec(`UPDATE replicas SET seen_at = join_now() - interval '61 seconds' WHERE id = 'two'`)
	all := w.run(nil)
	if all.Generation != 2 || !all.Published || len(all.Activated) != 3 {
		t.Fatalf("all replicas have the new keys: %+v", all)
	}
	b := w.chain(2)
	now := w.db.Now(t)
	for kind, list := range map[Kind][]keyring.Key{Signing: w.file(Signing), Sealing: w.file(Sealing)} {
		if len(list) != 2 || !slices.Contains(old, list[0].KeyID) {
			t.Fatalf("%s keys: %v", kind, list)
		}
		if !list[1].UseFrom.Equal(now.Add(overlap)) || !list[0].DropAfter.Equal(now.Add(2*overlap)) {
			t.Errorf("%s: used from %v, the old one until %v", kind, list[1].UseFrom, list[0].DropAfter)
		}
	}
	if c := w.file(Challenge); !c[1].UseFrom.Equal(now) || !c[0].DropAfter.Equal(now.Add(overlap)) {
		t.Errorf("challenge: used from %v, the old one until %v", c[1].UseFrom, c[0].DropAfter)
	}
	if len(kids(t, b.SigningKeys)) != 2 || len(b.Sealing) != 2 || b.Sealing[0].KeyID != w.file(Sealing)[0].KeyID {
		t.Errorf("generation 2 shows %v and %v", kids(t, b.SigningKeys), b.Sealing)
	}
	w.db.Advance(t, overlap)
	// Machines are to prefer the new key; the old challenge key is over already.
	if next := w.run(nil); !next.Published || len(next.Dropped) != 1 {
		t.Errorf("when the keys come into use: %+v", next)
	}
	if b := w.chain(3); b.Sealing[0].KeyID != w.file(Sealing)[1].KeyID {
		t.Error("the new sealing key is not the first")
	}
	w.db.Advance(t, overlap)
	if last := w.run(nil); len(last.Dropped) != 2 || !last.Published {
		t.Errorf("when the old keys are over: %+v", last)
	}
	b = w.chain(4)
	for _, kid := range old {
		if slices.Contains(w.allKeys(), kid) || slices.Contains(kids(t, b.SigningKeys), kid) {
			t.Errorf("key %s is still there", kid)
		}
	}
}

// TestBundleKeysRotateAlongTheChain forces one rotation after the other and walks.
func TestBundleKeysRotateAlongTheChain(t *testing.T) {
	w := newWorld(t)
	w.run(nil)
	generations := 1
	for round := range 3 {
		before := w.file(Bundle)
		r := w.run(func(c *Config) { c.Force = []Kind{Bundle} })
		generations++
		if len(r.Added) != 1 || len(r.Activated) != 1 || r.Generation != generations {
			t.Fatalf("round %d: %+v", round, r)
		}
		if b := w.chain(generations); len(kids(t, b.BundleKeys)) != 2 {
			t.Errorf("round %d: %v", round, kids(t, b.BundleKeys))
		}
		w.db.Advance(t, 2*overlap)
		if r := w.run(nil); !slices.Equal(r.Dropped, []string{before[0].KeyID}) {
			t.Errorf("round %d: dropped %v", round, r.Dropped)
		}
		generations++
		if b := w.chain(generations); !slices.Equal(kids(t, b.BundleKeys), r.Added) {
			t.Errorf("round %d: %v, want %v", round, kids(t, b.BundleKeys), r.Added)
		}
	}
}

func TestForceWithoutOverlapReplacesAKeyAtOnce(t *testing.T) {
	w := newWorld(t)
	w.run(nil)
	stolen := w.file(Signing)[0].KeyID
	w.db.Advance(t, time.Minute)
	// No replica runs: nobody lacks the key.
	r := w.run(func(c *Config) { c.Force, c.Overlap = []Kind{Signing}, 0 })
	if len(r.Activated) != 1 {
		t.Fatalf("%+v", r)
	}
	if k := keyring.Current(w.file(Signing), w.db.Now(t)); k == nil || k.KeyID == stolen {
		t.Error("the stolen key still signs")
	}
	w.run(nil)
	if list := w.file(Signing); len(list) != 1 || slices.Contains(kids(t, w.chain(3).SigningKeys), stolen) {
		t.Errorf("%d signing keys, and the stolen one may be published", len(list))
	}
	if _, err := w.try(func(c *Config) { c.Force = []Kind{"everything"} }); err == nil {
		t.Error("an unknown kind passes")
	}
}

// TestReplicasAreWaitedFor has one load the key a little later.
func TestReplicasAreWaitedFor(t *testing.T) {
	w := newWorld(t)
	w.run(nil)
	w.replica("one", w.allKeys()...)
	done := make(chan error, 1)
	go func() {
		for begun := time.Now(); time.Since(begun) < 20*time.Second; time.Sleep(10 * time.Millisecond) {
			s, err := w.cfg.Secrets.Secrets(w.cfg.KeysNamespace).Get(context.Background(), keyring.SealingSecret, getOptions)
			if err != nil {
				done <- err
				return
			}
			f, err := keyring.ParseFile(s.Data[keyring.Item], keyring.MLKEM768X25519)
			if err != nil {
				done <- err
				return
			}
			if len(f.Keys) < 2 {
				continue
			}
			_, err = w.admin.Exec(context.Background(), `UPDATE replicas SET keys = keys || $1::text`, f.Keys[1].KeyID)
			done <- err
			return
		}
		done <- errors.New("the key never came")
	}()
	r := w.run(func(c *Config) { c.Force, c.Wait = []Kind{Sealing}, 30*time.Second })
	w.must(<-done)
	if !r.Published || len(r.Activated) != 1 || len(r.Waiting) > 0 {
		t.Errorf("%+v", r)
	}
}

// TestTheBundleFollowsWhatItIsMadeOf changes one thing at a time.
func TestTheBundleFollowsWhatItIsMadeOf(t *testing.T) {
	w := newWorld(t)
	w.run(nil)
	// A second CA, a renewal of the first (same key), and one that ran out.
	w.issuer("node-ca-10", start.AddDate(10, 0, 0), []byte("ski-10"))
	renewed := w.issuer("node-ca-1", start.AddDate(12, 0, 0), []byte("ski-1"))
	w.issuer("node-ca-2", start.Add(-time.Second), []byte("ski-2"))
	w.run(nil)
	b := w.chain(2)
	if got := names(t, b.NodeCAs); !slices.Equal(got, []string{"node-ca-10", "node-ca-1"}) || !strings.HasSuffix(b.NodeCAs, encodePEM([][]byte{renewed})) {
		t.Errorf("node CAs %v", got)
	}
	// Endpoints.
	w.cfg.Endpoints = append(w.cfg.Endpoints, "https://two.example")
	w.run(nil)
	if b := w.chain(3); len(b.Endpoints) != 2 {
		t.Errorf("endpoints %v", b.Endpoints)
	}
	// A new TLS CA stands beside the old one for an overlap.
	w.db.Advance(t, time.Hour)
	w.cfg.TLSCA = certificate(t, "tls-2", start.AddDate(20, 0, 0))
	w.run(nil)
	if got := names(t, w.chain(4).TLSCA); !slices.Equal(got, []string{"tls-2", "tls-1"}) {
		t.Errorf("TLS CAs %v", got)
	}
	w.db.Advance(t, overlap-time.Second)
	w.run(nil)
	w.chain(4)
	w.db.Advance(t, time.Second)
	w.run(nil)
	if got := names(t, w.chain(5).TLSCA); !slices.Equal(got, []string{"tls-2"}) {
		t.Errorf("TLS CAs %v", got)
	}
}

// TestKeysOnlyComesBeforeTheFirstReplica is the order of a first installation.
func TestKeysOnlyComesBeforeTheFirstReplica(t *testing.T) {
	w := newWorld(t)
	w.exec(`DELETE FROM issuers`)
	if r := w.run(func(c *Config) { c.KeysOnly, c.Endpoints, c.TLSCA = true, nil, nil }); len(r.Added) != 4 || r.Published {
		t.Errorf("%+v", r)
	}
	if _, err := w.try(nil); !errors.Is(err, ErrNoNodeCA) {
		t.Errorf("without a CA: %v", err)
	}
	w.chain(0)
	w.issuer("node-ca-1", start.AddDate(10, 0, 0), []byte("ski-9"))
	if r := w.run(nil); r.Generation != 1 {
		t.Errorf("%+v", r)
	}
}

// TestWhatCannotBeRightFailsAndSaysWhy is for people who restore, rename and mistype.
func TestWhatCannotBeRightFailsAndSaysWhy(t *testing.T) {
	w := newWorld(t)
	w.run(nil)
	fails := func(want string, edit func(*Config)) {
		t.Helper()
		_, err := w.try(edit)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error about %q", err, want)
		}
	}
	fails("renamed", func(c *Config) { c.TrustDomain = "other.example" })
	fails("trust domain", func(c *Config) { c.TrustDomain = "Not A Domain" })
	fails("no endpoint", func(c *Config) { c.Endpoints = nil })
	fails("https", func(c *Config) { c.Endpoints = []string{"http://join.example"} })
	fails("PEM", func(c *Config) { c.TLSCA = []byte("x") })
	fails("PRIVATE KEY", func(c *Config) {
		c.TLSCA = append(slices.Clone(c.TLSCA), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: []byte("x")})...)
	})
	secret := func(kind Kind) *corev1.Secret {
		namespace := w.cfg.KeysNamespace
		if kind == Bundle {
			namespace = w.cfg.TrustNamespace
		}
		var s corev1.Secret
		w.must(w.cluster.Client.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: kind.secret()}, &s))
		return &s
	}
	// The bundle keys are lost, and then made anew by somebody.
	kept := secret(Bundle)
	w.must(w.cluster.Client.Delete(t.Context(), kept))
	fails("bundle keys are gone", nil)
	other, err := keyring.NewKey(keyring.Ed25519, start)
	w.must(err)
	other.UseFrom = start
	raw, err := (&keyring.File{Keys: []keyring.Key{other}}).Marshal()
	w.must(err)
	forged := &corev1.Secret{ObjectMeta: objectMeta(kept.Namespace, kept.Name), Data: map[string][]byte{keyring.Item: raw}}
	w.must(w.cluster.Client.Create(t.Context(), forged))
	fails("would not follow", nil)
	w.must(w.cluster.Client.Delete(t.Context(), forged))
	w.must(w.cluster.Client.Create(t.Context(), &corev1.Secret{ObjectMeta: objectMeta(kept.Namespace, kept.Name), Data: kept.Data}))
	w.run(nil)
	w.chain(1)
	// A file that was edited badly is not overwritten.
	signing := secret(Signing)
	signing.Data[keyring.Item] = []byte(`{"keys":`)
	w.must(w.cluster.Client.Update(t.Context(), signing))
	fails("signing-keys", nil)
	if got := secret(Signing); string(got.Data[keyring.Item]) != `{"keys":` {
		t.Error("it was overwritten")
	}
	// Signing keys that are lost are made anew: the chain leads to them.
	w.must(w.cluster.Client.Delete(t.Context(), signing))
	if r := w.run(nil); !r.Published || len(r.Added) != 1 {
		t.Errorf("after the signing keys were lost: %+v", r)
	}
	w.chain(2)
}

func TestOneRunAtATime(t *testing.T) {
	w := newWorld(t)
	unlock, err := lock(t.Context(), w.cfg.DB)
	w.must(err)
	if _, err := w.try(nil); !errors.Is(err, ErrBusy) {
		t.Errorf("beside another: %v", err)
	}
	unlock()
	var wg sync.WaitGroup
	results := make(chan error, 4)
	for range 4 {
		wg.Go(func() {
			_, err := Rotate(context.Background(), w.cfg)
			results <- err
		})
	}
	wg.Wait()
	for range 4 {
		if err := <-results; err != nil && !errors.Is(err, ErrBusy) {
			t.Error(err)
		}
	}
	w.chain(1)
}

// TestARunThatWasKilledIsFinishedByTheNext ends runs by cancelling them at many
// points of the way.
func TestARunThatWasKilledIsFinishedByTheNext(t *testing.T) {
	w := newWorld(t)
	w.run(nil)
	for i, d := range []time.Duration{0, 2, 4, 6, 8, 10, 12, 15, 18, 22, 26, 30, 35, 40} {
		ctx, cancel := context.WithTimeout(t.Context(), d*time.Millisecond)
		cfg := w.cfg
		cfg.Force = []Kind{Signing, Sealing, Challenge, Bundle}
		_, _ = Rotate(ctx, cfg)
		cancel()
		for begun := time.Now(); ; time.Sleep(10 * time.Millisecond) {
			_, err := w.try(nil)
			if err == nil {
				break
			}
			if !errors.Is(err, ErrBusy) || time.Since(begun) > 10*time.Second { // the killed one's connection is only about to go
				t.Fatalf("killed after %v: %v", d*time.Millisecond, err)
			}
		}
		b := w.chain(w.generations())
		for _, kind := range Kinds {
			list := w.file(kind)
			if n := len(pending(list)); n > 0 {
				t.Errorf("round %d: %d %s keys still wait", i, n, kind)
			}
			if kind != Challenge {
				for _, k := range list {
					if ok, err := published(b, kind, k.KeyID); err != nil || !ok {
						t.Errorf("round %d: %s key %s has a time but is not published: %v", i, kind, k.KeyID, err)
					}
				}
			}
		}
		w.db.Advance(t, 2*overlap)
		w.run(nil)
	}
}

func (w *world) generations() int {
	w.Helper()
	var n int
	w.must(w.admin.QueryRow(w.Context(), `SELECT count(*) FROM bundles`).Scan(&n))
	return n
}

// TestTheJobsRightsEndAtItsSecrets uses the roles as they are installed.
func TestTheJobsRightsEndAtItsSecrets(t *testing.T) {
	w := newWorld(t)
	w.run(nil)
	for name, namespace := range map[string]string{"node-ca-1": w.cfg.KeysNamespace, "other": w.cfg.TrustNamespace} {
		w.must(w.cluster.Client.Create(t.Context(), &corev1.Secret{ObjectMeta: objectMeta(namespace, name)}))
		if _, err := w.cfg.Secrets.Secrets(namespace).Get(t.Context(), name, getOptions); err == nil {
			t.Errorf("it may read %s", name)
		}
	}
	if _, err := w.cfg.Secrets.Secrets(w.cfg.KeysNamespace).List(t.Context(), listOptions); err == nil {
		t.Error("it may list")
	}
	if _, err := w.cfg.DB.Exec(t.Context(), `UPDATE bundles SET generation = 0`); err == nil {
		t.Error("it may change a generation")
	}
	if _, err := w.cfg.DB.Exec(t.Context(), `SELECT FROM join_tokens`); err == nil {
		t.Error("it may read tokens")
	}
}
