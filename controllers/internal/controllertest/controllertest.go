// Package controllertest runs controllers against a real API server, its
// namespace and garbage collection controllers, and a real database.
package controllertest

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/jackc/pgx/v5/pgxpool"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	crlog "sigs.k8s.io/controller-runtime/pkg/log"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/controllers/outbox"
	"github.com/better-compute/join-operator/hack/controlplane"
	"github.com/better-compute/join-operator/test/child"
	"github.com/better-compute/join-operator/test/pgtest"
)

// Timeout is how long Eventually waits: far longer than anything takes.
const Timeout = 60 * time.Second

// Cluster is the API server of a test binary.
type Cluster struct {
	Config *rest.Config
	Scheme *runtime.Scheme
	// Client reads and writes without a cache, as an administrator.
	Client client.Client
}

var started = sync.OnceValues(func() (*Cluster, error) {
	crlog.SetLogger(logr.Discard())
	apiserver, err := controlplane.Binary("kube-apiserver")
	if err != nil {
		return nil, err
	}
	root, err := controlplane.RepositoryRoot()
	if err != nil {
		return nil, err
	}
	environment := &envtest.Environment{
		BinaryAssetsDirectory: filepath.Dir(apiserver),
		CRDDirectoryPaths:     []string{filepath.Join(root, "config", "crd", "bases")},
		ErrorIfCRDPathMissing: true,
	}
	config, err := environment.Start()
	if err != nil {
		return nil, err
	}
	stop = append(stop, func() { _ = environment.Stop() })
	config.QPS, config.Burst = 500, 1000
	scheme := runtime.NewScheme()
	if err := clientgoscheme.AddToScheme(scheme); err != nil {
		return nil, err
	}
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	c, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		return nil, err
	}
	if err := startControllers(environment.KubeConfig); err != nil {
		return nil, err
	}
	return &Cluster{Config: config, Scheme: scheme, Client: c}, nil
})

// stop holds what Main ends.
var stop []func()

// startControllers starts kube-controller-manager: without it namespaces are
// never deleted and owned objects never collected.
func startControllers(kubeconfig []byte) error {
	path, err := controlplane.Binary("kube-controller-manager")
	if err != nil {
		return err
	}
	dir, err := child.TempDir("join-controllers-", nil)
	if err != nil {
		return err
	}
	config := filepath.Join(dir, "kubeconfig")
	if err := os.WriteFile(config, kubeconfig, 0o600); err != nil {
		return err
	}
	ports, err := controlplane.FreePorts(1)
	if err != nil {
		return err
	}
	p, err := child.Start(child.Command{Path: path, Log: filepath.Join(dir, "log"), Args: []string{
		"--kubeconfig", config, "--authentication-skip-lookup", "--leader-elect=false",
		"--controllers", "namespace-controller,garbage-collector-controller",
		"--secure-port", fmt.Sprint(ports[0]), "--bind-address", "127.0.0.1", "--cert-dir", dir,
	}})
	if err != nil {
		return err
	}
	stop = append(stop, func() { p.Stop(); _ = child.RemoveDir(dir) })
	return nil
}

// Main runs a test binary's tests and ends its servers: call it from TestMain.
func Main(m *testing.M) {
	code := m.Run()
	for i := len(stop) - 1; i >= 0; i-- {
		stop[i]()
	}
	os.Exit(code)
}

// Env is one test's world: the binary's API server and a database of its own.
type Env struct {
	*Cluster
	DB *pgtest.DB
	// Admin may do anything in the database; Manager is what controllers use.
	Admin, Manager *pgxpool.Pool
	tb             testing.TB
}

// New makes the world of a test.
func New(tb testing.TB) *Env {
	tb.Helper()
	c, err := started()
	if err != nil {
		tb.Fatal(err)
	}
	db := pgtest.New(tb)
	return &Env{Cluster: c, DB: db, Admin: db.Pool(tb, pgtest.Admin), Manager: db.Pool(tb, pgtest.Manager), tb: tb}
}

// Run starts a manager with the controllers that add puts into it, and returns
// what stops it, as it stops at the test's end at the latest.
func (e *Env) Run(add func(mgr ctrl.Manager, feed *outbox.Feed) error) (stopManager func()) {
	e.tb.Helper()
	mgr, err := ctrl.NewManager(e.Config, ctrl.Options{
		Scheme: e.Scheme, Metrics: metricsserver.Options{BindAddress: "0"}, Logger: logr.Discard(),
	})
	if err != nil {
		e.tb.Fatal(err)
	}
	feed := outbox.NewFeed(e.Manager, outbox.Options{Poll: 200 * time.Millisecond, Logger: Logger(e.tb)})
	if err := add(mgr, feed); err != nil {
		e.tb.Fatal(err)
	}
	if err := mgr.Add(feed); err != nil {
		e.tb.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := mgr.Start(ctx); err != nil {
			e.tb.Errorf("manager: %v", err)
		}
	}()
	var once sync.Once
	stopManager = func() { once.Do(func() { cancel(); <-done }) }
	e.tb.Cleanup(stopManager)
	return stopManager
}

// Logger writes into the test's log.
func Logger(tb testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(tb.Output(), nil))
}

// Namespace makes a namespace of its own for the test, without a tenant's row.
func (e *Env) Namespace() *corev1.Namespace {
	e.tb.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		GenerateName: "t-", Labels: map[string]string{v1alpha1.TenantLabel: v1alpha1.TenantLabelValue},
	}}
	if err := e.Client.Create(e.tb.Context(), ns); err != nil {
		e.tb.Fatal(err)
	}
	return ns
}

// Tenant makes a namespace and the row that makes it a tenant.
func (e *Env) Tenant() string {
	e.tb.Helper()
	ns := e.Namespace()
	e.Exec(`INSERT INTO tenants (name, uid, state) VALUES ($1, $2, 'active')`, ns.Name, string(ns.UID))
	return ns.Name
}

// Pool makes a row of a pool, for tests without the controller of pools.
func (e *Env) Pool(tenant, name string) {
	e.tb.Helper()
	e.Exec(`INSERT INTO pools (tenant, name, lifetime, ramdisk_lifetime, on_conflict, require_approval, object_uid, object_generation)
		VALUES ($1, $2, '168h', '24h', 'Hold', false, 'test', 1)`, tenant, name)
}

// Node makes the rows that a join leaves: a node, its certificate, its binding
// and its event.
func (e *Env) Node(tenant, pool, id string) {
	e.tb.Helper()
	e.Exec(`WITH n AS (INSERT INTO nodes (id, tenant, role, pool, site, state, attestor, attestor_type, facts)
		  VALUES ($1, $2, 'node', $3, '', 'adopting', 'join-token', 'join-token', '{"k": "v"}')),
		c AS (INSERT INTO node_certs (serial, node_id, generation, tenant, role, attestor_type, subject_sha256, csr_sha256, der, issuer_sha256, issuer_ski, first_seen_at, not_after)
		  VALUES (substr(sha256(('s' || $1)::bytea), 1, 16), $1, 1, $2, 'node', 'join-token', sha256(('x' || $1)::bytea), sha256(('c' || $1)::bytea), 'der', sha256('i'), 'ski', now(), now() + interval '7 days')),
		b AS (INSERT INTO node_bindings (attestor_type, subject, node_id) VALUES ('join-token', sha256(('x' || $1)::bytea), $1))
		INSERT INTO events (type, tenant, node_id, data) VALUES ('node.joined', $2, $1, '{"attestor": "join-token"}')`, id, tenant, pool)
	e.Notify()
}

// Notify wakes followers of the outbox, as a replica does after commits.
func (e *Env) Notify() { e.tb.Helper(); e.Exec("NOTIFY " + outbox.Channel) }

// Exec runs a statement as administrator of the database.
func (e *Env) Exec(sql string, args ...any) {
	e.tb.Helper()
	if _, err := e.Admin.Exec(e.tb.Context(), sql, args...); err != nil {
		e.tb.Fatalf("%s: %v", strings.Fields(sql)[0], err)
	}
}

// Query returns the one value of a query.
func Query[T any](e *Env, sql string, args ...any) T {
	e.tb.Helper()
	var v T
	if err := e.Admin.QueryRow(e.tb.Context(), sql, args...).Scan(&v); err != nil {
		e.tb.Fatalf("%s: %v", sql, err)
	}
	return v
}

// Create creates an object as an administrator.
func (e *Env) Create(o client.Object) {
	e.tb.Helper()
	if err := e.Client.Create(e.tb.Context(), o); err != nil {
		e.tb.Fatal(err)
	}
}

// Patch changes an object as an administrator.
func (e *Env) Patch(o client.Object, change func()) {
	e.tb.Helper()
	if err := e.Client.Get(e.tb.Context(), client.ObjectKeyFromObject(o), o); err != nil {
		e.tb.Fatal(err)
	}
	before := o.DeepCopyObject().(client.Object)
	change()
	if err := e.Client.Patch(e.tb.Context(), o, client.MergeFrom(before)); err != nil {
		e.tb.Fatal(err)
	}
}

// Delete deletes an object as an administrator.
func (e *Env) Delete(o client.Object) {
	e.tb.Helper()
	if err := e.Client.Delete(e.tb.Context(), o); err != nil {
		e.tb.Fatal(err)
	}
}

// Eventually polls until check returns nil.
func (e *Env) Eventually(check func(ctx context.Context) error) {
	e.tb.Helper()
	ctx, cancel := context.WithTimeout(e.tb.Context(), Timeout)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	var err error
	for {
		if err = check(ctx); err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			e.tb.Fatalf("after %s: %v", Timeout, err)
		}
	}
}

// Condition reports, as an error, what an object's condition is instead of what
// was expected; an absent one is "".
func Condition(conditions []metav1.Condition, kind, want string) error {
	has := ""
	for _, c := range conditions {
		if c.Type == kind {
			has = string(c.Status) + "/" + c.Reason
		}
	}
	if has != want {
		return fmt.Errorf("condition %s is %q, want %q: %+v", kind, has, want, conditions)
	}
	return nil
}
