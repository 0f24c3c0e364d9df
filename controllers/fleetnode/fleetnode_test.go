package fleetnode_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/controllers/fleetnode"
	"github.com/better-compute/join-operator/controllers/internal/controllertest"
	"github.com/better-compute/join-operator/controllers/outbox"
)

func TestMain(m *testing.M) { controllertest.Main(m) }

type world struct {
	*controllertest.Env
	tenant string
	stop   func()
}

func setup(t *testing.T) *world {
	e := controllertest.New(t)
	w := &world{Env: e, tenant: e.Tenant()}
	e.Pool(w.tenant, "gpu")
	return w
}

func (w *world) run(limit int64) { w.runWith(limit, w.Client) }

// runWith runs a manager that looks at the namespace and the CRD by live.
func (w *world) runWith(limit int64, live client.Reader) {
	w.stop = w.Run(func(mgr ctrl.Manager, feed *outbox.Feed) error {
		return (&fleetnode.Reconciler{
			Client: mgr.GetClient(), Live: live, DB: w.Manager, Feed: feed, Recorder: mgr.GetEventRecorder("join-manager"),
			Budget: fleetnode.NewBudget(limit), SkipNameValidation: true,
		}).SetupWithManager(mgr)
	})
}

func (w *world) node(id string) *v1alpha1.FleetNode {
	return &v1alpha1.FleetNode{ObjectMeta: metav1.ObjectMeta{Namespace: w.tenant, Name: id}}
}

// ready waits until the condition Ready of a node's object is "status/reason".
func (w *world) ready(id, want string) *v1alpha1.FleetNode {
	fn := w.node(id)
	w.await(fn, v1alpha1.ConditionReady, want)
	return fn
}

func (w *world) await(fn *v1alpha1.FleetNode, condition, want string) {
	w.Eventually(func(ctx context.Context) error {
		if err := w.Client.Get(ctx, client.ObjectKeyFromObject(fn), fn); err != nil {
			return err
		}
		return controllertest.Condition(fn.Status.Conditions, condition, want)
	})
}

func (w *world) gone(o client.Object) {
	w.Eventually(func(ctx context.Context) error {
		err := w.Client.Get(ctx, client.ObjectKeyFromObject(o), o.DeepCopyObject().(client.Object))
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("it is still there (%v)", err)
	})
}

// rows is "nodes bindings certificates revoked" of a tenant's nodes.
func (w *world) rows(like string) string {
	return controllertest.Query[string](w.Env, `SELECT concat_ws(' ', (SELECT count(*) FROM nodes WHERE id LIKE $1), (SELECT count(*) FROM node_bindings WHERE node_id LIKE $1),
		count(*), count(revoked_at)) FROM node_certs WHERE node_id LIKE $1`, like)
}

func TestNodeIsShownAsItsRowIs(t *testing.T) {
	w := setup(t)
	w.Node(w.tenant, "gpu", "n-before") // while no manager ran
	w.run(0)
	w.ready("n-before", "False/Adopting")
	w.Node(w.tenant, "gpu", "n-after")
	fn := w.ready("n-after", "False/Adopting")
	s := fn.Status
	if s.State != v1alpha1.NodeAdopting || s.Role != "node" || s.Pool != "gpu" || s.Attestor != "join-token" || s.NodeKey != "unattested" ||
		s.Facts["k"] != "v" || s.JoinedAt == nil || s.ObservedGeneration != fn.Generation || fn.Spec.Pool != "gpu" {
		t.Errorf("status is %+v", s)
	}
	if want := controllertest.Query[string](w.Env, `SELECT encode(serial, 'hex') FROM node_certs WHERE node_id = 'n-after'`); s.Certificate == nil || s.Certificate.SerialNumber != want {
		t.Errorf("certificate is %+v, want %s", s.Certificate, want)
	}
	w.Exec(`UPDATE nodes SET state = 'active', last_seen_at = now(), node_key_uri = 'urn:bc:tpm-ak:00' WHERE id = 'n-after'`)
	w.event("node.active", "n-after", `{}`)
	fn = w.ready("n-after", "True/Active")
	if fn.Status.LastSeenAt == nil || fn.Status.NodeKey != "urn:bc:tpm-ak:00" {
		t.Errorf("status is %+v", fn.Status)
	}
	// An object that vanished is made again.
	w.stop()
	w.Patch(fn, func() { fn.Finalizers = nil })
	w.Delete(fn)
	w.gone(fn)
	w.run(0)
	w.ready("n-after", "True/Active")
	if got := w.rows("n-after"); got != "1 1 1 0" {
		t.Errorf("rows: %s", got)
	}
}

func (w *world) event(kind, node, data string) {
	w.Exec(`INSERT INTO events (type, tenant, node_id, data) VALUES ($1, $2, $3, $4)`, kind, w.tenant, node, []byte(data))
	w.Notify()
}

func TestRetirementRevokesAndKeepsTheBinding(t *testing.T) {
	w := setup(t)
	w.run(0)
	w.Node(w.tenant, "gpu", "n-old")
	fn := w.ready("n-old", "False/Adopting")
	w.Patch(fn, func() { fn.Spec.Retired = true })
	fn = w.ready("n-old", "False/Retired")
	if got := w.rows("n-old"); got != "1 1 1 1" || fn.Status.State != v1alpha1.NodeRetired {
		t.Errorf("rows: %s; status %+v", got, fn.Status)
	}
	if n := controllertest.Query[int](w.Env, `SELECT count(*) FROM audit_log a JOIN events e USING (node_id) WHERE a.action = 'node.retire' AND e.type = 'node.retired'`); n != 1 {
		t.Errorf("%d audit and event rows", n)
	}
	changed := fn.DeepCopy()
	changed.Spec.Retired = false
	if err := w.Client.Update(t.Context(), changed); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "spec.retired is final") {
		t.Errorf("taking it back: %v", err)
	}
	w.sees(t, "Retired", "n-old")
}

// sees waits for an Event with a reason about an object.
func (w *world) sees(t *testing.T, reason, name string) {
	t.Helper()
	w.Eventually(func(ctx context.Context) error {
		var events corev1.EventList
		if err := w.Client.List(ctx, &events, client.InNamespace(w.tenant)); err != nil {
			return err
		}
		for _, e := range events.Items {
			if e.Reason == reason && e.InvolvedObject.Name == name {
				return nil
			}
		}
		return fmt.Errorf("no Event %s about %s among %d", reason, name, len(events.Items))
	})
}

func TestDeletionForgetsTheNodeButNotItsCSR(t *testing.T) {
	w := setup(t)
	w.run(0)
	w.Node(w.tenant, "gpu", "n-bad")
	fn := w.ready("n-bad", "False/Adopting")
	w.Delete(fn)
	w.gone(fn)
	if got := w.rows("n-bad"); got != "0 0 1 1" {
		t.Errorf("rows: %s", got)
	}
	if n := controllertest.Query[int](w.Env, `SELECT count(*) FROM audit_log WHERE action = 'node.delete' AND node_id = 'n-bad'`); n != 1 {
		t.Errorf("%d audit rows", n)
	}
}

func TestAdoptionAndStrangers(t *testing.T) {
	w := setup(t)
	var hidden v1alpha1.FleetPool
	hidden.Namespace, hidden.Name, hidden.Spec.NodeObjects = w.tenant, "many", v1alpha1.NodeObjectsNone
	w.Create(&hidden)
	other := w.Tenant()
	w.Pool(other, "gpu")
	w.Node(other, "gpu", "n-theirs")
	w.Node(w.tenant, "many", "n-unseen")
	w.run(0)
	stranger, adopted := w.node("n-theirs"), w.node("n-unseen")
	w.Create(stranger)
	w.ready("n-theirs", "False/NoSuchNode")
	err := w.Client.Get(t.Context(), client.ObjectKeyFromObject(adopted), adopted)
	if !apierrors.IsNotFound(err) {
		t.Errorf("a node of a pool without objects is shown: %v", err)
	}
	w.Create(adopted)
	adopted = w.ready("n-unseen", "False/Adopting")
	if len(adopted.Finalizers) != 1 || adopted.Status.Pool != "many" {
		t.Errorf("adopted: %+v", adopted)
	}
	w.Delete(adopted)
	w.gone(adopted)
	w.Delete(stranger)
	w.gone(stranger)
	if got := w.rows("n-%"); got != "1 1 2 1" {
		t.Errorf("rows: %s", got)
	}
}

func TestMoveByAnAdministrator(t *testing.T) {
	w := setup(t)
	w.Pool(w.tenant, "cpu")
	w.run(0)
	w.Node(w.tenant, "gpu", "n-mover")
	fn := w.ready("n-mover", "False/Adopting")
	w.Patch(fn, func() { fn.Spec.Pool = "nowhere" })
	w.ready("n-mover", "False/PoolMissing")
	w.Patch(fn, func() { fn.Spec.Pool, fn.Spec.Site = "cpu", "fra1" })
	w.Eventually(func(ctx context.Context) error {
		if err := w.Client.Get(ctx, client.ObjectKeyFromObject(fn), fn); err != nil {
			return err
		}
		if fn.Status.Pool != "cpu" || fn.Status.Site != "fra1" {
			return fmt.Errorf("status is %+v", fn.Status)
		}
		return nil
	})
	if got := controllertest.Query[string](w.Env, `SELECT pool || site FROM nodes WHERE id = 'n-mover'`); got != "cpufra1" {
		t.Errorf("row is in %s", got)
	}
}

func TestConflictAndRefusedReclaimShow(t *testing.T) {
	w := setup(t)
	w.run(0)
	w.Node(w.tenant, "gpu", "n-twin")
	fn := w.ready("n-twin", "False/Adopting")
	w.event("node.reclaim-refused", "n-twin", `{"wanted": {"pool": "cpu"}, "has": {"pool": "gpu"}}`)
	w.await(fn, v1alpha1.ConditionReclaimRefused, "True/ReclaimRefused")
	for _, c := range fn.Status.Conditions {
		if c.Type == v1alpha1.ConditionReclaimRefused && (!strings.Contains(c.Message, `"cpu"`) || !strings.Contains(c.Message, `"gpu"`)) {
			t.Errorf("both values are missing: %s", c.Message)
		}
	}
	w.Exec(`UPDATE nodes SET conflicted_at = now() WHERE id = 'n-twin'`)
	w.event("node.conflicted", "n-twin", `{}`)
	w.ready("n-twin", "False/TwoMachinesOneIdentity")
	w.sees(t, v1alpha1.ReasonConflict, "n-twin")
	// It joins anew: the refusal is history.
	w.Exec(`UPDATE node_certs SET generation = 2, issued_at = now(), serial = 'another-serial'::bytea WHERE node_id = 'n-twin'`)
	w.event("node.joined", "n-twin", `{}`)
	w.await(fn, v1alpha1.ConditionReclaimRefused, "")
}

func TestObjectsAreCapped(t *testing.T) {
	w := setup(t)
	var before v1alpha1.FleetNodeList
	if err := w.Client.List(t.Context(), &before); err != nil {
		t.Fatal(err)
	}
	w.run(int64(len(before.Items)) + 2)
	for i := range 4 {
		w.Node(w.tenant, "gpu", fmt.Sprintf("n-%d", i))
	}
	w.ready("n-0", "False/Adopting")
	w.ready("n-1", "False/Adopting")
	var shown v1alpha1.FleetNodeList
	if err := w.Client.List(t.Context(), &shown, client.InNamespace(w.tenant)); err != nil || len(shown.Items) != 2 {
		t.Errorf("%d objects (%v), want 2", len(shown.Items), err)
	}
}

// burst makes n nodes and waits until all are shown.
func (w *world) burst(prefix string, n int) {
	for i := range n {
		w.Node(w.tenant, "gpu", fmt.Sprintf("%s-%03d", prefix, i))
	}
	w.Eventually(func(ctx context.Context) error {
		var list v1alpha1.FleetNodeList
		if err := w.Client.List(ctx, &list, client.InNamespace(w.tenant)); err != nil {
			return err
		}
		for i := range list.Items {
			if list.Items[i].Status.State == "" {
				return fmt.Errorf("%s has no status", list.Items[i].Name)
			}
		}
		if len(list.Items) != n {
			return fmt.Errorf("%d of %d are shown", len(list.Items), n)
		}
		return nil
	})
}

// held waits until every object that is left asks in vain, and counts them.
func (w *world) held(t *testing.T, atLeast int) int {
	t.Helper()
	var n int
	w.Eventually(func(ctx context.Context) error {
		var list v1alpha1.FleetNodeList
		if err := w.Client.List(ctx, &list, client.InNamespace(w.tenant)); err != nil {
			return err
		}
		n = 0
		for i := range list.Items {
			fn := &list.Items[i]
			if fn.Status.State == v1alpha1.NodeRetired {
				continue
			}
			if err := controllertest.Condition(fn.Status.Conditions, v1alpha1.ConditionHeld, "True/HeldByBrake"); err != nil {
				return fmt.Errorf("%s: %w", fn.Name, err)
			}
			n++
		}
		return nil
	})
	if n < atLeast {
		t.Fatalf("%d nodes are held, want %d at least", n, atLeast)
	}
	return n
}

// answer gives the burst that is held now a person's answer, as its message says.
func (w *world) answer(word string) {
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.tenant}}
	burst := controllertest.Query[string](w.Env, `SELECT burst FROM node_brakes WHERE tenant = '`+w.tenant+`'`)
	w.Patch(ns, func() {
		if ns.Annotations == nil {
			ns.Annotations = map[string]string{}
		}
		ns.Annotations[v1alpha1.BrakeAnnotation] = word + "-" + burst
	})
}

func (w *world) deleteAll(t *testing.T) {
	t.Helper()
	if err := w.Client.DeleteAllOf(t.Context(), &v1alpha1.FleetNode{}, client.InNamespace(w.tenant)); err != nil {
		t.Fatal(err)
	}
}

func TestPrunedFolderIsHeldUntilConfirmed(t *testing.T) {
	w := setup(t)
	w.run(0)
	w.burst("n", 50)
	w.deleteAll(t)
	held := w.held(t, 30)
	if left := controllertest.Query[int](w.Env, `SELECT count(*) FROM nodes`); left != held {
		t.Errorf("%d rows and %d held objects", left, held)
	}
	w.sees(t, v1alpha1.ReasonHeld, w.tenant)
	// A new manager keeps holding.
	w.stop()
	w.run(0)
	if again := w.held(t, 30); again != held {
		t.Errorf("%d nodes are held, %d were", again, held)
	}
	w.answer("confirm")
	w.Eventually(func(context.Context) error {
		if got := w.rows("n-%"); got != "0 0 50 50" {
			return fmt.Errorf("rows: %s", got)
		}
		if n := controllertest.Query[int](w.Env, `SELECT count(*) FROM node_brakes`); n != 0 {
			return fmt.Errorf("the brake is still on")
		}
		return nil
	})
	// One more is none of the burst; the next burst is not answered by the old word.
	w.Node(w.tenant, "gpu", "n-one")
	fn := w.ready("n-one", "False/Adopting")
	w.Delete(fn)
	w.gone(fn)
	w.burst("m", 50)
	w.deleteAll(t)
	held = w.held(t, 30)
	w.answer("cancel")
	w.Eventually(func(ctx context.Context) error {
		var list v1alpha1.FleetNodeList
		if err := w.Client.List(ctx, &list, client.InNamespace(w.tenant)); err != nil {
			return err
		}
		for i := range list.Items {
			if !list.Items[i].DeletionTimestamp.IsZero() {
				return fmt.Errorf("%s is still being deleted", list.Items[i].Name)
			}
		}
		if len(list.Items) != held {
			return fmt.Errorf("%d of %d are shown again", len(list.Items), held)
		}
		return nil
	})
	if left := controllertest.Query[int](w.Env, `SELECT count(*) FROM nodes n JOIN node_certs c ON c.node_id = n.id AND c.revoked_at IS NULL`); left != held {
		t.Errorf("%d nodes are left, %d were held", left, held)
	}
}

// crdGoing reads as if the CRD were being deleted.
type crdGoing struct{ client.Reader }

func (r crdGoing) Get(ctx context.Context, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
	err := r.Reader.Get(ctx, key, o, opts...)
	if crd, ok := o.(*metav1.PartialObjectMetadata); ok && crd.Kind == "CustomResourceDefinition" {
		now := metav1.Now()
		crd.DeletionTimestamp = &now
	}
	return err
}

func TestUninstallHoldsEvenOneNode(t *testing.T) {
	w := setup(t)
	w.runWith(0, crdGoing{w.Client})
	w.burst("n", 1)
	w.deleteAll(t)
	w.held(t, 1)
	if got := w.rows("n-%"); got != "1 1 1 0" {
		t.Errorf("rows: %s", got)
	}
	w.answer("cancel")
	w.Eventually(func(ctx context.Context) error {
		fn := w.node("n-000")
		if err := w.Client.Get(ctx, client.ObjectKeyFromObject(fn), fn); err != nil {
			return err
		}
		if !fn.DeletionTimestamp.IsZero() {
			return fmt.Errorf("still being deleted")
		}
		return nil
	})
	if got := w.rows("n-%"); got != "1 1 1 0" {
		t.Errorf("rows: %s", got)
	}
}

func TestBurstOfRetirementsIsHeldAndCancelled(t *testing.T) {
	w := setup(t)
	w.run(0)
	w.burst("n", 40)
	for i := range 40 {
		fn := w.node(fmt.Sprintf("n-%03d", i))
		w.Patch(fn, func() { fn.Spec.Retired = true })
	}
	held := w.held(t, 20)
	w.answer("cancel")
	w.Eventually(func(ctx context.Context) error {
		var list v1alpha1.FleetNodeList
		if err := w.Client.List(ctx, &list, client.InNamespace(w.tenant)); err != nil {
			return err
		}
		kept := 0
		for i := range list.Items {
			if !list.Items[i].Spec.Retired && list.Items[i].DeletionTimestamp.IsZero() {
				kept++
			}
		}
		if kept != held {
			return fmt.Errorf("%d of %d are back", kept, held)
		}
		return nil
	})
	if n := controllertest.Query[int](w.Env, `SELECT count(*) FROM nodes WHERE state <> 'retired'`); n != held {
		t.Errorf("%d rows are not retired, want %d", n, held)
	}
}

func TestNamespaceGoesAndTheFleetIsNotRevoked(t *testing.T) {
	w := setup(t)
	w.run(0)
	w.burst("n", 30)
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.tenant}}
	w.Delete(ns)
	w.gone(ns)
	if got := w.rows("n-%"); got != "30 30 30 0" {
		t.Errorf("rows: %s", got)
	}
	// Somebody else makes it again: they are shown nothing.
	again := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.tenant, Labels: map[string]string{v1alpha1.TenantLabel: "true"}}}
	w.Create(again)
	w.event("node.active", "n-000", `{}`)
	w.Node(w.Tenant(), "gpu", "n-elsewhere")
	var list v1alpha1.FleetNodeList
	w.Eventually(func(ctx context.Context) error {
		if err := w.Client.List(ctx, &list); err != nil {
			return err
		}
		for i := range list.Items {
			if list.Items[i].Name == "n-elsewhere" {
				return nil
			}
		}
		return fmt.Errorf("not shown yet")
	})
	for i := range list.Items {
		if list.Items[i].Namespace == w.tenant {
			t.Errorf("%s is shown to the new owner of the name", list.Items[i].Name)
		}
	}
	w.Delete(again)
	w.gone(again)
}
