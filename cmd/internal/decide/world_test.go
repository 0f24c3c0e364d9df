package decide

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/test/kubetest"
)

const (
	group = "join.better-compute.dev"
	root  = "join-system"
)

var tenantLabels = map[string]string{v1alpha1.TenantLabel: v1alpha1.TenantLabelValue}

// world is an API server with the kinds, the roles and the admission policies of
// production, and a tenant's namespace of the test's own.
type world struct {
	*kubetest.Cluster
	ns      string
	service client.Client // the join service, who makes requests
	manager client.Client // the manager, who records decisions
}

var installed sync.Once

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{Cluster: kubetest.Shared(t)}
	installed.Do(func() {
		for _, folder := range []string{"config/namespaces", "config/crd", "config/rbac", "config/policies"} {
			w.ApplyFolder(t, folder)
		}
	})
	w.service = kubetest.ClientFor(t, w.ServiceAccount(t, root, "join-service"))
	w.manager = kubetest.ClientFor(t, w.ServiceAccount(t, root, "join-manager"))
	w.ns = w.Namespace(t, tenantLabels)
	probe := w.ask(t, "gpu")
	kubetest.Eventually(t, "the decision policy is in force", func(ctx context.Context) error {
		forged := client.RawPatch(types.MergePatchType, []byte(`{"spec":{"decision":{"verdict":"Approved","decidedBy":{"username":"somebody"}}}}`))
		if err := w.Client.Patch(ctx, probe.DeepCopy(), forged, client.DryRunAll); !apierrors.IsForbidden(err) {
			return fmt.Errorf("a forged decision: %v", err)
		}
		return nil
	})
	if err := w.manager.Delete(t.Context(), probe); err != nil {
		t.Fatal(err)
	}
	return w
}

// ask makes a request as the join service does.
func (w *world) ask(t *testing.T, pool string, change ...func(*v1alpha1.JoinRequest)) *v1alpha1.JoinRequest {
	t.Helper()
	jr := &v1alpha1.JoinRequest{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, GenerateName: "jr-"},
		Spec: v1alpha1.JoinRequestSpec{JoinRequestAsk: v1alpha1.JoinRequestAsk{
			Attestor: "join-token", Role: "node", Pool: pool,
			CSRSHA256: strings.Repeat("a", 64), PublicKeySHA256: strings.Repeat("b", 64), SubjectSHA256: strings.Repeat("c", 64),
			Claims: map[string]v1alpha1.PrintableValue{"serialNumber": "SN-1"}, Facts: map[string]v1alpha1.PrintableValue{"site": "berlin"},
		}},
	}
	for _, c := range change {
		c(jr)
	}
	if err := w.service.Create(t.Context(), jr); err != nil {
		t.Fatal(err)
	}
	return jr
}

func rule(resource string, verbs []string, names ...string) rbacv1.PolicyRule {
	return rbacv1.PolicyRule{APIGroups: []string{group}, Resources: []string{resource}, Verbs: verbs, ResourceNames: names}
}

var (
	mayEdit       = rule("joinrequests", []string{"get", "list", "watch", "patch"})
	maySee        = rule("joinrequests", []string{"get", "list", "watch"})
	mayApprove    = rule("fleetpools", []string{"approve", "list"})
	mayApproveGPU = rule("fleetpools", []string{"approve"}, "gpu")
)

// grant gives a user rules in a namespace and waits until the API server knows them.
func (w *world) grant(t *testing.T, ns, user string, rules ...rbacv1.PolicyRule) {
	t.Helper()
	object := metav1.ObjectMeta{Namespace: ns, GenerateName: "people-"}
	role := &rbacv1.Role{ObjectMeta: object, Rules: rules}
	if err := w.Client.Create(t.Context(), role); err != nil {
		t.Fatal(err)
	}
	binding := &rbacv1.RoleBinding{
		ObjectMeta: object, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: role.Name},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}},
	}
	if err := w.Client.Create(t.Context(), binding); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, o := range []client.Object{binding, role} {
			if err := w.Client.Delete(context.WithoutCancel(t.Context()), o); err != nil {
				t.Error(err)
			}
		}
	})
	kubetest.Eventually(t, "the rights of "+user, func(ctx context.Context) error {
		for _, r := range rules {
			for _, name := range append(slices.Clone(r.ResourceNames), "")[:max(1, len(r.ResourceNames))] {
				review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
					User:               user,
					ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: r.Verbs[0], Group: group, Resource: r.Resources[0], Namespace: ns, Name: name},
				}}
				if err := w.Client.Create(ctx, review); err != nil {
					return err
				}
				if !review.Status.Allowed {
					return fmt.Errorf("not yet %s on %s/%s", r.Verbs[0], r.Resources[0], name)
				}
			}
		}
		return nil
	})
}

// people are alice, who may approve every pool, bob, who may edit only, and carol, who
// may approve the pool gpu alone; each with a kubeconfig.
func (w *world) people(t *testing.T) (alice, bob, carol string) {
	t.Helper()
	w.grant(t, w.ns, "alice", mayEdit, mayApprove)
	w.grant(t, w.ns, "bob", mayEdit)
	w.grant(t, w.ns, "carol", mayEdit, mayApproveGPU)
	return w.kubeconfig(t, "alice"), w.kubeconfig(t, "bob"), w.kubeconfig(t, "carol")
}

func (w *world) kubeconfig(t *testing.T, user string) string {
	t.Helper()
	return kubetest.Kubeconfig(t, w.As(t, user))
}

func (w *world) read(t *testing.T, jr *v1alpha1.JoinRequest) *v1alpha1.JoinRequest {
	t.Helper()
	var now v1alpha1.JoinRequest
	if err := w.Client.Get(t.Context(), client.ObjectKeyFromObject(jr), &now); err != nil {
		t.Fatal(err)
	}
	return &now
}

// wantVerdict is what was decided, and by whom; empty is nothing.
func (w *world) wantVerdict(t *testing.T, jr *v1alpha1.JoinRequest, want v1alpha1.Verdict, by string) {
	t.Helper()
	var got v1alpha1.Verdict
	var who string
	if d := w.read(t, jr).Spec.Decision; d != nil {
		got, who = d.Verdict, d.DecidedBy.Username
	}
	if got != want || who != by {
		t.Errorf("%s: decided %q by %q, want %q by %q", jr.Name, got, who, want, by)
	}
}

// status writes the status of a request as the manager does.
func (w *world) status(t *testing.T, jr *v1alpha1.JoinRequest, change func(*v1alpha1.JoinRequestStatus)) {
	t.Helper()
	now := w.read(t, jr)
	change(&now.Status)
	if err := w.manager.Status().Update(t.Context(), now); err != nil {
		t.Fatal(err)
	}
}

// record is the manager's answer to a decision.
func record(s *v1alpha1.JoinRequestStatus) {
	meta.SetStatusCondition(&s.Conditions, metav1.Condition{Type: v1alpha1.ConditionRecorded, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonRecorded})
}

type result struct {
	code     int
	out, err string
}

// want checks the exit code, and that the text for people says all of these.
func (r result) want(t *testing.T, code int, says ...string) {
	t.Helper()
	if r.code != code {
		t.Errorf("exit code %d, want %d\nstdout: %s\nstderr: %s", r.code, code, r.out, r.err)
	}
	for _, s := range says {
		if !strings.Contains(r.out+r.err, s) {
			t.Errorf("does not say %q\nstdout: %s\nstderr: %s", s, r.out, r.err)
		}
	}
}

// run runs a plugin without a terminal.
func (w *world) run(t *testing.T, kubeconfig string, verdict v1alpha1.Verdict, args ...string) result {
	t.Helper()
	return w.runWith(t, strings.NewReader(""), nil, kubeconfig, verdict, args...)
}

func (w *world) runWith(t *testing.T, in io.Reader, errOut io.Writer, kubeconfig string, verdict v1alpha1.Verdict, args ...string) result {
	t.Helper()
	var out, errs bytes.Buffer
	both := io.Writer(&errs)
	if errOut != nil {
		both = io.MultiWriter(&errs, errOut)
	}
	args = append([]string{"--kubeconfig", kubeconfig, "-n", w.ns}, args...)
	code := Run(t.Context(), verdict, args, genericiooptions.IOStreams{In: in, Out: &out, ErrOut: both})
	return result{code: code, out: out.String(), err: errs.String()}
}

// runAt runs a plugin at a terminal at which a person answers; what else happens
// before an answer is in its function.
func (w *world) runAt(t *testing.T, answers []func() string, kubeconfig string, verdict v1alpha1.Verdict, args ...string) result {
	t.Helper()
	person, tty := newPerson(t, answers...)
	res := w.runWith(t, tty, person, kubeconfig, verdict, args...)
	person.done(t)
	return res
}

func says(s string) func() string { return func() string { return s + "\n" } }

func TestMain(m *testing.M) {
	// A test acts as the users of its kubeconfigs and as nobody else.
	os.Unsetenv("KUBECONFIG")
	os.Exit(m.Run())
}
