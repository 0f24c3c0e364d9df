package joinsvc_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hpke"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net/netip"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/attestors"
	"github.com/better-compute/join-operator/attestors/jointoken"
	"github.com/better-compute/join-operator/joinsvc"
	"github.com/better-compute/join-operator/joinsvc/keyring"
	"github.com/better-compute/join-operator/joinsvc/pki"
	"github.com/better-compute/join-operator/joinsvc/rows"
	"github.com/better-compute/join-operator/joinsvc/secrets"
	"github.com/better-compute/join-operator/test/pgtest"
)

const (
	tenant      = "factory"
	rootTenant  = "join-system"
	trustDomain = "test.join.example"
)

var here = netip.MustParseAddr("192.0.2.7")

// system is a database with a tenant and a pool, and what its services share.
type system struct {
	testing.TB
	db        *pgtest.DB
	admin     *pgxpool.Pool
	authority *pki.Authority
	keys      *keyring.Keyring
	kid       string
	sealTo    hpke.PublicKey
	log       *slog.Logger
}

func newSystem(tb testing.TB, opts ...pgtest.Option) *system {
	tb.Helper()
	s := &system{TB: tb, db: pgtest.New(tb, opts...), log: slog.New(slog.DiscardHandler)}
	s.admin = s.db.Pool(tb, pgtest.Admin)
	s.authority = pki.NewAuthority(s.log)
	s.authority.Load(secrets.Snapshot{"node-ca-1": newCA(tb)})
	s.loadKeys()
	s.exec(`INSERT INTO tenants (name, uid, state, root) VALUES ($1, 'uid-1', 'active', false), ($2, 'uid-0', 'active', true)`, tenant, rootTenant)
	s.pool("general", false)
	return s
}

func newCA(tb testing.TB) map[string][]byte {
	tb.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		tb.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "node-ca-1"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(10 * 365 * 24 * time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		tb.Fatal(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		tb.Fatal(err)
	}
	return map[string][]byte{
		"tls.crt": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		"tls.key": pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8}),
	}
}

func (s *system) loadKeys() {
	s.Helper()
	snapshot := secrets.Snapshot{}
	for secret, algorithm := range map[string]keyring.Algorithm{
		keyring.SigningSecret: keyring.Ed25519, keyring.SealingSecret: keyring.MLKEM768X25519, keyring.ChallengeSecret: keyring.AES256GCM,
	} {
		k, err := keyring.NewKey(algorithm, time.Now())
		s.must(err)
		k.UseFrom = time.Now().Add(-time.Minute)
		if algorithm == keyring.MLKEM768X25519 {
			public, err := k.HPKEPublic()
			s.must(err)
			s.kid = k.KeyID
			s.sealTo, err = hpke.MLKEM768X25519().NewPublicKey(public)
			s.must(err)
		}
		raw, err := (&keyring.File{Keys: []keyring.Key{k}}).Marshal()
		s.must(err)
		snapshot[secret] = map[string][]byte{keyring.Item: raw}
	}
	s.keys = keyring.New(s.log, nil)
	s.keys.Load(snapshot)
}

func (s *system) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

func (s *system) exec(sql string, args ...any) {
	s.Helper()
	if _, err := s.admin.Exec(context.Background(), sql, args...); err != nil {
		s.Fatalf("%s: %v", sql, err)
	}
}

// one reads a single value.
func one[T any](s *system, sql string, args ...any) T {
	s.Helper()
	var v T
	if err := s.admin.QueryRow(context.Background(), sql, args...).Scan(&v); err != nil {
		s.Fatalf("%s: %v", sql, err)
	}
	return v
}

func (s *system) pool(name string, requireApproval bool) {
	s.Helper()
	s.exec(`INSERT INTO pools (tenant, name, lifetime, ramdisk_lifetime, on_conflict, require_approval, object_uid, object_generation)
	  VALUES ($1, $2, '168h', '24h', 'Hold', $3, gen_random_uuid()::text, 1)`, tenant, name, requireApproval)
}

// issued is a token as its machine and its row have it.
type issued struct{ id, text string }

type tokenOption func(*tokenRow)

type tokenRow struct {
	tenant, pool, role, site string
	uses                     int
	expiresIn                time.Duration
	expect                   *attestors.Expect
	allowReclaim             bool
}

func (s *system) token(opts ...tokenOption) issued {
	s.Helper()
	row := tokenRow{tenant: tenant, pool: "general", role: "node", uses: 1}
	for _, o := range opts {
		o(&row)
	}
	t := jointoken.Generate()
	hash := t.SecretSHA256(row.tenant)
	var expires *time.Duration
	if row.expiresIn != 0 {
		expires = &row.expiresIn
	}
	s.exec(`INSERT INTO join_tokens (id, tenant, name, object_uid, secret_sha256, role, pool, site, uses, expires_at, expect, allow_reclaim)
	  VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, join_now() + $10::interval, $11, $12)`,
		t.ID, row.tenant, "token-"+t.ID, "uid-"+t.ID, hash[:], row.role, row.pool, row.site, row.uses, expires, row.expect, row.allowReclaim)
	slots := min(row.uses, 64)
	s.exec(`INSERT INTO join_token_slots (token_id, slot, uses_left)
	  SELECT $1, i, $2::integer / $3::integer + CASE WHEN i < $2::integer % $3::integer THEN 1 ELSE 0 END FROM generate_series(0, $3::integer - 1) AS i`, t.ID, row.uses, slots)
	return issued{t.ID, t.Text()}
}

func uses(n int) tokenOption                   { return func(t *tokenRow) { t.uses = n } }
func intoPool(name string) tokenOption         { return func(t *tokenRow) { t.pool = name } }
func forRole(role string) tokenOption          { return func(t *tokenRow) { t.role = role } }
func atSite(site string) tokenOption           { return func(t *tokenRow) { t.site = site } }
func expiring(in time.Duration) tokenOption    { return func(t *tokenRow) { t.expiresIn = in } }
func expecting(e attestors.Expect) tokenOption { return func(t *tokenRow) { t.expect = &e } }
func reclaiming() tokenOption                  { return func(t *tokenRow) { t.allowReclaim = true } }

func (s *system) usesLeft(t issued) int {
	s.Helper()
	return one[int](s, `SELECT coalesce(sum(uses_left), 0)::integer FROM join_token_slots WHERE token_id = $1`, t.id)
}

// replica is one service of a system.
type replica struct {
	*joinsvc.Service
	sys     *system
	pool    *pgxpool.Pool
	metrics *prometheus.Registry
}

type serviceOption func(*joinsvc.Config)

// replica starts a service with connections of its own; it ends with the test.
func (s *system) replica(opts ...serviceOption) *replica {
	s.Helper()
	pool, err := rows.Open(context.Background(), s.db.URL(pgtest.Service), rows.Options{MaxConns: 16})
	s.must(err)
	registry, err := attestors.NewRegistry(jointoken.New())
	s.must(err)
	metrics := prometheus.NewRegistry()
	cfg := joinsvc.Config{
		DB: pool, Attestors: registry, Issuer: s.authority, Keys: s.keys, TrustDomain: trustDomain, RootTenant: rootTenant, Logger: s.log, Metrics: metrics,
	}
	for _, o := range opts {
		o(&cfg)
	}
	service, err := joinsvc.New(cfg)
	s.must(err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- service.Run(ctx) }()
	s.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			s.Error(err)
		}
		cfg.DB.Close()
	})
	return &replica{service, s, cfg.DB, metrics}
}

func withAttestors(list ...any) serviceOption {
	return func(c *joinsvc.Config) {
		r, err := attestors.NewRegistry(jointoken.New(), list...)
		if err != nil {
			panic(err)
		}
		c.Attestors = r
	}
}

// machine is a key and its one CSR.
type machine struct {
	key    *ecdsa.PrivateKey
	csr    []byte
	claims wire.Claims
}

func newMachine(tb testing.TB) *machine {
	tb.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		tb.Fatal(err)
	}
	m := &machine{key: key}
	m.csr, err = x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		tb.Fatal(err)
	}
	return m
}

// again is another CSR of the same key.
func (m *machine) again(tb testing.TB) *machine {
	tb.Helper()
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: rand.Text()}}, m.key)
	if err != nil {
		tb.Fatal(err)
	}
	return &machine{m.key, csr, m.claims}
}

// publicKeySHA256 is the hash of the key's SubjectPublicKeyInfo.
func (m *machine) publicKeySHA256() string {
	der, err := x509.MarshalPKIXPublicKey(m.key.Public())
	if err != nil {
		panic(err)
	}
	sum := sha256.Sum256(der)
	return hex.EncodeToString(sum[:])
}

// envelope seals what is secret as a machine does.
func (s *system) envelope(m *machine, attestor string, role wire.Role, sealed *wire.Sealed) *wire.Join {
	s.Helper()
	sealed.Claims = m.claims
	plaintext, err := json.Marshal(sealed)
	s.must(err)
	return &wire.Join{Attestor: attestor, Role: role, CSR: m.csr, KeyID: s.kid, HasSealed: true, Sealed: s.seal(wire.SealAAD(attestor, role, m.csr), plaintext)}
}

func (s *system) seal(aad, plaintext []byte) []byte {
	s.Helper()
	enc, sender, err := hpke.NewSender(s.sealTo, hpke.HKDFSHA256(), hpke.ChaCha20Poly1305(), []byte(wire.SealInfo))
	s.must(err)
	ciphertext, err := sender.Seal(aad, plaintext)
	s.must(err)
	return append(enc, ciphertext...)
}

func (r *replica) token(m *machine, t issued) (*wire.Answer, error) {
	return r.Join(context.Background(), r.sys.envelope(m, "", wire.RoleNode, &wire.Sealed{Token: t.text}), here)
}

// joins joins or fails the test.
func (r *replica) joins(m *machine, t issued) *wire.Answer {
	r.sys.Helper()
	a, err := r.token(m, t)
	if err != nil {
		r.sys.Fatalf("join: %v", err)
	}
	if a.Outcome != wire.OutcomeJoined {
		r.sys.Fatalf("the join was answered %q", a.Outcome)
	}
	return a
}

// refusal fails the test unless err is a refusal for that reason.
func refusal(tb testing.TB, err error, reason string) *joinsvc.RefusedJoin {
	tb.Helper()
	var r *joinsvc.RefusedJoin
	if !errors.As(err, &r) {
		tb.Fatalf("got %v, want a refusal for %q", err, reason)
	}
	if r.Reason() != reason {
		tb.Fatalf("refused for %q (%s), want %q", r.Reason(), r.Refusal.Detail, reason)
	}
	return r
}

// problem fails the test unless err is a problem of that code.
func problem(tb testing.TB, err error, code wire.Code) *joinsvc.Problem {
	tb.Helper()
	var p *joinsvc.Problem
	if !errors.As(err, &p) || p.Code != code {
		tb.Fatalf("got %v, want %s", err, code)
	}
	return p
}

// writesNothing fails the test if f takes a transaction id each time, as every
// write does. Once without is enough: ids are the server's, and others write too.
func (s *system) writesNothing(what string, f func()) {
	s.Helper()
	next := func() string { return one[string](s, `SELECT pg_snapshot_xmax(pg_current_snapshot())::text`) }
	for range 50 {
		before := next()
		f()
		if next() == before {
			return
		}
	}
	s.Errorf("%s wrote something, 50 times in a row", what)
}

// eventually polls until a condition holds.
func eventually(tb testing.TB, what string, holds func() bool) {
	tb.Helper()
	deadline := time.Now().Add(15 * time.Second)
	for !holds() {
		if time.Now().After(deadline) {
			tb.Fatalf("not within 15 s: %s", what)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func leafOf(tb testing.TB, a *wire.Answer) *x509.Certificate {
	tb.Helper()
	der, err := wire.DecodeBase64(a.Certificates[0])
	if err != nil {
		tb.Fatal(err)
	}
	c, err := x509.ParseCertificate(der)
	if err != nil {
		tb.Fatal(err)
	}
	return c
}

func hexSum(b []byte) string { return fmt.Sprintf("%x", sha256.Sum256(b)) }

func sum(b []byte) []byte {
	h := sha256.Sum256(b)
	return h[:]
}

func (m *machine) csrSum() []byte { return sum(m.csr) }

// csrLock is the key of the advisory lock on the machine's CSR.
func (m *machine) csrLock() int64 { return int64(binary.BigEndian.Uint64(m.csrSum()[:8])) }
