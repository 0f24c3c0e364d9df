package main

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/attestors/jointoken"
	"github.com/better-compute/join-operator/hack/controlplane"
	"github.com/better-compute/join-operator/joinsvc/httpapi"
	"github.com/better-compute/join-operator/joinsvc/keys"
	"github.com/better-compute/join-operator/test/kubetest"
	"github.com/better-compute/join-operator/test/machine"
	"github.com/better-compute/join-operator/test/pgtest"
)

const trustDomain = "test.join.example"

// world is an API server and a database with a tenant, in which replicas run with
// the rights that config/rbac gives them.
type world struct {
	*testing.T
	cluster      *kubetest.Cluster
	db           *pgtest.DB
	admin        *pgxpool.Pool
	keys, tenant string
	kubeconfig   string
	tls          string
	gateway      *http.Client
	log          *logs
}

// logs is what all replicas wrote.
type logs struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logs) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(b)
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

func newWorld(t *testing.T, cluster *kubetest.Cluster) *world {
	t.Helper()
	w := &world{T: t, cluster: cluster, db: pgtest.New(t), tls: t.TempDir(), log: &logs{}}
	w.admin = w.db.Pool(t, pgtest.Admin)
	cluster.ApplyFolder(t, "config/crd")
	w.keys, w.tenant = cluster.Namespace(t, nil), cluster.Namespace(t, map[string]string{v1alpha1.TenantLabel: v1alpha1.TenantLabelValue})
	user := "service-" + w.keys
	for _, o := range kubetest.Kustomize(t, "config/rbac") {
		if o.GetName() != "join-service" || o.GetKind() != "Role" && o.GetKind() != "ClusterRole" {
			continue
		}
		o.SetName(user)
		if o.GetKind() == "Role" {
			o.SetNamespace(w.keys)
		}
		w.must(cluster.Client.Create(t.Context(), o))
		subjects := []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: user}}
		ref := rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: o.GetKind(), Name: user}
		if o.GetKind() == "Role" {
			w.must(cluster.Client.Create(t.Context(), &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Namespace: w.keys, Name: user}, Subjects: subjects, RoleRef: ref}))
		} else {
			w.must(cluster.Client.Create(t.Context(), &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: user}, Subjects: subjects, RoleRef: ref}))
		}
	}
	w.kubeconfig = kubetest.Kubeconfig(t, cluster.As(t, user))
	w.exec(`INSERT INTO tenants (name, uid, state, root) VALUES ($1, 'u1', 'active', false), ('join-system', 'u0', 'active', true)`, w.tenant)
	w.pool("general", false)
	w.pool("guarded", true)
	w.mountTLS()
	return w
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

func (w *world) exec(sql string, args ...any) {
	w.Helper()
	_, err := w.admin.Exec(context.Background(), sql, args...)
	w.must(err)
}

func (w *world) pool(name string, approval bool) {
	w.Helper()
	w.exec(`INSERT INTO pools (tenant, name, lifetime, ramdisk_lifetime, on_conflict, require_approval, object_uid, object_generation)
	  VALUES ($1, $2, '168h', '24h', 'Hold', $3, gen_random_uuid()::text, 1)`, w.tenant, name, approval)
}

// token makes a token's rows and returns its text.
func (w *world) token(pool string, uses int) string {
	w.Helper()
	token := jointoken.Generate()
	hash := token.SecretSHA256(w.tenant)
	w.exec(`INSERT INTO join_tokens (id, tenant, name, object_uid, secret_sha256, role, pool, uses) VALUES ($1, $2, $1, $1, $3, 'node', $4, $5)`, token.ID, w.tenant, hash[:], pool, uses)
	w.exec(`INSERT INTO join_token_slots (token_id, slot, uses_left) VALUES ($1, 0, $2)`, token.ID, uses)
	return token.Text()
}

// pair is a certificate and its key.
type pair struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func (w *world) certificate(by *pair, edit func(*x509.Certificate)) *pair {
	w.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	w.must(err)
	p := &pair{key: key}
	w.sign(p, by, edit)
	return p
}

// sign gives a key a (new) certificate.
func (w *world) sign(p, by *pair, edit func(*x509.Certificate)) {
	w.Helper()
	template := &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(1, 0, 0)}
	edit(template)
	parent, key := template, p.key
	if by != nil {
		parent, key = by.cert, by.key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, p.key.Public(), key)
	w.must(err)
	p.cert, err = x509.ParseCertificate(der)
	w.must(err)
}

func ca(name string) func(*x509.Certificate) {
	return func(c *x509.Certificate) {
		c.Subject, c.IsCA, c.BasicConstraintsValid, c.KeyUsage = pkix.Name{CommonName: name}, true, true, x509.KeyUsageCertSign|x509.KeyUsageCRLSign
	}
}

func (p *pair) pem(tb testing.TB) (cert, key []byte) {
	tb.Helper()
	pkcs8, err := x509.MarshalPKCS8PrivateKey(p.key)
	if err != nil {
		tb.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: p.cert.Raw}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8})
}

// mountTLS writes the service's certificate and makes the gateway's client.
func (w *world) mountTLS() {
	w.Helper()
	internal := w.certificate(nil, ca("internal"))
	server := w.certificate(internal, func(c *x509.Certificate) {
		c.IPAddresses, c.ExtKeyUsage = []net.IP{net.IPv4(127, 0, 0, 1)}, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	})
	gateway := w.certificate(internal, func(c *x509.Certificate) {
		c.URIs, c.ExtKeyUsage = []*url.URL{{Scheme: "spiffe", Host: trustDomain, Path: "/system/gateway"}}, []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	})
	cert, key := server.pem(w)
	root, _ := internal.pem(w)
	for name, b := range map[string][]byte{"tls.crt": cert, "tls.key": key, "ca.crt": root} {
		w.must(os.WriteFile(filepath.Join(w.tls, name), b, 0o600))
	}
	roots := x509.NewCertPool()
	roots.AddCert(internal.cert)
	transport := &http.Transport{MaxIdleConnsPerHost: 32, TLSClientConfig: &tls.Config{
		RootCAs: roots, MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{{Certificate: [][]byte{gateway.cert.Raw}, PrivateKey: gateway.key}},
	}}
	w.Cleanup(transport.CloseIdleConnections)
	w.gateway = &http.Client{Transport: transport, Timeout: 20 * time.Second}
}

// secretOf writes a CA's Secret as cert-manager does.
func (w *world) secretOf(name string, p *pair) {
	w.Helper()
	cert, key := p.pem(w)
	s := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.keys, Name: name}, Type: corev1.SecretTypeTLS, Data: map[string][]byte{"tls.crt": cert, "tls.key": key}}
	err := w.cluster.Client.Update(w.Context(), s)
	if client.IgnoreNotFound(err) == nil && err != nil {
		err = w.cluster.Client.Create(w.Context(), s)
	}
	w.must(err)
}

// rotate runs the keys job.
func (w *world) rotate(edit func(*keys.Config)) {
	w.Helper()
	secrets, err := corev1client.NewForConfig(w.cluster.Admin())
	w.must(err)
	tlsCA, _ := w.certificate(nil, ca("tls")).pem(w)
	cfg := keys.Config{
		DB: w.db.Pool(w.T, pgtest.Keys), Secrets: secrets, KeysNamespace: w.keys, TrustNamespace: w.keys, SystemNamespace: "join-system", TrustDomain: trustDomain,
		Endpoints: []string{"https://join.example"}, TLSCA: tlsCA, Overlap: time.Hour, MaxAge: 24 * time.Hour, BundleMaxAge: 24 * time.Hour,
		Wait: 30 * time.Second, Logger: slog.New(slog.DiscardHandler),
	}
	if edit != nil {
		edit(&cfg)
	}
	_, err = keys.Rotate(w.Context(), cfg)
	w.must(err)
}

// process is a replica that runs in this process.
type process struct {
	url, ops string
	stop     func() error
}

func (w *world) start(name string) *process {
	w.Helper()
	ports, err := controlplane.FreePorts(2)
	w.must(err)
	o, err := parse([]string{
		"--kubeconfig", w.kubeconfig, "--database-url", w.db.URL(pgtest.Service), "--keys-namespace", w.keys, "--trust-domain", trustDomain,
		"--listen", fmt.Sprintf("127.0.0.1:%d", ports[0]), "--metrics-listen", fmt.Sprintf("127.0.0.1:%d", ports[1]), "--tls-dir", w.tls, "--replica-id", name,
	})
	w.must(err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- run(ctx, o, slog.New(httpapi.LogHandler(slog.NewJSONHandler(w.log, nil)))) }()
	p := &process{url: "https://" + o.listen, ops: "http://" + o.metricsListen}
	p.stop = sync.OnceValue(func() error { cancel(); return <-done })
	w.Cleanup(func() {
		if err := p.stop(); err != nil {
			w.Error(err)
		}
	})
	return p
}

// probe is what /readyz says where it may say why.
func (p *process) probe() (int, string) {
	resp, err := http.Get(p.ops + "/readyz")
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(body)
}

func (w *world) ready(p *process) {
	w.Helper()
	kubetest.Eventually(w.T, "readiness", func(context.Context) error {
		if status, why := p.probe(); status != http.StatusOK {
			return fmt.Errorf("%d %s", status, why)
		}
		return nil
	})
}

// target is what machines know, read from a replica.
func (w *world) target(p *process) *machine.Target {
	w.Helper()
	var t *machine.Target
	kubetest.Eventually(w.T, "the bundle", func(context.Context) error {
		resp, err := w.gateway.Get(p.url + wire.PathBundle)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		bundle, err := io.ReadAll(resp.Body)
		if err != nil {
			return err
		}
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("%d %s", resp.StatusCode, bundle)
		}
		root, _ := w.certificate(nil, ca("unused")).pem(w)
		t, err = machine.NewTarget(p.url, root, bundle)
		return err
	})
	return t
}

// join sends one join by way of the gateway's connection.
func (w *world) join(t *machine.Target, p *process, m *machine.Machine, token string) (*wire.Answer, error) {
	env, err := t.Envelope(m, "", wire.RoleNode, &wire.Sealed{Token: token})
	if err != nil {
		return nil, err
	}
	body, err := json.Marshal(env)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequest(http.MethodPost, p.url+wire.PathJoin, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("X-Forwarded-For", "192.0.2.7")
	resp, err := w.gateway.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		e := &machine.ProblemError{Header: resp.Header}
		if err := json.Unmarshal(answer, &e.Problem); err != nil {
			return nil, fmt.Errorf("%d %q: %w", resp.StatusCode, answer, err)
		}
		return nil, e
	}
	return t.Verify(answer, m)
}

func newMachine(tb testing.TB) *machine.Machine {
	tb.Helper()
	m, err := machine.New()
	if err != nil {
		tb.Fatal(err)
	}
	return m
}

// TestAReplicaFromNothingToAJoin follows readiness, a join, a repetition over
// another replica, a wait, a confirmation, the list of revoked certificates, and
// what the log says of it all.
func TestAReplicaFromNothingToAJoin(t *testing.T) {
	w := newWorld(t, kubetest.Shared(t))
	one, two := w.start("one"), w.start("two")
	kubetest.Eventually(t, "a reason not to be ready", func(context.Context) error {
		if status, why := one.probe(); status != http.StatusServiceUnavailable || !strings.Contains(why, "keys job") {
			return fmt.Errorf("%d %s", status, why)
		}
		return nil
	})
	w.rotate(func(c *keys.Config) { c.KeysOnly = true })
	kubetest.Eventually(t, "the CA's lack", func(context.Context) error {
		if status, why := one.probe(); status != http.StatusServiceUnavailable || !strings.Contains(why, "node-ca-1") {
			return fmt.Errorf("%d %s", status, why)
		}
		return nil
	})
	w.secretOf("node-ca-1", w.certificate(nil, ca("node-ca-1")))
	w.ready(one)
	w.ready(two)
	w.rotate(nil)
	target := w.target(one)
	w.target(two)

	token := w.token("general", 1)
	m := newMachine(t)
	first, err := w.join(target, one, m, token)
	w.must(err)
	again, err := w.join(target, two, m, token)
	w.must(err)
	if first.Outcome != wire.OutcomeJoined || first.Certificates[0] != again.Certificates[0] || first.NodeID != again.NodeID || first.BundleSHA256 == "" {
		t.Errorf("joined as %+v, then as %+v", first, again)
	}
	leaf, err := machine.Leaf(first)
	w.must(err)
	if want := fmt.Sprintf("spiffe://%s/tenant/%s/node/%s", trustDomain, w.tenant, first.NodeID); leaf.URIs[0].String() != want {
		t.Errorf("the leaf says %v", leaf.URIs)
	}
	confirmation, err := m.Confirmation(leaf.Raw)
	w.must(err)
	body, err := json.Marshal(confirmation)
	w.must(err)
	for range 2 {
		resp, err := w.gateway.Post(two.url+wire.PathConfirm, wire.MediaTypeJSON, bytes.NewReader(body))
		w.must(err)
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusNoContent {
			t.Errorf("the confirmation is answered %d", resp.StatusCode)
		}
	}

	// Spent: refused, at a multiple of the pace.
	begun := time.Now()
	_, err = w.join(target, one, newMachine(t), token)
	var p *machine.ProblemError
	if !errors.As(err, &p) || p.Code != wire.AccessDenied || time.Since(begun) < wire.RefusalPace {
		t.Errorf("with a spent token: %v after %v", err, time.Since(begun))
	}
	kubetest.Eventually(t, "the refusal's event", func(ctx context.Context) error {
		var reason string
		return w.admin.QueryRow(ctx, `SELECT data->>'reason' FROM events WHERE type = 'security.join.refused' AND tenant = $1`, w.tenant).Scan(&reason)
	})

	// Another waits: its object is made.
	guarded := w.token("guarded", 1)
	wait, err := w.join(target, two, newMachine(t), guarded)
	w.must(err)
	if wait.Outcome != wire.OutcomePending || wait.RetryAfterSeconds < 15 {
		t.Errorf("waits as %+v", wait)
	}
	// The replica tries once, for a second; what an API server under load misses is
	// the manager's to make, so another machine may be the first with an object.
	kubetest.Eventually(t, "a JoinRequest", func(ctx context.Context) error {
		for range 20 {
			if w.cluster.Client.Get(ctx, client.ObjectKey{Namespace: w.tenant, Name: wait.JoinRequest}, &v1alpha1.JoinRequest{}) == nil {
				return nil
			}
			time.Sleep(50 * time.Millisecond)
		}
		var err error
		if wait, err = w.join(target, two, newMachine(t), w.token("guarded", 1)); err != nil {
			return err
		}
		return errors.New("it is not there")
	})

	w.exec(`UPDATE node_certs SET revoked_at = join_now(), revocation = 'retired' WHERE serial = $1`, leaf.SerialNumber.Bytes())
	kubetest.Eventually(t, "the revoked certificate in the list", func(context.Context) error {
		resp, err := w.gateway.Get(one.url + wire.PathCRL)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		der, err := io.ReadAll(resp.Body)
		if err != nil {
			return err
		}
		list, err := x509.ParseRevocationList(der)
		if err != nil {
			return err
		}
		if len(list.RevokedCertificateEntries) != 1 || list.RevokedCertificateEntries[0].SerialNumber.Cmp(leaf.SerialNumber) != 0 {
			return fmt.Errorf("%d entries", len(list.RevokedCertificateEntries))
		}
		return nil
	})
	resp, err := http.Get(one.ops + "/metrics")
	w.must(err)
	metrics, err := io.ReadAll(resp.Body)
	w.must(err)
	_ = resp.Body.Close()

	w.must(one.stop())
	w.must(two.stop())
	var left int
	w.must(w.admin.QueryRow(t.Context(), `SELECT count(*) FROM replicas`).Scan(&left))
	if left != 0 {
		t.Errorf("%d replicas did not sign off", left)
	}
	text := w.log.String() + string(metrics)
	for _, secret := range []string{token, guarded, strings.Split(token, "_")[2], strings.Split(guarded, "_")[2], base64.StdEncoding.EncodeToString(m.CSR)} {
		if strings.Contains(text, secret) {
			t.Errorf("the log or the metrics hold %q", secret)
		}
	}
	for _, said := range []string{`"request_id"`, `"answered a join"`, first.NodeID, "join-token:", "join_http_requests_total", "join_node_ca_signing"} {
		if !strings.Contains(text, said) {
			t.Errorf("neither the log nor the metrics say %q", said)
		}
	}
}

// TestTheCAChangesUnderLoad renews the CA (the same key), lets the next one take
// over, and takes the first away, while machines join over two replicas.
func TestTheCAChangesUnderLoad(t *testing.T) {
	w := newWorld(t, kubetest.Shared(t))
	w.rotate(func(c *keys.Config) { c.KeysOnly = true })
	first := w.certificate(nil, ca("node-ca-1"))
	w.secretOf("node-ca-1", first)
	replicas := []*process{w.start("one"), w.start("two")}
	for _, p := range replicas {
		w.ready(p)
	}
	w.rotate(nil)
	target := w.target(replicas[0])
	token := w.token("general", 100_000)

	// signers has the last issuer that each replica signed with.
	var signers [2]atomic.Pointer[string]
	var joined atomic.Int64
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for i, p := range replicas {
		for range 3 {
			wg.Go(func() {
				for ctx.Err() == nil {
					a, err := w.join(target, p, newMachine(t), token)
					if err != nil {
						t.Errorf("a join in between: %v", err)
						return
					}
					issuer, err := verify(a)
					if err != nil {
						t.Error(err)
						return
					}
					signers[i].Store(&issuer)
					joined.Add(1)
				}
			})
		}
	}
	signedBy := func(c *pair) {
		t.Helper()
		want := string(c.cert.Raw)
		begun := time.Now()
		kubetest.Eventually(t, "the new certificate", func(context.Context) error {
			for i := range signers {
				if got := signers[i].Load(); got == nil || *got != want {
					return fmt.Errorf("replica %d signs with another", i+1)
				}
			}
			return nil
		})
		if took := time.Since(begun); took > 10*time.Second {
			t.Errorf("it took %v", took)
		}
	}
	signedBy(first)
	w.sign(first, nil, ca("node-ca-1"))
	w.secretOf("node-ca-1", first)
	signedBy(first)
	second := w.certificate(nil, ca("node-ca-2"))
	w.secretOf("node-ca-2", second)
	signedBy(second)
	w.must(w.cluster.Client.Delete(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.keys, Name: "node-ca-1"}}))
	enough := joined.Load() + 20
	kubetest.Eventually(t, "more joins", func(context.Context) error {
		if n := joined.Load(); n < enough && !t.Failed() {
			return fmt.Errorf("%d of %d", n, enough)
		}
		return nil
	})
	cancel()
	wg.Wait()
	t.Logf("%d machines joined", joined.Load())
	// Both are published, and both have their list.
	w.rotate(nil)
	kubetest.Eventually(t, "both CAs in the bundle", func(context.Context) error {
		for _, p := range replicas {
			if n := strings.Count(w.target(p).Bundle.NodeCAs, "BEGIN"); n != 2 {
				return fmt.Errorf("%d CAs", n)
			}
		}
		return nil
	})
}

// verify verifies an answer's leaf under the issuer sent with it, and returns that.
func verify(a *wire.Answer) (issuer string, err error) {
	leaf, err := machine.Leaf(a)
	if err != nil {
		return "", err
	}
	der, err := wire.DecodeBase64(a.Certificates[1])
	if err != nil {
		return "", err
	}
	c, err := x509.ParseCertificate(der)
	if err != nil {
		return "", err
	}
	return string(der), leaf.CheckSignatureFrom(c)
}

// TestJoinsGoOnWithoutTheAPIServer also starts nothing anew: a replica that runs
// needs Kubernetes only for what changes.
func TestJoinsGoOnWithoutTheAPIServer(t *testing.T) {
	t.Parallel()
	w := newWorld(t, kubetest.Start(t))
	w.rotate(func(c *keys.Config) { c.KeysOnly = true })
	w.secretOf("node-ca-1", w.certificate(nil, ca("node-ca-1")))
	p := w.start("one")
	w.ready(p)
	w.rotate(nil)
	target := w.target(p)
	w.cluster.StopAPIServer()
	token := w.token("general", 10)
	for range 10 {
		if _, err := w.join(target, p, newMachine(t), token); err != nil {
			t.Fatal(err)
		}
	}
	wait, err := w.join(target, p, newMachine(t), w.token("guarded", 1))
	if err != nil || wait.Outcome != wire.OutcomePending {
		t.Errorf("one that waits: %+v, %v", wait, err)
	}
}

// TestAReplicaThatEndsFinishesItsJoins holds a join up in the database, ends the
// replica, and lets the join go on.
func TestAReplicaThatEndsFinishesItsJoins(t *testing.T) {
	w := newWorld(t, kubetest.Shared(t))
	w.rotate(func(c *keys.Config) { c.KeysOnly = true })
	w.secretOf("node-ca-1", w.certificate(nil, ca("node-ca-1")))
	p := w.start("one")
	w.ready(p)
	w.rotate(nil)
	target := w.target(p)
	token := w.token("general", 1)
	hold, err := w.admin.Begin(t.Context())
	w.must(err)
	defer func() { _ = hold.Rollback(context.Background()) }()
	_, err = hold.Exec(t.Context(), `SELECT FROM join_token_slots FOR UPDATE`)
	w.must(err)
	joined := make(chan error, 1)
	go func() {
		a, err := w.join(target, p, newMachine(t), token)
		if err == nil && a.Outcome != wire.OutcomeJoined {
			err = fmt.Errorf("answered %s", a.Outcome)
		}
		joined <- err
	}()
	kubetest.Eventually(t, "the join's wait", func(ctx context.Context) error {
		var waiting int
		if err := w.admin.QueryRow(ctx, `SELECT count(*) FROM pg_locks WHERE NOT granted`).Scan(&waiting); err != nil {
			return err
		}
		if waiting == 0 {
			return errors.New("nobody waits")
		}
		return nil
	})
	ended := make(chan error, 1)
	go func() { ended <- p.stop() }()
	kubetest.Eventually(t, "the end of readiness", func(context.Context) error {
		if status, why := p.probe(); status != http.StatusServiceUnavailable || !strings.Contains(why, "ending") {
			return fmt.Errorf("%d %s", status, why)
		}
		return nil
	})
	select {
	case err := <-joined:
		t.Fatalf("the join did not wait: %v", err)
	case err := <-ended:
		t.Fatalf("the replica did not wait for its join: %v", err)
	default:
	}
	w.must(hold.Rollback(t.Context()))
	w.must(<-joined)
	w.must(<-ended)
}

func TestAMisconfiguredReplicaSaysSo(t *testing.T) {
	for name, args := range map[string][]string{
		"no database":       {"--trust-domain", "x", "--tls-dir", "x"},
		"two databases":     {"--trust-domain", "x", "--tls-dir", "x", "--database-url", "x", "--database-url-file", "x"},
		"no trust domain":   {"--tls-dir", "x", "--database-url", "x"},
		"no certificate":    {"--trust-domain", "x", "--database-url", "x"},
		"an argument":       {"--trust-domain", "x", "--tls-dir", "x", "--database-url", "x", "y"},
		"an unknown flag":   {"--no-such-flag"},
		"a file that lacks": {"--trust-domain", "x", "--tls-dir", "x", "--database-url-file", "/no/such/file"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := parse(args); err == nil {
				t.Error("no error")
			}
		})
	}
}

// TestADatabaseThatForgetsIsRefused lets no replica run on synchronous_commit=off.
func TestADatabaseThatForgetsIsRefused(t *testing.T) {
	w := newWorld(t, kubetest.Shared(t))
	w.exec(`ALTER ROLE join_service IN DATABASE ` + strings.TrimPrefix(mustURL(t, w.db.URL(pgtest.Service)).Path, "/") + ` SET synchronous_commit = off`)
	ports, err := controlplane.FreePorts(2)
	w.must(err)
	o, err := parse([]string{
		"--kubeconfig", w.kubeconfig, "--database-url", w.db.URL(pgtest.Service), "--keys-namespace", w.keys, "--trust-domain", trustDomain,
		"--listen", fmt.Sprintf("127.0.0.1:%d", ports[0]), "--metrics-listen", fmt.Sprintf("127.0.0.1:%d", ports[1]), "--tls-dir", w.tls,
	})
	w.must(err)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if err := run(ctx, o, slog.New(slog.DiscardHandler)); err == nil || ctx.Err() != nil || !strings.Contains(err.Error(), "synchronous_commit") {
		t.Errorf("it ended with %v", err)
	}
}

func mustURL(t *testing.T, text string) *url.URL {
	t.Helper()
	u, err := url.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return u
}
