package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/config/policies"
	"github.com/better-compute/join-operator/hack/controlplane"
	"github.com/better-compute/join-operator/test/child"
	"github.com/better-compute/join-operator/test/kubetest"
	"github.com/better-compute/join-operator/test/pgtest"
)

func TestTheEmbeddedPoliciesAreWhole(t *testing.T) {
	if _, err := expectedPolicies(policies.Namespaces{}); err != nil {
		t.Fatal(err)
	}
}

func TestAnotherManagerGoesOnWhereAKilledOneStopped(t *testing.T) {
	w := setup(t)
	first := w.start(t, "first")
	w.admits(t) // the first leads before the second comes
	second := w.start(t, "second")
	var lease coordinationv1.Lease
	if err := w.cluster.Client.Get(t.Context(), client.ObjectKey{Namespace: w.system, Name: "join-manager"}, &lease); err != nil {
		t.Errorf("lease: %v", err)
	}
	first.Kill()
	w.admits(t)
	select {
	case <-second.Done():
		t.Error("the second manager ended")
	default:
	}
}

func TestAManagerOutlivesItsAPIServer(t *testing.T) {
	w := setup(t)
	manager := w.start(t, "manager")
	tenant := w.admits(t)
	w.cluster.StopAPIServer()
	// A machine asks meanwhile.
	id, csr := "aaaaaaaaaaaaaaaa", sha256.Sum256([]byte("csr"))
	hexadecimal := hex.EncodeToString(csr[:])
	ask := v1alpha1.JoinRequestAsk{
		Attestor: "join-token", Role: "node", Pool: "gpu",
		CSRSHA256: hexadecimal, PublicKeySHA256: hexadecimal, SubjectSHA256: hexadecimal,
	}
	spec, err := ask.Canonical()
	if err != nil {
		t.Fatal(err)
	}
	hash := sha256.Sum256(spec)
	if _, err := w.db.Pool(t, pgtest.Service).Exec(t.Context(), `INSERT INTO join_requests
		(id, attestor_type, attestor, subject_sha256, subject_proved, csr_sha256, role, namespace, tenant, pool, facts_sha256, spec, spec_sha256)
		VALUES ($1, 'join-token', 'join-token', $2, false, $2, 'node', $3, $3, 'gpu', $2, $4, $5)`, id, csr[:], tenant, spec, hash[:]); err != nil {
		t.Fatal(err)
	}
	if err := w.cluster.StartAPIServer(t.Context()); err != nil {
		t.Fatal(err)
	}
	kubetest.Eventually(t, "the JoinRequest", func(ctx context.Context) error {
		select {
		case <-manager.Done(): // it lost its lease, and ends so that nobody works beside the next
			manager = w.start(t, "again")
		default:
		}
		return w.cluster.Client.Get(ctx, client.ObjectKey{Namespace: tenant, Name: "jr-" + id}, &v1alpha1.JoinRequest{})
	})
}

// world is a cluster and an empty database, which the managers migrate.
type world struct {
	cluster            *kubetest.Cluster
	db                 *pgtest.DB
	system             string
	binary, kubeconfig string
}

func setup(t *testing.T) *world {
	t.Helper()
	w := &world{cluster: kubetest.Start(t), db: pgtest.New(t, pgtest.WithoutMigration()), binary: filepath.Join(t.TempDir(), "manager")}
	root, err := controlplane.RepositoryRoot()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := envtest.InstallCRDs(w.cluster.Admin(), envtest.CRDInstallOptions{
		Paths: []string{filepath.Join(root, "config", "crd", "bases")}, ErrorIfPathMissing: true,
	}); err != nil {
		t.Fatal(err)
	}
	w.kubeconfig = kubetest.Kubeconfig(t, w.cluster.Admin())
	w.system = w.cluster.Namespace(t, nil)
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", w.binary, ".").CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	return w
}

// start starts a manager and waits until it is ready.
func (w *world) start(t *testing.T, name string) *child.Process {
	t.Helper()
	ports, err := controlplane.FreePorts(1)
	if err != nil {
		t.Fatal(err)
	}
	probe := fmt.Sprintf("127.0.0.1:%d", ports[0])
	p, err := child.Start(child.Command{Path: w.binary, Log: filepath.Join(t.TempDir(), name), Args: []string{
		"--kubeconfig", w.kubeconfig, "--database-url", w.db.URL(pgtest.Manager), "--system-namespace", w.system,
		"--metrics-bind-address", "0", "--health-probe-bind-address", probe,
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Kill)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := p.Await(ctx, func(ctx context.Context) error { return get(ctx, "http://"+probe+"/readyz") }); err != nil {
		t.Fatal(err)
	}
	return p
}

// admits makes a tenant, waits for its row and returns its name.
func (w *world) admits(t *testing.T) string {
	t.Helper()
	name := w.cluster.Namespace(t, map[string]string{v1alpha1.TenantLabel: v1alpha1.TenantLabelValue})
	pool := w.db.Pool(t, pgtest.Admin)
	kubetest.Eventually(t, "the tenant's row", func(ctx context.Context) error {
		var state string
		err := pool.QueryRow(ctx, `SELECT state FROM "join".tenants WHERE name = $1`, name).Scan(&state)
		if err == nil && state != "active" {
			err = errors.New("it is " + state)
		}
		return err
	})
	return name
}

func get(ctx context.Context, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	return nil
}
