package policy

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/better-compute/join-operator/test/kubetest"
)

// access is one question to the authorizer about this product's kinds.
type access struct{ verb, resource, name string }

// What people may do who are bound, in a namespace, to Kubernetes' roles and to ours.
func TestPeoplesRolesEndWhereDecidingBegins(t *testing.T) {
	w := newWorld(t)
	ns := w.Namespace(t, tenantLabels)
	var (
		see     = []access{{"list", "joinrequests", ""}, {"get", "jointokens", ""}, {"watch", "fleetnodes", ""}, {"get", "fleetpools", ""}}
		configs = []access{{"list", "attestorconfigs", ""}}
		tokens  = []access{{"create", "jointokens", ""}, {"patch", "jointokens", ""}, {"delete", "jointokens", ""}, {"patch", "joinrequests", ""}}
		manage  = []access{{"create", "fleetpools", ""}, {"patch", "fleetpools", ""}, {"patch", "fleetnodes", ""}, {"delete", "fleetnodes", ""}, {"manage", "joinrequests", ""}, {"delete", "joinrequests", ""}}
		approve = []access{{"approve", "fleetpools", "gpu"}, {"approve", "fleetpools", ""}}
		never   = []access{{"create", "joinrequests", ""}, {"patch", "joinrequests/status", ""}, {"patch", "fleetnodes/status", ""}, {"manage", "tenants", ns}, {"create", "attestorconfigs", ""}, {"patch", "attestorconfigs", ""}, {"delete", "attestorconfigs", ""}}
	)
	all := func(parts ...[]access) (out []access) {
		for _, p := range parts {
			out = append(out, p...)
		}
		return out
	}
	for role, c := range map[string]struct{ may, mayNot []access }{
		"view":              {all(see, configs), all(tokens, manage, approve, never)},
		"edit":              {all(see, tokens), all(manage, approve, never)},
		"admin":             {all(see, tokens), all(manage, approve, never)},
		"join-viewer":       {all(see, configs), all(tokens, manage, approve, never)},
		"join-approver":     {append(approve, access{"patch", "joinrequests", ""}, access{"list", "joinrequests", ""}), all(tokens[:3], manage, never)},
		"join-tenant-admin": {all(see, tokens, manage), all(approve, never)},
	} {
		t.Run(role, func(t *testing.T) {
			user := "user-of-" + role
			if err := w.Client.Create(t.Context(), &rbacv1.RoleBinding{
				ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: role},
				RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
				Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}},
			}); err != nil {
				t.Fatal(err)
			}
			// The controller manager sums aggregated roles up, in a moment.
			kubetest.Eventually(t, role, func(ctx context.Context) error {
				var missing []error
				for _, a := range c.may {
					if !w.allowed(ctx, t, user, ns, a) {
						missing = append(missing, fmt.Errorf("may not %v", a))
					}
				}
				return errors.Join(missing...)
			})
			for _, a := range c.mayNot {
				if w.allowed(t.Context(), t, user, ns, a) {
					t.Errorf("may %v", a)
				}
			}
			if w.allowed(t.Context(), t, user, "default", c.may[0]) {
				t.Error("the right reaches another namespace")
			}
		})
	}
}

func (w *world) allowed(ctx context.Context, t *testing.T, user, ns string, a access) bool {
	t.Helper()
	resource, subresource, _ := strings.Cut(a.resource, "/")
	return w.may(ctx, t, user, authorizationv1.ResourceAttributes{
		Group: group, Resource: resource, Subresource: subresource, Verb: a.verb, Namespace: ns, Name: a.name,
	})
}

// may asks the authorizer.
func (w *world) may(ctx context.Context, t *testing.T, user string, a authorizationv1.ResourceAttributes) bool {
	t.Helper()
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: user, Groups: []string{"system:authenticated"}, ResourceAttributes: &a,
	}}
	if err := w.Client.Create(ctx, review); err != nil {
		t.Fatal(err)
	}
	return review.Status.Allowed
}

// What the service accounts may do is what they do: what each may do in all, by the
// API server's own account. A new right shows up here.
func TestServiceAccountsHoldNothingMore(t *testing.T) {
	w := newWorld(t)
	tenant := w.Namespace(t, tenantLabels)
	for _, c := range []struct {
		account, namespace string
		want               []string
	}{
		{"join-service", tenant, []string{"create join.better-compute.dev joinrequests []"}},
		{"join-service", root, []string{"create join.better-compute.dev joinrequests []"}},
		{"join-service", "join-keys", []string{"create join.better-compute.dev joinrequests []", "list  secrets []", "watch  secrets []"}},
		{"join-service", "join-trust", []string{"create join.better-compute.dev joinrequests []"}},
		{"join-keys", tenant, nil},
		{"join-keys", "join-keys", []string{"create  secrets []", "get  secrets [signing-keys sealing-keys challenge-keys]", "update  secrets [signing-keys sealing-keys challenge-keys]"}},
		{"join-keys", "join-trust", []string{"create  secrets []", "get  secrets [bundle-keys]", "update  secrets [bundle-keys]"}},
		{"join-gateway", root, nil},
		{"join-manager", "join-keys", managersRights},
		{"join-manager", root, append(managersRights,
			"create coordination.k8s.io leases []", "get coordination.k8s.io leases [join-manager]", "update coordination.k8s.io leases [join-manager]",
			"create  configmaps []", "get  configmaps []", "list  configmaps []", "watch  configmaps []", "update  configmaps [join-bundle]")},
	} {
		t.Run(c.account+" in "+c.namespace, func(t *testing.T) {
			got := w.rights(t, c.account, c.namespace)
			want := map[string]bool{}
			for _, r := range c.want {
				want[r] = true
				if !got[r] {
					t.Errorf("lacks %q", r)
				}
			}
			for r := range got {
				if !want[r] {
					t.Errorf("has %q", r)
				}
			}
		})
	}
}

var managersRights = []string{
	"get join.better-compute.dev joinrequests []", "list join.better-compute.dev joinrequests []", "watch join.better-compute.dev joinrequests []",
	"create join.better-compute.dev joinrequests []", "delete join.better-compute.dev joinrequests []",
	"get join.better-compute.dev fleetnodes []", "list join.better-compute.dev fleetnodes []", "watch join.better-compute.dev fleetnodes []",
	"create join.better-compute.dev fleetnodes []", "patch join.better-compute.dev fleetnodes []", "delete join.better-compute.dev fleetnodes []",
	"get join.better-compute.dev jointokens []", "list join.better-compute.dev jointokens []", "watch join.better-compute.dev jointokens []", "patch join.better-compute.dev jointokens []",
	"get join.better-compute.dev fleetpools []", "list join.better-compute.dev fleetpools []", "watch join.better-compute.dev fleetpools []",
	"get join.better-compute.dev attestorconfigs []", "list join.better-compute.dev attestorconfigs []", "watch join.better-compute.dev attestorconfigs []",
	"patch join.better-compute.dev joinrequests/status []", "patch join.better-compute.dev fleetnodes/status []",
	"patch join.better-compute.dev jointokens/status []", "patch join.better-compute.dev fleetpools/status []",
	"patch join.better-compute.dev attestorconfigs/status []",
	"get  namespaces []", "list  namespaces []", "watch  namespaces []",
	"create  events []", "patch  events []", "create events.k8s.io events []", "patch events.k8s.io events []",
	"create authorization.k8s.io subjectaccessreviews []",
	"get admissionregistration.k8s.io validatingadmissionpolicies []", "list admissionregistration.k8s.io validatingadmissionpolicies []", "watch admissionregistration.k8s.io validatingadmissionpolicies []",
	"get admissionregistration.k8s.io validatingadmissionpolicybindings []", "list admissionregistration.k8s.io validatingadmissionpolicybindings []", "watch admissionregistration.k8s.io validatingadmissionpolicybindings []",
	"get apiextensions.k8s.io customresourcedefinitions [fleetnodes.join.better-compute.dev]",
	"create rbac.authorization.k8s.io rolebindings []", "bind rbac.authorization.k8s.io clusterroles [join-operator-tokens]",
}

// rights is all that an account may do in a namespace, one verb, group and resource
// a line, without what every authenticated user may.
func (w *world) rights(t *testing.T, account, namespace string) map[string]bool {
	t.Helper()
	review := &authorizationv1.SelfSubjectRulesReview{Spec: authorizationv1.SelfSubjectRulesReviewSpec{Namespace: namespace}}
	if err := kubetest.ClientFor(t, w.ServiceAccount(t, root, account)).Create(t.Context(), review); err != nil {
		t.Fatal(err)
	}
	out := map[string]bool{}
	for _, rule := range review.Status.ResourceRules {
		for _, verb := range rule.Verbs {
			for _, group := range rule.APIGroups {
				for _, resource := range rule.Resources {
					switch resource {
					case "selfsubjectaccessreviews", "selfsubjectrulesreviews", "selfsubjectreviews", "clustertrustbundles":
						continue
					}
					out[fmt.Sprintf("%s %s %s %v", verb, group, resource, rule.ResourceNames)] = true
				}
			}
		}
	}
	return out
}
