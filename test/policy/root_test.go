package policy

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/test/kubetest"
)

const root = "join-system"

func unmarshal(text string, into any) error { return json.Unmarshal([]byte(text), into) }

// grant gives a user more rules, in a namespace.
func (w *world) grant(t *testing.T, ns, user string, rules ...rbacv1.PolicyRule) {
	t.Helper()
	meta := metav1.ObjectMeta{Namespace: ns, Name: user}
	for _, o := range []client.Object{
		&rbacv1.Role{ObjectMeta: meta, Rules: rules},
		&rbacv1.RoleBinding{
			ObjectMeta: meta, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: user},
			Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}},
		},
	} {
		if err := w.Client.Create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = w.Client.Delete(context.WithoutCancel(t.Context()), o) })
	}
	w.holds(t, ns, user, rules)
}

// holds waits until the API server knows what was granted, which takes a moment.
func (w *world) holds(t *testing.T, ns, user string, rules []rbacv1.PolicyRule) {
	t.Helper()
	kubetest.Eventually(t, "the rights of "+user, func(ctx context.Context) error {
		for _, r := range rules {
			a := access{verb: r.Verbs[0], resource: r.Resources[0]}
			if len(r.ResourceNames) > 0 {
				a.name = r.ResourceNames[0]
			}
			if !w.allowed(ctx, t, user, ns, a) {
				return fmt.Errorf("may not %v yet", a)
			}
		}
		return nil
	})
}

// robot is a service account of a tenant's that may approve the pool gpu.
func (w *world) robot(t *testing.T, ns string) client.Client {
	t.Helper()
	if err := w.Client.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "robot"}}); err != nil {
		t.Fatal(err)
	}
	w.user(t, ns, "robot", mayEdit, mayApprove)
	if err := w.Client.Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "the-robot"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "robot"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: ns, Name: "robot"}},
	}); err != nil {
		t.Fatal(err)
	}
	w.holds(t, ns, "system:serviceaccount:"+ns+":robot", []rbacv1.PolicyRule{mayEdit, mayApprove})
	return kubetest.ClientFor(t, w.ServiceAccount(t, ns, "robot"))
}

// A request in the operator's own namespace has no tenant yet: who claims the
// machine needs the right on both sides.
func TestAnUnassignedMachineIsClaimedWithTheRightOnBothSides(t *testing.T) {
	w := newWorld(t)
	tenant := w.Namespace(t, tenantLabels)
	approves := func(pools ...string) rbacv1.PolicyRule {
		return rule([]string{"fleetpools"}, []string{"approve"}, pools...)
	}
	for name, where := range map[string]struct{ here, there []rbacv1.PolicyRule }{
		"nowhere": {}, "here": {here: []rbacv1.PolicyRule{approves("gpu")}}, "there": {there: []rbacv1.PolicyRule{approves("gpu")}},
		"both": {here: []rbacv1.PolicyRule{approves("gpu")}, there: []rbacv1.PolicyRule{approves("gpu")}},
		"all":  {here: []rbacv1.PolicyRule{approves()}},
	} {
		w.grant(t, root, name, append(where.here, mayEdit)...)
		w.grant(t, tenant, name, append(where.there, mayEdit)...)
	}
	user := func(name string) client.Client { return kubetest.ClientFor(t, w.As(t, name)) }
	claim := fmt.Sprintf(`"pool":"gpu","tenant":%q`, tenant)

	jr := w.ask(t, root, "")
	try := func(name, verdict string, more ...string) error {
		c := user(name)
		return c.Patch(t.Context(), jr.DeepCopy(), by(t, c, verdict, more...), client.DryRunAll)
	}
	wantForbidden(t, "nowhere", try("nowhere", "Approved", claim), "fleetpools/gpu", "namespace "+root)
	wantForbidden(t, "there alone", try("there", "Approved", claim), "fleetpools/gpu", "namespace "+root)
	wantForbidden(t, "here alone", try("here", "Approved", claim), "fleetpools/gpu", "namespace "+tenant)
	wantForbidden(t, "without a tenant", try("both", "Approved", `"pool":"gpu"`), "spec.decision.tenant")
	wantForbidden(t, "without a pool", try("all", "Approved", fmt.Sprintf(`"tenant":%q`, root)), "spec.decision.pool")
	wantForbidden(t, "with neither", try("all", "Approved"), "spec.decision.pool")
	wantForbidden(t, "rejected with the right on one pool", try("both", "Rejected"), "approve on fleetpools in namespace "+root)
	if err := try("all", "Rejected"); err != nil {
		t.Errorf("rejected with the right on all pools: %v", err)
	}
	if err := try("both", "Approved", claim); err != nil {
		t.Errorf("claimed with the right on both sides: %v", err)
	}
}

func TestARequestWithoutAPoolNeedsOneInATenantToo(t *testing.T) {
	w := newWorld(t)
	ns := w.Namespace(t, tenantLabels)
	alice, _ := w.user(t, ns, "alice", mayEdit, mayApprove)
	all, _ := w.user(t, ns, "all", mayEdit, rule([]string{"fleetpools"}, []string{"approve"}))
	jr := w.ask(t, ns, "")
	wantForbidden(t, "no pool", all.Patch(t.Context(), jr.DeepCopy(), by(t, all, "Approved")), "spec.decision.pool")
	wantForbidden(t, "no right on all", alice.Patch(t.Context(), jr.DeepCopy(), by(t, alice, "Rejected")), "approve on fleetpools in namespace "+ns)
	wantForbidden(t, "for a tenant, its own", all.Patch(t.Context(), jr.DeepCopy(), by(t, all, "Approved", fmt.Sprintf(`"pool":"gpu","tenant":%q`, ns))), root)
	if err := alice.Patch(t.Context(), jr, by(t, alice, "Approved", `"pool":"gpu"`)); err != nil {
		t.Errorf("into the pool that she may approve: %v", err)
	}
}
