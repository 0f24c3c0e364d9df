package guard_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	sigsyaml "sigs.k8s.io/yaml"

	"github.com/better-compute/join-operator/controllers/guard"
	"github.com/better-compute/join-operator/controllers/internal/controllertest"
	"github.com/better-compute/join-operator/controllers/outbox"
)

func TestMain(m *testing.M) { controllertest.Main(m) }

// policy leaves out all that the API server fills in.
const policy = `
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: guard-test}
spec:
  matchConstraints:
    resourceRules:
    - {apiGroups: [join.better-compute.dev], apiVersions: [v1alpha1], operations: [UPDATE], resources: [joinrequests]}
    excludeResourceRules:
    - {apiGroups: [join.better-compute.dev], apiVersions: [v1alpha1], operations: [UPDATE], resources: [joinrequests], resourceNames: [x]}
  variables:
  - {name: decides, expression: "has(object.spec.decision) && !has(oldObject.spec.decision)"}
  validations:
  - {expression: "!variables.decides || object.spec.decision.decidedBy.username == request.userInfo.username", message: who}
`

const binding = `
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: guard-test}
spec:
  policyName: guard-test
  validationActions: [Deny]
  matchResources:
    namespaceSelector: {matchLabels: {a: b}}
`

func parse[T any](t *testing.T, manifest string) *T {
	t.Helper()
	o := new(T)
	if err := sigsyaml.UnmarshalStrict([]byte(manifest), o); err != nil {
		t.Fatal(err)
	}
	return o
}

type world struct {
	*controllertest.Env
	guard   *guard.Guard
	policy  *admissionv1.ValidatingAdmissionPolicy
	binding *admissionv1.ValidatingAdmissionPolicyBinding
}

func setup(t *testing.T) *world {
	expected, err := guard.Parse([]byte(policy + "---" + binding + "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: x}\n"))
	if err != nil {
		t.Fatal(err)
	}
	w := &world{
		Env: controllertest.New(t), guard: &guard.Guard{Expected: expected},
		policy: parse[admissionv1.ValidatingAdmissionPolicy](t, policy), binding: parse[admissionv1.ValidatingAdmissionPolicyBinding](t, binding),
	}
	w.Create(w.policy)
	w.Create(w.binding)
	t.Cleanup(func() {
		_ = w.Client.Delete(context.Background(), w.policy)
		_ = w.Client.Delete(context.Background(), w.binding)
	})
	return w
}

func (w *world) check(t *testing.T) guard.State {
	t.Helper()
	s, err := w.guard.Check(t.Context(), w.Client)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestPoliciesAsInstalledAreGuarded(t *testing.T) {
	w := setup(t)
	s := w.check(t)
	if !s.Guarded() {
		t.Fatalf("what the API server made of the manifests counts as altered: %q", s.Problems)
	}
	if s.Settled(s.Since) || !s.Settled(s.Since.Add(guard.Settle)) {
		t.Error("settles at the wrong time")
	}
	if age := time.Since(s.Since); age < -time.Minute || age > time.Minute {
		t.Errorf("guarded since %s", s.Since)
	}
}

func TestWhateverIsMissingOrAlteredIsAProblem(t *testing.T) {
	ignore, exact := admissionv1.Ignore, admissionv1.Exact
	for name, c := range map[string]struct {
		breaks func(*world)
		want   string
	}{
		"policy deleted":  {func(w *world) { w.Delete(w.policy) }, "ValidatingAdmissionPolicy guard-test is missing"},
		"binding deleted": {func(w *world) { w.Delete(w.binding) }, "ValidatingAdmissionPolicyBinding guard-test is missing"},
		"failure ignored": {func(w *world) { w.Patch(w.policy, func() { w.policy.Spec.FailurePolicy = &ignore }) }, "ValidatingAdmissionPolicy guard-test is altered"},
		"validation weaker": {func(w *world) {
			w.Patch(w.policy, func() { w.policy.Spec.Validations[0].Expression = "true" })
		}, "ValidatingAdmissionPolicy guard-test is altered"},
		"a condition that lets by": {func(w *world) {
			w.Patch(w.policy, func() {
				w.policy.Spec.MatchConditions = []admissionv1.MatchCondition{{Name: "not-bob", Expression: "request.userInfo.username != 'bob'"}}
			})
		}, "ValidatingAdmissionPolicy guard-test is altered"},
		"fewer operations": {func(w *world) {
			w.Patch(w.policy, func() {
				w.policy.Spec.MatchConstraints.ResourceRules[0].Operations = []admissionv1.OperationType{admissionv1.Create}
			})
		}, "ValidatingAdmissionPolicy guard-test is altered"},
		"exact match": {func(w *world) {
			w.Patch(w.policy, func() { w.policy.Spec.MatchConstraints.MatchPolicy = &exact })
		}, "ValidatingAdmissionPolicy guard-test is altered"},
		"audits only": {func(w *world) {
			w.Patch(w.binding, func() { w.binding.Spec.ValidationActions = []admissionv1.ValidationAction{admissionv1.Audit} })
		}, "ValidatingAdmissionPolicyBinding guard-test is altered"},
		"bound elsewhere": {func(w *world) {
			w.Patch(w.binding, func() {
				w.binding.Spec.MatchResources.NamespaceSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"no": "where"}}
			})
		}, "ValidatingAdmissionPolicyBinding guard-test is altered"},
	} {
		t.Run(name, func(t *testing.T) {
			w := setup(t)
			c.breaks(w)
			s := w.check(t)
			if s.Guarded() || s.Fingerprint != "" || s.Settled(time.Now().Add(time.Hour)) {
				t.Fatalf("guarded: %+v", s)
			}
			if got := strings.Join(s.Problems, "; "); got != c.want {
				t.Errorf("problems %q, want %q", got, c.want)
			}
		})
	}
}

func TestWhatWasAwayOrAlteredIsNotTheSameGuardAgain(t *testing.T) {
	ignore, fail := admissionv1.Ignore, admissionv1.Fail
	for name, breaks := range map[string]func(t *testing.T, w *world){
		"deleted and made again": func(t *testing.T, w *world) {
			w.Delete(w.binding)
			w.binding = parse[admissionv1.ValidatingAdmissionPolicyBinding](t, binding)
			w.Create(w.binding)
		},
		"altered and put right": func(_ *testing.T, w *world) {
			w.Patch(w.policy, func() { w.policy.Spec.FailurePolicy = &ignore })
			w.Patch(w.policy, func() { w.policy.Spec.FailurePolicy = &fail })
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := setup(t)
			before := w.check(t)
			breaks(t, w)
			after := w.check(t)
			if !after.Guarded() {
				t.Fatal(after.Problems)
			}
			if after.Fingerprint == before.Fingerprint {
				t.Error("the fingerprint is the same: decisions made in between would count")
			}
			if after.Since.Before(before.Since) {
				t.Errorf("guarded since %s, before %s", after.Since, before.Since)
			}
		})
	}
}

func TestALabelIsNoAlteration(t *testing.T) {
	w := setup(t)
	before := w.check(t)
	w.Patch(w.policy, func() { w.policy.Labels = map[string]string{"team": "a"} })
	if after := w.check(t); after.Fingerprint != before.Fingerprint {
		t.Errorf("%+v became %+v", before, after)
	}
}

func TestHalfAGuardIsRefused(t *testing.T) {
	for name, c := range map[string]struct{ manifests, want string }{
		"nothing":              {"", "no admission policy"},
		"policy alone":         {policy, "no binding that denies"},
		"binding alone":        {binding, "no admission policy"},
		"a binding that warns": {policy + "---" + strings.Replace(binding, "Deny", "Warn", 1), "no binding that denies"},
		"another's binding":    {policy + "---" + strings.Replace(binding, "policyName: guard-test", "policyName: other", 1), "unknown policy"},
		"a misspelt field":     {policy + "---" + strings.Replace(binding, "policyName", "policynam", 1), "unknown field"},
		"no YAML":              {"{", "parse the admission policies"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := guard.Parse([]byte(c.manifests)); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want …%s…", err, c.want)
			}
		})
	}
}

func TestPeopleAndMetricsHearOfIt(t *testing.T) {
	w := setup(t)
	ns := w.Namespace()
	reg := prometheus.NewRegistry()
	w.Run(func(mgr ctrl.Manager, _ *outbox.Feed) error {
		w.guard.Client, w.guard.Recorder, w.guard.Logger = mgr.GetClient(), mgr.GetEventRecorder("join-manager"), controllertest.Logger(t)
		w.guard.SystemNamespace, w.guard.Metrics, w.guard.SkipNameValidation = ns.Name, reg, true
		return w.guard.SetupWithManager(mgr)
	})
	gauge := func(want float64) {
		w.Eventually(func(context.Context) error {
			families, err := reg.Gather()
			if err != nil {
				return err
			}
			for _, f := range families {
				if f.GetName() == "join_admission_guarded" && f.GetMetric()[0].GetGauge().GetValue() == want {
					return nil
				}
			}
			return fmt.Errorf("join_admission_guarded is not %g: %v", want, families)
		})
	}
	told := func(reason, text string) {
		w.Eventually(func(ctx context.Context) error {
			var list eventsv1.EventList
			if err := w.Client.List(ctx, &list, client.InNamespace(ns.Name)); err != nil {
				return err
			}
			for _, e := range list.Items {
				if e.Reason == reason && strings.Contains(e.Note, text) {
					return nil
				}
			}
			return fmt.Errorf("no Event %s with %q among %d", reason, text, len(list.Items))
		})
	}
	gauge(1)
	w.Delete(w.binding)
	gauge(0)
	told("AdmissionUnguarded", "ValidatingAdmissionPolicyBinding guard-test is missing")
	w.binding = parse[admissionv1.ValidatingAdmissionPolicyBinding](t, binding)
	w.Create(w.binding)
	gauge(1)
	told("AdmissionGuarded", "recorded again")
}
