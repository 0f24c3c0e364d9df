// Package policy acts as several real users on a real API server and tries to
// decide about machines without the right to.
package policy

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/test/kubetest"
)

const group = "join.better-compute.dev"

// world is a cluster with everything installed but the workloads and what
// cert-manager would have to serve.
type world struct {
	*kubetest.Cluster
	service client.Client // the join service, who makes requests
	manager client.Client
}

// once installs for all tests of the binary.
var once sync.Once

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{Cluster: kubetest.Shared(t)}
	once.Do(func() {
		for _, folder := range []string{"config/namespaces", "config/crd", "config/rbac", "config/policies"} {
			w.ApplyFolder(t, folder)
		}
	})
	w.service = kubetest.ClientFor(t, w.ServiceAccount(t, "join-system", "join-service"))
	w.manager = kubetest.ClientFor(t, w.ServiceAccount(t, "join-system", "join-manager"))
	w.inForce(t)
	return w
}

// inForce probes until every policy refuses what it must: that takes a moment.
func (w *world) inForce(t *testing.T) {
	t.Helper()
	kubetest.Eventually(t, "the policies are in force", func(ctx context.Context) error {
		err := w.Client.Create(ctx, ask("default", "gpu"), client.DryRunAll)
		if !apierrors.IsForbidden(err) {
			return fmt.Errorf("an administrator's request: %v", err)
		}
		return nil
	})
	ns := w.Namespace(t, tenantLabels)
	jr := w.ask(t, ns, "gpu")
	kubetest.Eventually(t, "the decision policy is in force", func(ctx context.Context) error {
		err := w.Client.Patch(ctx, jr.DeepCopy(), decision(`{"verdict":"Approved","decidedBy":{"username":"somebody"}}`), client.DryRunAll)
		if !apierrors.IsForbidden(err) {
			return fmt.Errorf("a forged decision: %v", err)
		}
		return nil
	})
}

var tenantLabels = map[string]string{v1alpha1.TenantLabel: v1alpha1.TenantLabelValue}

func ask(ns, pool string) *v1alpha1.JoinRequest {
	return &v1alpha1.JoinRequest{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, GenerateName: "jr-"},
		Spec: v1alpha1.JoinRequestSpec{JoinRequestAsk: v1alpha1.JoinRequestAsk{
			Attestor: "join-token", Role: "node", Pool: pool,
			CSRSHA256: strings.Repeat("a", 64), PublicKeySHA256: strings.Repeat("b", 64), SubjectSHA256: strings.Repeat("c", 64),
		}},
	}
}

func (w *world) ask(t *testing.T, ns, pool string) *v1alpha1.JoinRequest {
	t.Helper()
	jr := ask(ns, pool)
	if err := w.service.Create(t.Context(), jr); err != nil {
		t.Fatal(err)
	}
	return jr
}

func decision(d string) client.Patch {
	return client.RawPatch(types.MergePatchType, []byte(`{"spec":{"decision":`+d+`}}`))
}

// by is a decision in a user's own name, exactly as the API server knows them.
func by(t *testing.T, c client.Client, verdict string, more ...string) client.Patch {
	t.Helper()
	extra := strings.Join(append([]string{""}, more...), ",")
	return decision(fmt.Sprintf(`{"verdict":%q,"decidedBy":%s%s}`, verdict, identity(t, c, nil), extra))
}

// identity is a user as JSON, with a lie where the test wants one.
func identity(t *testing.T, c client.Client, lie func(*v1alpha1.UserInfo)) string {
	t.Helper()
	review := &authenticationv1.SelfSubjectReview{}
	if err := c.Create(t.Context(), review); err != nil {
		t.Fatal(err)
	}
	u := review.Status.UserInfo
	me := v1alpha1.UserInfo{Username: u.Username, UID: u.UID, Groups: u.Groups, Extra: map[string]v1alpha1.ExtraValue{}}
	for k, v := range u.Extra {
		me.Extra[k] = v1alpha1.ExtraValue(v)
	}
	if lie != nil {
		lie(&me)
	}
	b, err := json.Marshal(me)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func rule(resources, verbs []string, names ...string) rbacv1.PolicyRule {
	return rbacv1.PolicyRule{APIGroups: []string{group}, Resources: resources, Verbs: verbs, ResourceNames: names}
}

var (
	mayEdit    = rule([]string{"joinrequests"}, []string{"get", "list", "watch", "patch", "update", "create", "delete"})
	mayApprove = rule([]string{"fleetpools"}, []string{"approve"}, "gpu")
)

// user is a real user with a client certificate and these rules in a namespace.
func (w *world) user(t *testing.T, ns, name string, rules ...rbacv1.PolicyRule) (client.Client, *rest.Config) {
	t.Helper()
	meta := metav1.ObjectMeta{Namespace: ns, Name: name}
	role := &rbacv1.Role{ObjectMeta: meta, Rules: rules}
	binding := &rbacv1.RoleBinding{
		ObjectMeta: meta, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: name}},
	}
	for _, o := range []client.Object{role, binding} {
		if err := w.Client.Create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	w.holds(t, ns, name, rules)
	cfg := w.As(t, name)
	return kubetest.ClientFor(t, cfg), cfg
}

func wantForbidden(t *testing.T, what string, err error, says ...string) {
	t.Helper()
	if !apierrors.IsForbidden(err) {
		t.Errorf("%s: got %v, want Forbidden", what, err)
		return
	}
	for _, s := range says {
		if !strings.Contains(err.Error(), s) {
			t.Errorf("%s: %q does not say %q", what, err, s)
		}
	}
}

func TestDecisionNeedsTheVerbOnThePool(t *testing.T) {
	w := newWorld(t)
	ns := w.Namespace(t, tenantLabels)
	bob, _ := w.user(t, ns, "bob", mayEdit)
	alice, _ := w.user(t, ns, "alice", mayEdit, mayApprove)
	for _, verdict := range []string{"Approved", "Rejected"} {
		jr := w.ask(t, ns, "gpu")
		wantForbidden(t, "bob "+verdict, bob.Patch(t.Context(), jr.DeepCopy(), by(t, bob, verdict)), "approve", "fleetpools/gpu", ns, "bob")
		other := w.ask(t, ns, "cpu")
		wantForbidden(t, "alice in another pool "+verdict, alice.Patch(t.Context(), other.DeepCopy(), by(t, alice, verdict)), "fleetpools/cpu")
		if verdict == "Approved" { // elsewhere is for approvals: the schema says so
			wantForbidden(t, "alice into another pool", alice.Patch(t.Context(), jr.DeepCopy(), by(t, alice, verdict, `"pool":"cpu"`)), "fleetpools/cpu")
			wantForbidden(t, "alice for another tenant", alice.Patch(t.Context(), jr.DeepCopy(), by(t, alice, verdict, `"tenant":"default"`)), "own namespace")
		}
		if err := alice.Patch(t.Context(), jr, by(t, alice, verdict, `"message":"why"`)); err != nil {
			t.Errorf("alice %s: %v", verdict, err)
		}
	}
}

func TestDecisionIsInItsWritersOwnName(t *testing.T) {
	w := newWorld(t)
	ns := w.Namespace(t, tenantLabels)
	alice, _ := w.user(t, ns, "alice", mayEdit, mayApprove)
	jr := w.ask(t, ns, "gpu")
	for what, lie := range map[string]func(*v1alpha1.UserInfo){
		"username":    func(u *v1alpha1.UserInfo) { u.Username = "root" },
		"uid":         func(u *v1alpha1.UserInfo) { u.UID = "1" },
		"more groups": func(u *v1alpha1.UserInfo) { u.Groups = append(u.Groups, "system:masters") },
		"no groups":   func(u *v1alpha1.UserInfo) { u.Groups = nil },
		"extra":       func(u *v1alpha1.UserInfo) { u.Extra["a"] = v1alpha1.ExtraValue{"b"} },
		"no extra":    func(u *v1alpha1.UserInfo) { u.Extra = nil },
	} {
		forged := decision(`{"verdict":"Approved","decidedBy":` + identity(t, alice, lie) + `}`)
		wantForbidden(t, what, alice.Patch(t.Context(), jr.DeepCopy(), forged), "decidedBy")
	}
}

func TestDecisionIsFinalAndComesLater(t *testing.T) {
	w := newWorld(t)
	ns := w.Namespace(t, tenantLabels)
	alice, _ := w.user(t, ns, "alice", mayEdit, mayApprove)
	jr := w.ask(t, ns, "gpu")
	if err := alice.Patch(t.Context(), jr, by(t, alice, "Approved")); err != nil {
		t.Fatal(err)
	}
	for what, patch := range map[string]client.Patch{
		"flip":    by(t, alice, "Rejected"),
		"edit":    by(t, alice, "Approved", `"message":"more"`),
		"removal": decision("null"),
	} {
		for who, c := range map[string]client.Client{"alice": alice, "an administrator": w.Client} {
			if err := c.Patch(t.Context(), jr.DeepCopy(), patch); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "final") {
				t.Errorf("%s by %s: got %v, want Invalid that says it is final", what, who, err)
			}
		}
	}
	decided := ask(ns, "gpu")
	decided.Spec.Decision = &v1alpha1.Decision{Verdict: v1alpha1.VerdictApproved, DecidedBy: v1alpha1.UserInfo{Username: "system:serviceaccount:join-system:join-service"}}
	if err := w.service.Create(t.Context(), decided); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "creation") {
		t.Errorf("decided at creation: got %v, want Invalid", err)
	}
}

func TestDecisionIsWrittenAlone(t *testing.T) {
	w := newWorld(t)
	ns := w.Namespace(t, tenantLabels)
	alice, _ := w.user(t, ns, "alice", mayEdit, mayApprove, rule([]string{"joinrequests"}, []string{"manage"}))
	jr := w.ask(t, ns, "gpu")
	for what, meta := range map[string]string{
		"label":      `{"labels":{"a":"b"}}`,
		"annotation": `{"annotations":{"a":"b"}}`,
		"finalizer":  `{"finalizers":["example.com/hold"]}`,
		"owner":      `{"ownerReferences":[{"apiVersion":"v1","kind":"ConfigMap","name":"a","uid":"1"}]}`,
	} {
		patch := fmt.Sprintf(`{"metadata":%s,"spec":{"decision":{"verdict":"Approved","decidedBy":%s}}}`, meta, identity(t, alice, nil))
		wantForbidden(t, what, alice.Patch(t.Context(), jr.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(patch))), "alone")
	}
	for what, spec := range map[string]string{
		"pool": `{"pool":"cpu"}`, "attestor": `{"attestor":"tpm"}`, "claims": `{"claims":{"serialNumber":"1"}}`, "facts": `{"facts":{"a":"b"}}`,
		"site": `{"site":"a"}`, "nodeName": `{"nodeName":"n"}`, "pool removed": `{"pool":null}`, "hardware key": `{"hardwareKeySHA256":"` + strings.Repeat("d", 64) + `"}`,
	} {
		err := alice.Patch(t.Context(), jr.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(`{"spec":`+spec+`}`)))
		if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "immutable") {
			t.Errorf("what was asked, %s: got %v, want Invalid that says immutable", what, err)
		}
	}
}

func TestRequestsAreMadeAndRemovedByWhoManagesThem(t *testing.T) {
	w := newWorld(t)
	ns := w.Namespace(t, tenantLabels)
	bob, _ := w.user(t, ns, "bob", mayEdit, mayApprove, rule([]string{"joinrequests/status"}, []string{"patch", "update", "get"}))
	carol, _ := w.user(t, ns, "carol", mayEdit, rule([]string{"joinrequests"}, []string{"manage"}))
	wantForbidden(t, "bob creates", bob.Create(t.Context(), ask(ns, "gpu")), "join service")
	wantForbidden(t, "carol creates", carol.Create(t.Context(), ask(ns, "gpu")), "join service")
	jr := w.ask(t, ns, "gpu")
	label := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"labels":{"a":"b"}}}`))
	wantForbidden(t, "bob labels", bob.Patch(t.Context(), jr.DeepCopy(), label), "manage")
	wantForbidden(t, "bob deletes", bob.Delete(t.Context(), jr.DeepCopy()), "manage", "reject")
	status := client.RawPatch(types.MergePatchType, []byte(`{"status":{"othersWaiting":1}}`))
	wantForbidden(t, "bob writes status", bob.Status().Patch(t.Context(), jr.DeepCopy(), status), "manager")
	wantForbidden(t, "an administrator writes status", w.Client.Status().Patch(t.Context(), jr.DeepCopy(), status), "manager")
	if err := w.manager.Status().Patch(t.Context(), jr.DeepCopy(), status); err != nil {
		t.Errorf("the manager writes status: %v", err)
	}
	if err := carol.Patch(t.Context(), jr.DeepCopy(), label); err != nil {
		t.Errorf("carol labels: %v", err)
	}
	if err := carol.Delete(t.Context(), jr); err != nil {
		t.Errorf("carol deletes: %v", err)
	}
	jr = w.ask(t, ns, "gpu")
	if err := w.manager.Delete(t.Context(), jr); err != nil {
		t.Errorf("the manager deletes: %v", err)
	}
}

func TestImpersonationIsTheImpersonatedUsersRight(t *testing.T) {
	w := newWorld(t)
	ns := w.Namespace(t, tenantLabels)
	w.user(t, ns, "alice", mayEdit, mayApprove)
	_, cfg := w.user(t, ns, "bob", mayEdit)
	jr := w.ask(t, ns, "gpu")
	as := rest.CopyConfig(cfg)
	as.Impersonate = rest.ImpersonationConfig{UserName: "alice", Groups: []string{"system:authenticated"}}
	bobAsAlice := kubetest.ClientFor(t, as)
	wantForbidden(t, "bob, who may not impersonate", bobAsAlice.Create(t.Context(), ask(ns, "gpu")))
	// Who may impersonate is root here (docs/threat-model.md): the decision counts as alice's.
	as = rest.CopyConfig(w.Admin())
	as.Impersonate = rest.ImpersonationConfig{UserName: "alice", Groups: []string{"system:authenticated"}}
	root := kubetest.ClientFor(t, as)
	if err := root.Patch(t.Context(), jr, by(t, root, "Approved")); err != nil {
		t.Errorf("an administrator as alice: %v", err)
	}
}

func TestNamespaceWithRequestsGoes(t *testing.T) {
	w := newWorld(t)
	ns := w.Namespace(t, tenantLabels)
	carol, _ := w.user(t, ns, "carol", mayEdit, rule([]string{"joinrequests"}, []string{"manage"}))
	w.ask(t, ns, "gpu")
	held := w.ask(t, ns, "gpu")
	hold := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":["example.com/hold"]}}`))
	if err := carol.Patch(t.Context(), held, hold); err != nil {
		t.Fatal(err)
	}
	if err := w.Client.Delete(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}); err != nil {
		t.Fatal(err)
	}
	key := client.ObjectKeyFromObject(held)
	kubetest.Eventually(t, "the namespace controller deletes the requests", func(ctx context.Context) error {
		if err := w.Client.Get(ctx, key, held); err != nil {
			return err
		}
		if held.DeletionTimestamp.IsZero() {
			return fmt.Errorf("%s is not being deleted", held.Name)
		}
		return nil
	})
	if err := w.Client.Patch(t.Context(), held, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))); err != nil {
		t.Fatalf("remove the finalizer: %v", err)
	}
	kubetest.Eventually(t, "the namespace is gone", func(ctx context.Context) error {
		err := w.Client.Get(ctx, client.ObjectKey{Name: ns}, &corev1.Namespace{})
		if !apierrors.IsNotFound(err) {
			return fmt.Errorf("%v", err)
		}
		return nil
	})
}

func TestTenantLabelIsForClusterAdministrators(t *testing.T) {
	w := newWorld(t)
	dave := w.clusterRole(t, "dave", rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"namespaces"}, Verbs: []string{"get", "create", "patch", "update"}})
	wantForbidden(t, "dave makes a tenant", dave.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "dave-", Labels: tenantLabels}}), "manage", "tenants")
	plain := w.Namespace(t, nil)
	set := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"labels":{"join.better-compute.dev/tenant":"true"}}}`))
	wantForbidden(t, "dave labels", dave.Patch(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: plain}}, set), "tenants")
	tenant := w.Namespace(t, tenantLabels)
	unset := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"labels":{"join.better-compute.dev/tenant":null}}}`))
	wantForbidden(t, "dave unlabels", dave.Patch(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: tenant}}, unset), "tenants")
	other := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"labels":{"team":"a"}}}`))
	if err := dave.Patch(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: tenant}}, other); err != nil {
		t.Errorf("dave sets another label: %v", err)
	}
}

func TestManagerBindsItselfToTokensOfTenantsAlone(t *testing.T) {
	w := newWorld(t)
	tenant, plain := w.Namespace(t, tenantLabels), w.Namespace(t, nil)
	binding := func(ns, name, role, subject string) *rbacv1.RoleBinding {
		return &rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: subject, Namespace: "join-system"}},
		}
	}
	const tokens = "join-operator-tokens"
	wantForbidden(t, "where there is no tenant", w.manager.Create(t.Context(), binding(plain, tokens, tokens, "join-manager")))
	wantForbidden(t, "in the keys' namespace", w.manager.Create(t.Context(), binding("join-keys", tokens, tokens, "join-manager")))
	wantForbidden(t, "under another name", w.manager.Create(t.Context(), binding(tenant, "mine", tokens, "join-manager")))
	wantForbidden(t, "for somebody else", w.manager.Create(t.Context(), binding(tenant, tokens, tokens, "join-keys")))
	wantForbidden(t, "to another role", w.manager.Create(t.Context(), binding(tenant, tokens, "cluster-admin", "join-manager")))
	if err := w.manager.Create(t.Context(), binding(tenant, tokens, tokens, "join-manager")); err != nil {
		t.Errorf("as it should be: %v", err)
	}
	var secrets corev1.SecretList
	wantForbidden(t, "the manager lists the keys", w.manager.List(t.Context(), &secrets, client.InNamespace("join-keys")))
	wantForbidden(t, "the manager lists all Secrets", w.manager.List(t.Context(), &secrets))
}

// can asks the API server what a service account may do.
func TestNoServiceAccountOfOursMayApproveOrReadOthersSecrets(t *testing.T) {
	w := newWorld(t)
	for _, sa := range []string{"join-manager", "join-service", "join-keys", "join-gateway"} {
		for _, q := range []struct{ group, resource, verb, ns, name string }{
			{group, "fleetpools", "approve", "default", ""},
			{group, "joinrequests", "manage", "default", ""},
			{"", "secrets", "list", "join-trust", ""},
			{"", "secrets", "list", "default", ""},
			{"", "secrets", "get", "cert-manager", "join-tls-ca"},
			{"*", "*", "*", "", ""},
			{"", "users", "impersonate", "", ""},
			{"", "pods", "create", "join-system", ""},
		} {
			review := &unstructured.Unstructured{Object: map[string]any{
				"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
				"spec": map[string]any{
					"user": "system:serviceaccount:join-system:" + sa, "groups": []any{"system:serviceaccounts", "system:authenticated"},
					"resourceAttributes": map[string]any{"group": q.group, "resource": q.resource, "verb": q.verb, "namespace": q.ns, "name": q.name},
				},
			}}
			if err := w.Client.Create(t.Context(), review); err != nil {
				t.Fatal(err)
			}
			if allowed, _, _ := unstructured.NestedBool(review.Object, "status", "allowed"); allowed {
				t.Errorf("%s may %+v", sa, q)
			}
		}
	}
}
