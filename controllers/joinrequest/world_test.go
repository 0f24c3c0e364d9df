package joinrequest_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	eventsv1 "k8s.io/api/events/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/controllers/guard"
	"github.com/better-compute/join-operator/controllers/internal/controllertest"
	"github.com/better-compute/join-operator/controllers/joinrequest"
	"github.com/better-compute/join-operator/controllers/outbox"
	"github.com/better-compute/join-operator/controllers/tenant"
	"github.com/better-compute/join-operator/test/pgtest"
)

func TestMain(m *testing.M) { controllertest.Main(m) }

// policies are a short form of the real ones: what this package needs of them is
// that they can be missing, altered and put back.
const policies = `
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: joinrequest-test}
spec:
  matchConstraints:
    resourceRules:
    - {apiGroups: [join.better-compute.dev], apiVersions: [v1alpha1], operations: [UPDATE], resources: [joinrequests]}
  matchConditions:
  - {name: decides, expression: "has(object.spec.decision) && !has(oldObject.spec.decision)"}
  validations:
  - expression: "object.spec.decision.decidedBy.username == request.userInfo.username"
    message: decidedBy must be the writer
  - expression: "authorizer.group('join.better-compute.dev').resource('fleetpools').namespace(object.metadata.namespace).name(object.spec.pool).check('approve').allowed()"
    message: the writer may not approve this pool
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: joinrequest-test}
spec: {policyName: joinrequest-test, validationActions: [Deny]}
`

// world is a tenant, two people and a manager.
type world struct {
	*controllertest.Env
	tenant     string
	alice, bob client.Client
	service    *pgxpool.Pool
	limits     joinrequest.Limits
	stop       func()
}

func setup(t *testing.T) *world {
	e := controllertest.New(t)
	w := &world{Env: e, tenant: e.Tenant(), service: e.DB.Pool(t, pgtest.Service)}
	w.alice, w.bob = w.person(t, "alice"), w.person(t, "bob")
	w.grant("edit", []string{"alice", "bob"}, rbacv1.PolicyRule{
		APIGroups: []string{v1alpha1.GroupVersion.Group}, Resources: []string{"joinrequests"}, Verbs: []string{"get", "patch"},
	})
	w.grant("approve", []string{"alice"}, rbacv1.PolicyRule{
		APIGroups: []string{v1alpha1.GroupVersion.Group}, Resources: []string{"fleetpools"}, ResourceNames: []string{"gpu"}, Verbs: []string{"approve"},
	})
	w.install()
	t.Cleanup(func() { w.uninstall() })
	return w
}

// start runs the manager.
func (w *world) start(t *testing.T) {
	t.Helper()
	expected, err := guard.Parse([]byte(policies))
	if err != nil {
		t.Fatal(err)
	}
	w.stop = w.Run(func(mgr ctrl.Manager, feed *outbox.Feed) error {
		live, err := client.New(mgr.GetConfig(), client.Options{Scheme: mgr.GetScheme()})
		if err != nil {
			return err
		}
		recorder := mgr.GetEventRecorder("join-manager")
		g := &guard.Guard{
			Client: mgr.GetClient(), Expected: expected, Recorder: recorder, Logger: controllertest.Logger(t),
			SystemNamespace: "default", SkipNameValidation: true,
		}
		tenants := &tenant.Reconciler{
			Client: mgr.GetClient(), DB: w.Manager, Feed: feed, Recorder: recorder,
			SystemNamespace: "default", ServiceAccount: "join-manager", SkipNameValidation: true,
		}
		requests := &joinrequest.Reconciler{
			Client: mgr.GetClient(), Live: live, DB: w.Manager, Feed: feed, Guard: g, Recorder: recorder, Logger: controllertest.Logger(t),
			SystemNamespace: "default", Limits: w.limits, Sweep: 200 * time.Millisecond, SkipNameValidation: true,
		}
		for _, c := range []interface{ SetupWithManager(ctrl.Manager) error }{g, tenants, requests} {
			if err := c.SetupWithManager(mgr); err != nil {
				return err
			}
		}
		return nil
	})
}

func (w *world) person(t *testing.T, name string) client.Client {
	t.Helper()
	config := rest.CopyConfig(w.Config)
	config.Impersonate.UserName = name
	c, err := client.New(config, client.Options{Scheme: w.Scheme})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func (w *world) grant(name string, people []string, rule rbacv1.PolicyRule) {
	meta := metav1.ObjectMeta{Namespace: w.tenant, Name: name}
	w.Create(&rbacv1.Role{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{rule}})
	binding := &rbacv1.RoleBinding{ObjectMeta: meta, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name}}
	for _, p := range people {
		binding.Subjects = append(binding.Subjects, rbacv1.Subject{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: p})
	}
	w.Create(binding)
}

func manifests() []*unstructured.Unstructured {
	var out []*unstructured.Unstructured
	d := yaml.NewYAMLOrJSONDecoder(bytes.NewReader([]byte(policies)), 4096)
	for {
		u := &unstructured.Unstructured{}
		if d.Decode(u) != nil {
			return out
		}
		out = append(out, u)
	}
}

func (w *world) install() {
	for _, u := range manifests() {
		w.Create(u)
	}
}

func (w *world) uninstall() {
	for _, u := range manifests() {
		// The test may have taken it away itself.
		_ = w.Client.Delete(context.Background(), u)
	}
}

// pends writes the row that a join leaves which waits for a person.
func (w *world) pends(t *testing.T, change ...func(*v1alpha1.JoinRequestAsk)) (id string) {
	t.Helper()
	id = strings.ToLower(rand.Text()[:16])
	csr := sha256.Sum256([]byte(id))
	ask := v1alpha1.JoinRequestAsk{
		Attestor: "join-token", Role: "node", Pool: "gpu",
		CSRSHA256: hex.EncodeToString(csr[:]), PublicKeySHA256: hex.EncodeToString(csr[:]), SubjectSHA256: hex.EncodeToString(csr[:]),
		Claims: map[string]v1alpha1.PrintableValue{"serialNumber": "SN-1"},
	}
	for _, c := range change {
		c(&ask)
	}
	spec, err := ask.Canonical()
	if err != nil {
		t.Fatal(err)
	}
	hash := sha256.Sum256(spec)
	_, err = w.service.Exec(t.Context(), `INSERT INTO join_requests
		(id, attestor_type, attestor, subject_sha256, subject_proved, csr_sha256, role, namespace, tenant, pool, facts_sha256, token_id, spec, spec_sha256)
		VALUES ($1, 'join-token', 'join-token', $2, false, $2, 'node', $3, $3, 'gpu', $2, 'tokentokento', $4, $5)`, id, csr[:], w.tenant, spec, hash[:])
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func (w *world) key(id string) client.ObjectKey {
	return client.ObjectKey{Namespace: w.tenant, Name: "jr-" + id}
}

// appears waits for the object of a row.
func (w *world) appears(id string) *v1alpha1.JoinRequest { return w.appearsAnew(id, "") }

// appearsAnew waits for an undecided object of a row that is not the given one.
func (w *world) appearsAnew(id string, not string) *v1alpha1.JoinRequest {
	jr := &v1alpha1.JoinRequest{}
	w.Eventually(func(ctx context.Context) error {
		*jr = v1alpha1.JoinRequest{}
		if err := w.Client.Get(ctx, w.key(id), jr); err != nil {
			return err
		}
		if string(jr.UID) == not || jr.Spec.Decision != nil {
			return fmt.Errorf("still the object %s with %+v", jr.UID, jr.Spec.Decision)
		}
		return nil
	})
	return jr
}

// becomes waits until a condition is "status/reason".
func (w *world) becomes(id, kind, want string) *v1alpha1.JoinRequest {
	jr := &v1alpha1.JoinRequest{}
	w.Eventually(func(ctx context.Context) error {
		*jr = v1alpha1.JoinRequest{}
		if err := w.Client.Get(ctx, w.key(id), jr); err != nil {
			return err
		}
		if jr.Status.ObservedGeneration != jr.Generation {
			return fmt.Errorf("observed generation %d of %d", jr.Status.ObservedGeneration, jr.Generation)
		}
		return controllertest.Condition(jr.Status.Conditions, kind, want)
	})
	return jr
}

func (w *world) goes(id string) {
	w.Eventually(func(ctx context.Context) error {
		if err := w.Client.Get(ctx, w.key(id), &v1alpha1.JoinRequest{}); client.IgnoreNotFound(err) != nil || err == nil {
			return fmt.Errorf("the object is still there: %v", err)
		}
		return nil
	})
}

// decides writes a decision as a person does.
func (w *world) decides(as client.Client, who, id string, verdict v1alpha1.Verdict) error {
	jr := &v1alpha1.JoinRequest{}
	jr.Namespace, jr.Name = w.tenant, "jr-"+id
	patch := fmt.Sprintf(`{"spec":{"decision":{"verdict":%q,"decidedBy":{"username":%q,"groups":["system:authenticated"]}}}}`, verdict, who)
	return as.Patch(context.Background(), jr, client.RawPatch("application/merge-patch+json", []byte(patch)))
}

// verdict is what the row says: "" while undecided.
func (w *world) verdict(id string) string {
	return controllertest.Query[string](w.Env, `SELECT coalesce(verdict, '') FROM join_requests WHERE id = $1`, id)
}

// told waits for an Event about an object with a reason and a text.
func (w *world) told(name, reason, text string) {
	w.Eventually(func(ctx context.Context) error {
		var list eventsv1.EventList
		if err := w.Client.List(ctx, &list, client.InNamespace(w.tenant)); err != nil {
			return err
		}
		for _, e := range list.Items {
			if e.Regarding.Name == name && e.Reason == reason && strings.Contains(e.Note, text) {
				return nil
			}
		}
		return fmt.Errorf("no Event about %s of %s with %q among %d", name, reason, text, len(list.Items))
	})
}
