package fleetpool_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/controllers/fleetpool"
	"github.com/better-compute/join-operator/controllers/internal/controllertest"
	"github.com/better-compute/join-operator/controllers/outbox"
)

func TestMain(m *testing.M) { controllertest.Main(m) }

// objects is a cluster that holds as many FleetNodes as it may, or not.
type objects bool

func (o objects) Full() bool { return bool(o) }
func (objects) Limit() int64 { return 50000 }

func run(e *controllertest.Env, full bool) (stop func()) {
	return e.Run(func(mgr ctrl.Manager, feed *outbox.Feed) error {
		return (&fleetpool.Reconciler{
			Client: mgr.GetClient(), DB: e.Manager, Feed: feed, Objects: objects(full), SkipNameValidation: true,
		}).SetupWithManager(mgr)
	})
}

func await(e *controllertest.Env, p *v1alpha1.FleetPool, condition, want string) {
	e.Eventually(func(ctx context.Context) error {
		if err := e.Client.Get(ctx, client.ObjectKeyFromObject(p), p); err != nil {
			return err
		}
		if p.Status.ObservedGeneration != p.Generation {
			return fmt.Errorf("observed generation %d of %d", p.Status.ObservedGeneration, p.Generation)
		}
		return controllertest.Condition(p.Status.Conditions, condition, want)
	})
}

const rowSQL = `SELECT concat_ws(' ', extract(epoch FROM lifetime)::int, extract(epoch FROM ramdisk_lifetime)::int, on_conflict,
	coalesce(allowed_kinds::text, 'all'), require_approval, object_generation) FROM pools WHERE tenant = $1 AND name = $2`

func TestPoolIsPublishedAndWithdrawn(t *testing.T) {
	e := controllertest.New(t)
	tenant := e.Tenant()
	stop := run(e, false)
	p := &v1alpha1.FleetPool{ObjectMeta: metav1.ObjectMeta{Namespace: tenant, Name: "gpu"}}
	e.Create(p)
	await(e, p, v1alpha1.ConditionReady, "True/Published")
	if got, want := controllertest.Query[string](e, rowSQL, tenant, "gpu"), "604800 86400 Hold all f 1"; got != want {
		t.Errorf("row is %q, want %q", got, want)
	}
	none := []string{}
	e.Patch(p, func() {
		p.Spec.CertificateLifetime = &metav1.Duration{Duration: time.Hour}
		p.Spec.RequireApproval, p.Spec.OnConflict, p.Spec.AllowedKinds = true, v1alpha1.ConflictRevokeAll, &none
	})
	await(e, p, v1alpha1.ConditionReady, "True/Published")
	if got, want := controllertest.Query[string](e, rowSQL, tenant, "gpu"), "3600 86400 RevokeAll {} t 2"; got != want {
		t.Errorf("row is %q, want %q", got, want)
	}

	e.Node(tenant, "gpu", "n-a")
	e.Node(tenant, "gpu", "n-b")
	e.Exec(`UPDATE nodes SET state = 'active' WHERE id = 'n-b'`)
	e.Notify()
	e.Eventually(func(ctx context.Context) error {
		if err := e.Client.Get(ctx, client.ObjectKeyFromObject(p), p); err != nil {
			return err
		}
		if n := p.Status.Nodes; n == nil || *n != (v1alpha1.NodeCounts{Adopting: 1, Active: 1}) {
			return fmt.Errorf("counts are %+v", n)
		}
		return nil
	})

	// Deleted while no manager runs: the row goes, the nodes stay.
	stop()
	e.Delete(p)
	run(e, false)
	e.Eventually(func(context.Context) error {
		if n := controllertest.Query[int](e, `SELECT count(*) FROM pools WHERE tenant = $1`, tenant); n != 0 {
			return fmt.Errorf("%d rows", n)
		}
		return nil
	})
	if n := controllertest.Query[int](e, `SELECT count(*) FROM nodes WHERE pool = 'gpu'`); n != 2 {
		t.Errorf("%d nodes are left, want 2", n)
	}
	if err := e.Client.Get(t.Context(), client.ObjectKeyFromObject(p), p); !apierrors.IsNotFound(err) {
		t.Errorf("the pool is still there: %v", err)
	}
}

func TestAnOlderGenerationNeverReplacesANewer(t *testing.T) {
	e := controllertest.New(t)
	tenant := e.Tenant()
	p := &v1alpha1.FleetPool{ObjectMeta: metav1.ObjectMeta{Namespace: tenant, Name: "gpu"}}
	e.Create(p)
	// Another manager has seen generation 7.
	e.Exec(`INSERT INTO pools (tenant, name, lifetime, ramdisk_lifetime, on_conflict, require_approval, object_uid, object_generation)
		VALUES ($1, 'gpu', '1h', '1h', 'Hold', true, $2, 7)`, tenant, string(p.UID))
	run(e, false)
	await(e, p, v1alpha1.ConditionReady, "True/Published")
	if got, want := controllertest.Query[string](e, rowSQL, tenant, "gpu"), "3600 3600 Hold all t 7"; got != want {
		t.Errorf("row is %q, want %q", got, want)
	}
}

func TestOnlyATenantsPoolIsPublished(t *testing.T) {
	e := controllertest.New(t)
	ns := e.Namespace()
	run(e, true)
	p := &v1alpha1.FleetPool{ObjectMeta: metav1.ObjectMeta{Namespace: ns.Name, Name: "gpu"}}
	e.Create(p)
	await(e, p, v1alpha1.ConditionReady, "False/NotATenant")
	if n := controllertest.Query[int](e, `SELECT count(*) FROM pools`); n != 0 {
		t.Errorf("%d rows", n)
	}
	e.Exec(`INSERT INTO tenants (name, uid, state) VALUES ($1, $2, 'active')`, ns.Name, string(ns.UID))
	e.Patch(ns, func() { ns.Labels["touched"] = "true" })
	await(e, p, v1alpha1.ConditionReady, "True/Published")
	await(e, p, v1alpha1.ConditionObjectsCapped, "True/ObjectsCapped")
}
