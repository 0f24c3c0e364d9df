package tenant_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/controllers/internal/controllertest"
	"github.com/better-compute/join-operator/controllers/outbox"
	"github.com/better-compute/join-operator/controllers/tenant"
)

func TestMain(m *testing.M) { controllertest.Main(m) }

type world struct {
	*controllertest.Env
	root, never string
}

func setup(t *testing.T) *world {
	w := &world{Env: controllertest.New(t)}
	root := w.Namespace()
	w.Patch(root, func() { root.Labels = nil })
	w.root, w.never = root.Name, w.Namespace().Name
	return w
}

func (w *world) start() (stop func()) {
	return w.Run(func(mgr ctrl.Manager, feed *outbox.Feed) error {
		return (&tenant.Reconciler{
			Client: mgr.GetClient(), DB: w.Manager, Feed: feed, Recorder: mgr.GetEventRecorder("join-manager"),
			SystemNamespace: w.root, Never: []string{w.never}, ServiceAccount: "join-manager", Resync: 200 * time.Millisecond, SkipNameValidation: true,
		}).SetupWithManager(mgr)
	})
}

// row waits until a tenant's row is "uid/state".
func (w *world) row(name, want string) {
	w.Eventually(func(ctx context.Context) error {
		got := controllertest.Query[string](w.Env, `SELECT coalesce((SELECT uid || '/' || state FROM tenants WHERE name = $1), '')`, name)
		if got != want {
			return fmt.Errorf("the row of %s is %q, want %q", name, got, want)
		}
		return nil
	})
}

// remake deletes a namespace, waits until it is gone, and makes it again.
func (w *world) remake(ns *corev1.Namespace) *corev1.Namespace {
	w.Delete(ns)
	again := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns.Name, Labels: map[string]string{v1alpha1.TenantLabel: "true"}}}
	w.Eventually(func(ctx context.Context) error { return w.Client.Create(ctx, again) })
	return again
}

func (w *world) binding(name string) error {
	return w.Client.Get(context.Background(), client.ObjectKey{Namespace: name, Name: tenant.TokensRole}, &rbacv1.RoleBinding{})
}

func TestALabelledNamespaceIsATenant(t *testing.T) {
	w := setup(t)
	w.start()
	ns := w.Namespace()
	w.row(ns.Name, string(ns.UID)+"/active")
	w.Eventually(func(context.Context) error { return w.binding(ns.Name) })
	var rb rbacv1.RoleBinding
	if err := w.Client.Get(t.Context(), client.ObjectKey{Namespace: ns.Name, Name: "join-operator-tokens"}, &rb); err != nil {
		t.Fatal(err)
	}
	if len(rb.Subjects) != 1 || rb.Subjects[0].Name != "join-manager" || rb.Subjects[0].Namespace != w.root || rb.RoleRef.Name != "join-operator-tokens" {
		t.Errorf("binding %+v", rb)
	}
	// Somebody deletes it: it is made again.
	w.Delete(&rb)
	w.Eventually(func(context.Context) error { return w.binding(ns.Name) })

	w.Node(ns.Name, "gpu", "n-one")
	w.Patch(ns, func() { ns.Labels = nil })
	w.row(ns.Name, string(ns.UID)+"/unlabelled")
	if n := controllertest.Query[int](w.Env, `SELECT count(*) FROM node_certs WHERE revoked_at IS NULL`); n != 1 {
		t.Errorf("%d certificates are left: losing the label revokes nothing", n)
	}
	w.Patch(ns, func() { ns.Labels = map[string]string{v1alpha1.TenantLabel: "true"} })
	w.row(ns.Name, string(ns.UID)+"/active")
}

func TestTheOperatorsNamespaceIsTheRootAndKeysAreNeverATenants(t *testing.T) {
	w := setup(t)
	w.start()
	w.Eventually(func(context.Context) error {
		if got := controllertest.Query[string](w.Env, `SELECT coalesce(string_agg(name, ' '), '') FROM tenants WHERE root AND state = 'active'`); got != w.root {
			return fmt.Errorf("root tenants: %q, want %q", got, w.root)
		}
		return nil
	})
	after := w.Namespace() // once this one is a tenant, the others were looked at
	w.row(after.Name, string(after.UID)+"/active")
	w.row(w.never, "")
	for _, name := range []string{w.root, w.never} {
		if err := w.binding(name); !apierrors.IsNotFound(err) {
			t.Errorf("the manager gave itself the Secrets of %s: %v", name, err)
		}
	}
}

func TestANamespaceMadeAgainIsBlockedUntilTheOldTenantIsGone(t *testing.T) {
	w := setup(t)
	w.start()
	old := w.Namespace()
	w.row(old.Name, string(old.UID)+"/active")
	w.Node(old.Name, "gpu", "n-one")
	again := w.remake(old)
	w.row(old.Name, string(old.UID)+"/blocked")
	w.Eventually(func(ctx context.Context) error {
		var list eventsv1.EventList
		if err := w.Client.List(ctx, &list, client.InNamespace(old.Name)); err != nil {
			return err
		}
		for _, e := range list.Items {
			if e.Reason == v1alpha1.ReasonTenantBlocked && strings.Contains(e.Note, "made again") {
				return nil
			}
		}
		return fmt.Errorf("no Event among %d", len(list.Items))
	})
	if err := w.binding(old.Name); !apierrors.IsNotFound(err) {
		t.Errorf("a blocked tenant has the RoleBinding: %v", err)
	}
	if n := controllertest.Query[int](w.Env, `SELECT count(*) FROM nodes WHERE tenant = $1`, old.Name); n != 1 {
		t.Errorf("%d nodes: those of the old tenant stay", n)
	}
	// Its node is retired; its certificate still runs.
	w.Exec(`UPDATE nodes SET state = 'retired', retired_at = join_now() WHERE tenant = $1`, old.Name)
	stays := func() {
		t.Helper()
		other := w.Namespace()
		w.row(other.Name, string(other.UID)+"/active")
		w.row(old.Name, string(old.UID)+"/blocked")
	}
	stays()
	w.DB.Advance(t, 6*24*time.Hour)
	stays()
	w.DB.Advance(t, 2*24*time.Hour)
	w.row(old.Name, string(again.UID)+"/active")
	w.Eventually(func(context.Context) error { return w.binding(old.Name) })
}

func TestANamespaceThatWentWhileNoManagerRanIsGone(t *testing.T) {
	w := setup(t)
	stop := w.start()
	ns := w.Namespace()
	w.row(ns.Name, string(ns.UID)+"/active")
	stop()
	w.Delete(ns)
	w.Eventually(func(ctx context.Context) error {
		if err := w.Client.Get(ctx, client.ObjectKeyFromObject(ns), ns); !apierrors.IsNotFound(err) {
			return fmt.Errorf("the namespace is still there: %v", err)
		}
		return nil
	})
	w.start()
	w.row(ns.Name, string(ns.UID)+"/gone")
}

func TestRequestsOfATenantThatIsGoneEnd(t *testing.T) {
	w := setup(t)
	w.start()
	ns := w.Namespace()
	w.row(ns.Name, string(ns.UID)+"/active")
	w.Exec(`INSERT INTO join_requests (id, attestor_type, attestor, subject_sha256, subject_proved, csr_sha256, role, namespace, facts_sha256, spec, spec_sha256,
		  verdict, decided_at, decided_tenant)
		SELECT id, 't', 't', sha256(id::bytea), false, sha256(id::bytea), 'node', ns, sha256(id::bytea), '{}', sha256(id::bytea), verdict, decided, tenant
		FROM (VALUES ('aaaaaaaaaaaaaaaa', $1, NULL, NULL::timestamptz, NULL), ('bbbbbbbbbbbbbbbb', 'root', 'Approved', now(), $1), ('cccccccccccccccc', 'other', NULL, NULL, NULL))
		  v (id, ns, verdict, decided, tenant)`, ns.Name)
	w.Delete(ns)
	w.row(ns.Name, string(ns.UID)+"/gone")
	if got := controllertest.Query[string](w.Env, `SELECT string_agg(left(id, 1), '' ORDER BY id) FROM join_requests WHERE ended IS NULL`); got != "c" {
		t.Errorf("live requests: %q, want only the other tenant's", got)
	}
}
