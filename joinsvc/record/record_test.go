package record

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/joinsvc"
	"github.com/better-compute/join-operator/test/kubetest"
)

// as is a cluster with the definitions, and the access of the join service as it
// is installed.
func as(t *testing.T, c *kubetest.Cluster) *rest.Config {
	t.Helper()
	c.ApplyFolder(t, "config/crd")
	user := "service-" + c.Namespace(t, nil)
	for _, o := range kubetest.Kustomize(t, "config/rbac") {
		if o.GetKind() == "ClusterRole" && o.GetName() == "join-service" {
			o.SetName(user)
			must(t, c.Client.Create(t.Context(), o))
		}
	}
	must(t, c.Client.Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: user},
		Subjects:   []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: user}},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: user},
	}))
	return c.As(t, user)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func started(t *testing.T, cfg *rest.Config) *Recorder {
	t.Helper()
	r, err := New(cfg, slog.New(slog.NewTextHandler(t.Output(), nil)), prometheus.NewRegistry())
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); r.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return r
}

func pending(namespace, id string) joinsvc.PendingRequest {
	hash := strings.Repeat("ab", 32)
	return joinsvc.PendingRequest{ID: id, Namespace: namespace, AttestorType: "join-token", Spec: v1alpha1.JoinRequestAsk{
		Attestor: "join-token", AttestorVersion: "1", Role: "node", Pool: "gpu", Site: "lab", CSRSHA256: hash, PublicKeySHA256: hash, SubjectSHA256: hash,
		Claims: map[string]v1alpha1.PrintableValue{"serialNumber": "S1"}, Facts: map[string]v1alpha1.PrintableValue{"a": "b"},
	}}
}

func (r *Recorder) count(result string) float64 {
	return testutil.ToFloat64(r.results.WithLabelValues(result))
}

// counts waits for a number of results.
func (r *Recorder) counts(t *testing.T, result string, want float64) {
	t.Helper()
	kubetest.Eventually(t, result, func(context.Context) error {
		if got := r.count(result); got != want {
			return fmt.Errorf("%v, want %v", got, want)
		}
		return nil
	})
}

// creates waits until an object is made; a server that has just started may take
// longer than a recorder waits.
func (r *Recorder) creates(t *testing.T, p joinsvc.PendingRequest) {
	t.Helper()
	kubetest.Eventually(t, "the object", func(context.Context) error {
		before := r.count("created") + r.count("exists") + r.count("failed")
		r.Record(p)
		for r.count("created")+r.count("exists")+r.count("failed") == before {
			time.Sleep(5 * time.Millisecond)
		}
		if r.count("created")+r.count("exists") == 0 {
			return fmt.Errorf("not made")
		}
		return nil
	})
}

func TestPendingJoinsBecomeObjectsThatHashToTheirRows(t *testing.T) {
	c := kubetest.Shared(t)
	r := started(t, as(t, c))
	ns := c.Namespace(t, nil)
	p := pending(ns, "aaaabbbbccccdddd")
	r.creates(t, p)
	var jr v1alpha1.JoinRequest
	must(t, c.Client.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: "jr-aaaabbbbccccdddd"}, &jr))
	got, err := jr.Spec.Hash()
	must(t, err)
	want, err := p.Spec.Hash()
	must(t, err)
	if got != want || jr.Spec.Decision != nil || jr.Labels["join.better-compute.dev/attestor-type"] != "join-token" || len(jr.Finalizers)+len(jr.OwnerReferences) > 0 {
		t.Errorf("made %+v", jr)
	}
	// Once more, as after a race with the manager's sweep.
	kubetest.Eventually(t, "the same object again", func(context.Context) error {
		r.Record(p)
		if r.count("exists") == 0 {
			return fmt.Errorf("it was not found to be there")
		}
		return nil
	})
	failed := r.count("failed")
	r.Record(pending("no-such-namespace", "aaaabbbbccccdddd"))
	r.counts(t, "failed", failed+1)
	if n := r.count("created"); n > 1 {
		t.Errorf("created %v times", n)
	}
}

// TestAnAPIServerThatIsAwayHoldsNobodyUp floods the recorder meanwhile.
func TestAnAPIServerThatIsAwayHoldsNobodyUp(t *testing.T) {
	t.Parallel()
	c := kubetest.Start(t)
	r := started(t, as(t, c))
	ns := c.Namespace(t, nil)
	c.StopAPIServer()
	begun := time.Now()
	const flood = 3 * waiting
	for i := range flood {
		r.Record(pending(ns, fmt.Sprintf("%016d", i)))
	}
	if took := time.Since(begun); took > time.Second {
		t.Errorf("recording took %v", took)
	}
	kubetest.Eventually(t, "the end of the queue", func(context.Context) error {
		if n := r.count("failed") + r.count("dropped"); n != flood {
			return fmt.Errorf("%v of %d", n, flood)
		}
		return nil
	})
	must(t, c.StartAPIServer(t.Context()))
	r.creates(t, pending(ns, "aaaabbbbccccdddd"))
}
