package policy

import (
	"context"
	"fmt"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/test/kubetest"
)

// grantEverywhere gives a user joinrequests in the whole cluster.
func (w *world) grantEverywhere(t *testing.T, user string) {
	t.Helper()
	w.clusterRole(t, user, mayEdit)
}

// clusterRole gives a user rules in the whole cluster, for as long as the test runs.
func (w *world) clusterRole(t *testing.T, user string, rules ...rbacv1.PolicyRule) client.Client {
	t.Helper()
	meta := metav1.ObjectMeta{GenerateName: user + "-"}
	role := &rbacv1.ClusterRole{ObjectMeta: meta, Rules: rules}
	if err := w.Client.Create(t.Context(), role); err != nil {
		t.Fatal(err)
	}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: meta, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role.Name},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}},
	}
	if err := w.Client.Create(t.Context(), binding); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = w.Client.Delete(context.Background(), binding)
		_ = w.Client.Delete(context.Background(), role)
	})
	w.everywhere(t, user, rules)
	return kubetest.ClientFor(t, w.As(t, user))
}

// everywhere waits as holds does. Rules on namespaces are asked for by a question of
// their own: they are of another group.
func (w *world) everywhere(t *testing.T, user string, rules []rbacv1.PolicyRule) {
	t.Helper()
	kubetest.Eventually(t, "the rights of "+user, func(ctx context.Context) error {
		for _, r := range rules {
			for _, verb := range r.Verbs {
				a := authorizationv1.ResourceAttributes{Group: r.APIGroups[0], Resource: r.Resources[0], Verb: verb}
				if len(r.ResourceNames) > 0 {
					a.Name = r.ResourceNames[0]
				}
				if !w.may(ctx, t, user, a) {
					return fmt.Errorf("may not %s %s yet", a.Verb, a.Resource)
				}
			}
		}
		return nil
	})
}

// Status and finalize are written with the namespace's metadata.
func TestTheLabelDoesNotComeByWayOfASubresource(t *testing.T) {
	w := newWorld(t)
	erin := w.clusterRole(t, "erin", rbacv1.PolicyRule{
		APIGroups: []string{""}, Resources: []string{"namespaces", "namespaces/status", "namespaces/finalize"},
		Verbs: []string{"get", "create", "patch", "update"},
	})
	plain, tenant := w.Namespace(t, nil), w.Namespace(t, tenantLabels)
	set, unset := merge(`{"metadata":{"labels":{"join.better-compute.dev/tenant":"true"}}}`), merge(`{"metadata":{"labels":{"join.better-compute.dev/tenant":null}}}`)
	object := func(name string) *corev1.Namespace {
		return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
	}
	wantForbidden(t, "status sets", erin.Status().Patch(t.Context(), object(plain), set), "manage", "tenants")
	wantForbidden(t, "status removes", erin.Status().Patch(t.Context(), object(tenant), unset), "manage", "tenants")
	var ns corev1.Namespace
	if err := erin.Get(t.Context(), client.ObjectKey{Name: plain}, &ns); err != nil {
		t.Fatal(err)
	}
	ns.Labels["join.better-compute.dev/tenant"] = "true"
	wantForbidden(t, "finalize sets", erin.SubResource("finalize").Update(t.Context(), &ns), "manage", "tenants")
	wantForbidden(t, "another value", erin.Patch(t.Context(), object(tenant), merge(`{"metadata":{"labels":{"join.better-compute.dev/tenant":"no"}}}`)), "manage", "tenants")
	wantForbidden(t, "an empty value", erin.Patch(t.Context(), object(plain), merge(`{"metadata":{"labels":{"join.better-compute.dev/tenant":""}}}`)), "manage", "tenants")
	if err := erin.Status().Patch(t.Context(), object(plain), merge(`{"metadata":{"labels":{"team":"a"}}}`)); err != nil {
		t.Errorf("another label: %v", err)
	}
	frank := w.clusterRole(t, "frank", rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"namespaces"}, Verbs: []string{"get", "create", "patch"}},
		rule([]string{"tenants"}, []string{"manage"}))
	for what, patch := range map[string]client.Patch{"sets": set, "removes": unset} {
		if err := frank.Patch(t.Context(), object(plain), patch); err != nil {
			t.Errorf("who manages tenants %s: %v", what, err)
		}
	}
	one := w.clusterRole(t, "grace", rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"namespaces"}, Verbs: []string{"get", "patch"}},
		rule([]string{"tenants"}, []string{"manage"}, plain))
	if err := one.Patch(t.Context(), object(plain), set); err != nil {
		t.Errorf("who manages this tenant: %v", err)
	}
	wantForbidden(t, "another tenant", one.Patch(t.Context(), object(tenant), unset), "manage", "tenants")
}

func TestNamespacesThatHoldKeysAreNeverTenants(t *testing.T) {
	w := newWorld(t)
	set := merge(`{"metadata":{"labels":{"join.better-compute.dev/tenant":"true"}}}`)
	for _, name := range []string{"join-keys", "join-trust", "kube-system"} {
		err := w.Client.Patch(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, set)
		wantForbidden(t, name, err, "cannot be a tenant")
	}
}

// Status is the manager's, of every kind.
func TestStatusIsTheManagersOfEveryKind(t *testing.T) {
	w := newWorld(t)
	ns := w.Namespace(t, tenantLabels)
	for kind, spec := range map[string]map[string]any{"JoinToken": {"pool": "gpu"}, "FleetPool": {}, "FleetNode": {}} {
		u := object(kind, ns, spec)
		if err := w.Client.Create(t.Context(), u); err != nil {
			t.Fatal(err)
		}
		status := merge(`{"status":{"observedGeneration":1}}`)
		wantForbidden(t, kind, w.Client.Status().Patch(t.Context(), u.DeepCopy(), status), "manager")
		if err := w.manager.Status().Patch(t.Context(), u, status); err != nil {
			t.Errorf("%s by the manager: %v", kind, err)
		}
	}
}

func object(kind, namespace string, spec map[string]any) *unstructured.Unstructured {
	u := &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
	u.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind(kind))
	u.SetNamespace(namespace)
	u.SetName("x")
	return u
}
