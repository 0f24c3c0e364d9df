package policy

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/hack/controlplane"
	"github.com/better-compute/join-operator/test/kubetest"
)

// way is one of the ways in which a client can write a decision.
type way struct {
	name  string
	write func(t *testing.T, c client.Client, jr *v1alpha1.JoinRequest, verdict, decidedBy string) error
}

var ways = []way{
	{"a merge patch", func(t *testing.T, c client.Client, jr *v1alpha1.JoinRequest, verdict, by string) error {
		return c.Patch(t.Context(), jr.DeepCopy(), decision(fmt.Sprintf(`{"verdict":%q,"decidedBy":%s}`, verdict, by)))
	}},
	{"a JSON patch", func(t *testing.T, c client.Client, jr *v1alpha1.JoinRequest, verdict, by string) error {
		patch := fmt.Sprintf(`[{"op":"add","path":"/spec/decision","value":{"verdict":%q,"decidedBy":%s}}]`, verdict, by)
		return c.Patch(t.Context(), jr.DeepCopy(), client.RawPatch(types.JSONPatchType, []byte(patch)))
	}},
	{"a server-side apply", func(t *testing.T, c client.Client, jr *v1alpha1.JoinRequest, verdict, by string) error {
		patch := fmt.Sprintf(`{"apiVersion":"join.better-compute.dev/v1alpha1","kind":"JoinRequest","spec":{"decision":{"verdict":%q,"decidedBy":%s}}}`, verdict, by)
		return c.Patch(t.Context(), jr.DeepCopy(), client.RawPatch(types.ApplyPatchType, []byte(patch)), client.FieldOwner("somebody"))
	}},
	{"an update", func(t *testing.T, c client.Client, jr *v1alpha1.JoinRequest, verdict, by string) error {
		u := &unstructured.Unstructured{}
		u.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind("JoinRequest"))
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(jr), u); err != nil {
			t.Fatal(err)
		}
		d := map[string]any{}
		if err := unmarshal(fmt.Sprintf(`{"verdict":%q,"decidedBy":%s}`, verdict, by), &d); err != nil {
			t.Fatal(err)
		}
		if err := unstructured.SetNestedMap(u.Object, d, "spec", "decision"); err != nil {
			t.Fatal(err)
		}
		return c.Update(t.Context(), u)
	}},
}

func TestEveryWayToDecideIsGuarded(t *testing.T) {
	w := newWorld(t)
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			ns := w.Namespace(t, tenantLabels)
			bob, _ := w.user(t, ns, "bob", mayEdit)
			alice, _ := w.user(t, ns, "alice", mayEdit, mayApprove)
			jr := w.ask(t, ns, "gpu")
			wantForbidden(t, "bob", way.write(t, bob, jr, "Approved", identity(t, bob, nil)), "approve", "fleetpools/gpu")
			wantForbidden(t, "bob as alice", way.write(t, bob, jr, "Approved", identity(t, alice, nil)), "approve", "fleetpools/gpu")
			wantForbidden(t, "alice as bob", way.write(t, alice, jr, "Approved", identity(t, bob, nil)), "decidedBy")
			if err := way.write(t, alice, jr, "Approved", identity(t, alice, nil)); err != nil {
				t.Fatalf("alice: %v", err)
			}
			// An apply by another is a conflict of fields before it is anything else.
			if err := way.write(t, alice, jr, "Rejected", identity(t, alice, nil)); !apierrors.IsInvalid(err) {
				t.Errorf("the other verdict: got %v, want Invalid", err)
			}
		})
	}
}

// The main resource takes no status, and the status no decision.
func TestADecisionDoesNotComeByWayOfTheStatus(t *testing.T) {
	w := newWorld(t)
	ns := w.Namespace(t, tenantLabels)
	mayStatus := rule([]string{"joinrequests/status"}, []string{"get", "patch", "update"})
	alice, _ := w.user(t, ns, "alice", mayEdit, mayApprove, mayStatus)
	jr := w.ask(t, ns, "gpu")
	patch := client.RawPatch(types.MergePatchType, []byte(`{"spec":{"decision":{"verdict":"Approved","decidedBy":`+identity(t, alice, nil)+`}}}`))
	wantForbidden(t, "alice", alice.Status().Patch(t.Context(), jr.DeepCopy(), patch), "manager")
	apply := client.RawPatch(types.ApplyPatchType, []byte(`{"apiVersion":"join.better-compute.dev/v1alpha1","kind":"JoinRequest","status":{"nodeRef":{"name":"n-1"}}}`))
	wantForbidden(t, "alice applies", alice.Status().Patch(t.Context(), jr.DeepCopy(), apply, client.FieldOwner("somebody")), "manager")
	if err := w.manager.Status().Patch(t.Context(), jr.DeepCopy(), patch); err != nil {
		t.Errorf("the manager: %v", err)
	}
	status := client.RawPatch(types.MergePatchType, []byte(`{"spec":{"decision":{"verdict":"Approved","decidedBy":`+identity(t, alice, nil)+`}},"status":{"othersWaiting":9}}`))
	if err := alice.Patch(t.Context(), jr, status); err != nil {
		t.Fatal(err)
	}
	if err := w.Client.Get(t.Context(), client.ObjectKeyFromObject(jr), jr); err != nil || jr.Status.OthersWaiting != 0 || jr.Spec.Decision == nil {
		t.Errorf("%v: the decision is %v, others waiting %d", err, jr.Spec.Decision, jr.Status.OthersWaiting)
	}
}

// kubectl's own ways, as people try them.
func TestKubectlMayNotMakeOrDecideByTheWay(t *testing.T) {
	w := newWorld(t)
	ns := w.Namespace(t, tenantLabels)
	alice, cfg := w.user(t, ns, "alice", mayEdit, mayApprove)
	jr := w.ask(t, ns, "gpu")
	forged := fmt.Sprintf(`{"apiVersion":"join.better-compute.dev/v1alpha1","kind":"JoinRequest","metadata":{"name":"jr-mine","namespace":%q},
		"spec":{"attestor":"join-token","role":"node","csrSHA256":%q,"publicKeySHA256":%[2]q,"subjectSHA256":%[2]q}}`, ns, strings.Repeat("a", 64))
	wantSaid(t, "create", kubectl(t, cfg, forged, "create", "-f", "-"), "the join service and the manager alone")
	wantSaid(t, "apply", kubectl(t, cfg, forged, "apply", "-f", "-"), "the join service and the manager alone")
	wantSaid(t, "apply --server-side", kubectl(t, cfg, forged, "apply", "--server-side", "-f", "-"), "the join service and the manager alone")
	// A client-side apply leaves an annotation, which is no decision's business.
	decided := fmt.Sprintf(`{"apiVersion":"join.better-compute.dev/v1alpha1","kind":"JoinRequest","metadata":{"name":%q,"namespace":%q},
		"spec":{"decision":{"verdict":"Approved","decidedBy":%s}}}`, jr.Name, ns, identity(t, alice, nil))
	wantSaid(t, "apply a decision", kubectl(t, cfg, decided, "apply", "-f", "-"), "annotations")
	wantSaid(t, "label", kubectl(t, cfg, "", "label", "jr", jr.Name, "-n", ns, "a=b"), "manage on joinrequests")
	wantSaid(t, "annotate", kubectl(t, cfg, "", "annotate", "jr", jr.Name, "-n", ns, "a=b"), "manage on joinrequests")
	wantSaid(t, "delete", kubectl(t, cfg, "", "delete", "jr", jr.Name, "-n", ns), "kubectl reject joinrequest "+jr.Name)
	wantSaid(t, "delete --all", kubectl(t, cfg, "", "delete", "jr", "--all", "-n", ns), "manage on joinrequests")
	if out := kubectl(t, cfg, "", "auth", "can-i", "approve", "fleetpools.join.better-compute.dev/gpu", "-n", ns); !strings.Contains(out, "yes") {
		t.Errorf("may alice approve gpu: %s", out)
	}
	if out := kubectl(t, cfg, "", "auth", "can-i", "approve", "fleetpools.join.better-compute.dev/cpu", "-n", ns); !strings.Contains(out, "no") {
		t.Errorf("may alice approve cpu: %s", out)
	}
}

// kubectl runs kubectl as a user and returns all that it says.
func kubectl(t *testing.T, cfg *rest.Config, stdin string, args ...string) string {
	t.Helper()
	path, err := controlplane.Binary("kubectl")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), path, append([]string{"--kubeconfig", kubetest.Kubeconfig(t, cfg)}, args...)...)
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "failed: " + string(out)
	}
	return string(out)
}

func wantSaid(t *testing.T, what, out, says string) {
	t.Helper()
	if !strings.HasPrefix(out, "failed: ") || !strings.Contains(out, says) {
		t.Errorf("kubectl %s: %q does not fail with %q", what, out, says)
	}
}

// Groups are many, and the order is the API server's.
func TestGroupsAreTheWholeListInItsOrder(t *testing.T) {
	w := newWorld(t)
	ns := w.Namespace(t, tenantLabels)
	w.user(t, ns, "alice", mayEdit, mayApprove)
	alice := kubetest.ClientFor(t, w.As(t, "alice", "ops", "dev", "audit"))
	for what, lie := range map[string]func(*v1alpha1.UserInfo){
		"another order": func(u *v1alpha1.UserInfo) { u.Groups[0], u.Groups[1] = u.Groups[1], u.Groups[0] },
		"one less":      func(u *v1alpha1.UserInfo) { u.Groups = u.Groups[1:] },
		"one twice":     func(u *v1alpha1.UserInfo) { u.Groups = append(u.Groups, u.Groups[0]) },
	} {
		jr := w.ask(t, ns, "gpu")
		forged := decision(`{"verdict":"Approved","decidedBy":` + identity(t, alice, lie) + `}`)
		wantForbidden(t, what, alice.Patch(t.Context(), jr, forged), "decidedBy.groups")
	}
	jr := w.ask(t, ns, "gpu")
	if err := alice.Patch(t.Context(), jr, by(t, alice, "Approved")); err != nil {
		t.Errorf("the whole list: %v", err)
	}
}

// A service account of a tenant's may approve where it is given the verb; its uid
// and its extra attributes are part of who decided.
func TestAServiceAccountDecidesInItsOwnName(t *testing.T) {
	w := newWorld(t)
	ns := w.Namespace(t, tenantLabels)
	robot := w.robot(t, ns)
	jr := w.ask(t, ns, "gpu")
	anonymous := identity(t, robot, func(u *v1alpha1.UserInfo) { u.UID = "" })
	wantForbidden(t, "without its uid", robot.Patch(t.Context(), jr.DeepCopy(), decision(`{"verdict":"Approved","decidedBy":`+anonymous+`}`)), "decidedBy.uid")
	if err := robot.Patch(t.Context(), jr, by(t, robot, "Approved")); err != nil {
		t.Errorf("in its own name: %v", err)
	}
}
