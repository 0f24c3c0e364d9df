// Package joinrequest shows each pending join as a JoinRequest, and carries
// decisions, and only decisions, from the objects to the rows.
//
// The row is the truth about what a machine asked and what became of it; the
// object is where a person sees it and decides. An object that does not ask what
// its row asks, or whose decision may not be recorded, is thrown away and made
// anew, undecided: nobody stays stuck behind it. Each reconciliation is a few
// steps in order, the first of which that has something to do may end it; all can
// be done again, so that who is killed at any line is finished by the next.
package joinrequest

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/controllers/guard"
	"github.com/better-compute/join-operator/controllers/outbox"
)

const (
	// refresh is how coarse the count of others that wait is.
	refresh = 5 * time.Minute
	// again is how soon to look once more at what settles by itself.
	again = time.Second
	// maxBackoff is the longest pause after failures: the API server or the
	// database may come back at any moment, and people wait.
	maxBackoff = 10 * time.Second
)

// Reconciler brings requests' rows and objects together.
type Reconciler struct {
	Client client.Client
	// Live reads policies without a cache, just before a decision is recorded.
	Live     client.Reader
	DB       *pgxpool.Pool
	Feed     *outbox.Feed
	Guard    *guard.Guard
	Recorder events.EventRecorder
	Logger   *slog.Logger
	// SystemNamespace is the operator's own, where machines without a tenant wait.
	SystemNamespace string
	// Metrics may be nil.
	Metrics prometheus.Registerer
	// Limits are DefaultLimits where zero.
	Limits Limits
	// Sweep is the pause between two looks at the rows; 5 s by default.
	Sweep time.Duration
	// Now is the API servers' time, as near as it can be known; time.Now by default.
	// No expiry depends on it: those are the database's.
	Now func() time.Time
	// SkipNameValidation lets tests run several managers in one process.
	SkipNameValidation bool

	capped     prometheus.Gauge
	toldCapped map[string]bool
}

// SetupWithManager adds the controller to a manager.
func (r *Reconciler) SetupWithManager(mgr ctrl.Manager) error {
	if r.Limits == (Limits{}) {
		r.Limits = DefaultLimits
	}
	if r.Sweep == 0 {
		r.Sweep = 5 * time.Second
	}
	if r.Now == nil {
		r.Now = time.Now
	}
	r.toldCapped = map[string]bool{}
	r.capped = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "join_requests_capped", Help: "Machines that wait without a JoinRequest since too many are undecided.",
	})
	if r.Metrics != nil {
		if err := r.Metrics.Register(r.capped); err != nil {
			return fmt.Errorf("register metrics: %w", err)
		}
	}
	all := handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, _ client.Object) []reconcile.Request {
		found, err := r.objects(ctx)
		if err != nil {
			return nil // the cache is stopping
		}
		return found
	})
	return ctrl.NewControllerManagedBy(mgr).
		Named("joinrequest").
		For(&v1alpha1.JoinRequest{}, builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Watches(&admissionv1.ValidatingAdmissionPolicy{}, all, builder.WithPredicates(r.Guard.Ours())).
		Watches(&admissionv1.ValidatingAdmissionPolicyBinding{}, all, builder.WithPredicates(r.Guard.Ours())).
		Watches(&corev1.Namespace{}, handler.EnqueueRequestsFromMapFunc(r.inNamespace), builder.WithPredicates(standing)).
		WatchesRawSource(r.Feed.Source(outbox.Subscription{Keys: r.named, Everything: r.everything})).
		WatchesRawSource(source.Func(r.sweep)).
		WithOptions(controller.Options{
			MaxConcurrentReconciles: 4, SkipNameValidation: &r.SkipNameValidation,
			RateLimiter: workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](50*time.Millisecond, maxBackoff),
		}).
		Complete(r)
}

// standing passes namespaces that become tenants or stop being one.
var standing = predicate.Funcs{
	CreateFunc: func(event.CreateEvent) bool { return false },
	UpdateFunc: func(e event.UpdateEvent) bool {
		return e.ObjectOld.GetLabels()[v1alpha1.TenantLabel] != e.ObjectNew.GetLabels()[v1alpha1.TenantLabel]
	},
}

func (r *Reconciler) inNamespace(ctx context.Context, ns client.Object) []reconcile.Request {
	found, err := r.objects(ctx, client.InNamespace(ns.GetName()))
	if err != nil {
		return nil // the cache is stopping
	}
	return found
}

// request is one pending join as both sides know it. What is nil does not exist.
type request struct {
	key    types.NamespacedName
	object *v1alpha1.JoinRequest
	row    *row
	// held says why a decision waits to be recorded.
	held string
}

// step does one thing. It returns done to end the reconciliation.
type step func(context.Context, *request) (result ctrl.Result, done bool, err error)

// Reconcile brings one request's row and object together.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	q := &request{key: req.NamespacedName}
	for _, do := range []step{r.look, r.disown, r.expire, r.conclude, r.restore, r.verify, r.decide, r.show} {
		if result, done, err := do(ctx, q); err != nil || done {
			if apierrors.IsConflict(err) {
				// Another version is on its way through the cache.
				return ctrl.Result{RequeueAfter: again}, nil
			}
			return result, err
		}
	}
	return ctrl.Result{}, nil
}

// look reads the object, then the row: a row is committed before its object is
// made, so that an object without one has none.
func (r *Reconciler) look(ctx context.Context, q *request) (ctrl.Result, bool, error) {
	var jr v1alpha1.JoinRequest
	switch err := r.Client.Get(ctx, q.key, &jr); {
	case apierrors.IsNotFound(err):
	case err != nil:
		return ctrl.Result{}, true, fmt.Errorf("get JoinRequest: %w", err)
	default:
		q.object = &jr
	}
	return ctrl.Result{}, false, r.reread(ctx, q)
}

func (r *Reconciler) reread(ctx context.Context, q *request) error {
	row, err := read(ctx, r.DB, idOf(q.key.Name))
	if err != nil {
		return err
	}
	if row != nil && (row.namespace != q.key.Namespace || nameOf(row.id) != q.key.Name) {
		row = nil // an object elsewhere that borrows the name
	}
	q.row = row
	return nil
}

// disown deletes an object for which no machine asked.
func (r *Reconciler) disown(ctx context.Context, q *request) (ctrl.Result, bool, error) {
	if q.row != nil {
		return ctrl.Result{}, false, nil
	}
	if q.object == nil || !q.object.DeletionTimestamp.IsZero() {
		return ctrl.Result{}, true, nil
	}
	if err := r.delete(ctx, q.object); err != nil {
		return ctrl.Result{}, true, err
	}
	r.Recorder.Eventf(namespaceReference(q.key.Namespace), nil, corev1.EventTypeWarning, v1alpha1.ReasonNotWhatWasAsked, "Delete",
		"JoinRequest %s was deleted: no machine asked for it", q.key.Name)
	return ctrl.Result{}, true, nil
}

// expire ends a live request that came to its deadline.
func (r *Reconciler) expire(ctx context.Context, q *request) (ctrl.Result, bool, error) {
	if !q.row.due() {
		return ctrl.Result{}, false, nil
	}
	if err := expire(ctx, r.DB, q.row.id); err != nil {
		return ctrl.Result{}, true, err
	}
	if err := r.reread(ctx, q); err != nil {
		return ctrl.Result{}, true, err
	}
	return ctrl.Result{}, q.row == nil, nil
}

// conclude shows what a request ended as for an hour, and then lets the object go.
func (r *Reconciler) conclude(ctx context.Context, q *request) (ctrl.Result, bool, error) {
	at, over := q.row.over()
	if !over {
		return ctrl.Result{}, false, nil
	}
	if q.object == nil {
		return ctrl.Result{}, true, forget(ctx, r.DB, q.row.id, q.row.objectUID)
	}
	if left := at.Add(shownFor).Sub(q.row.now); left > 0 {
		result, _, err := r.show(ctx, q)
		if result.RequeueAfter == 0 || left < result.RequeueAfter {
			result.RequeueAfter = left
		}
		return result, true, err
	}
	if err := r.delete(ctx, q.object); err != nil {
		return ctrl.Result{}, true, err
	}
	return ctrl.Result{}, true, forget(ctx, r.DB, q.row.id, q.row.objectUID)
}

// restore makes the object of an undecided request that has none. A decision
// that is recorded stands without its object.
func (r *Reconciler) restore(ctx context.Context, q *request) (ctrl.Result, bool, error) {
	switch {
	case q.object != nil && q.object.DeletionTimestamp.IsZero():
		return ctrl.Result{}, false, nil
	case q.object != nil: // it goes once its finalizers are done, and comes back then
		return ctrl.Result{}, true, nil
	case q.row.verdict != "", q.row.capped:
		return ctrl.Result{}, true, nil
	}
	made, err := r.create(ctx, q.row)
	if err != nil || made == nil {
		return ctrl.Result{RequeueAfter: again}, true, err
	}
	return ctrl.Result{}, true, nil
}

// verify throws away an object that is not its row's.
func (r *Reconciler) verify(ctx context.Context, q *request) (ctrl.Result, bool, error) {
	switch uid := string(q.object.UID); {
	case !asks(q.object, q.row):
		return ctrl.Result{}, true, r.replace(ctx, q, v1alpha1.ReasonNotWhatWasAsked,
			"an object of this name that asked for something else was deleted: this one is what the machine asks for")
	case uid == q.row.objectUID:
	case q.row.objectUID != "" && q.object.Spec.Decision != nil && q.row.verdict == "":
		return ctrl.Result{}, true, r.replace(ctx, q, v1alpha1.ReasonDecisionDiscarded,
			"the decision stood on an object that somebody put in the place of the recorded one")
	default:
		if err := adopt(ctx, r.DB, q.row.id, q.object.UID); err != nil {
			return ctrl.Result{}, true, err
		}
		q.row.objectUID = uid
	}
	return ctrl.Result{}, false, nil
}

// decide carries a decision to the row, or throws it away.
func (r *Reconciler) decide(ctx context.Context, q *request) (ctrl.Result, bool, error) {
	if q.row.verdict != "" || q.object.Spec.Decision == nil {
		return ctrl.Result{}, false, nil
	}
	state, err := r.Guard.Check(ctx, r.Live)
	if err != nil {
		return ctrl.Result{}, true, err
	}
	root := q.key.Namespace == r.SystemNamespace
	missing, err := r.missing(ctx, q.object, root)
	if err != nil {
		return ctrl.Result{}, true, err
	}
	switch what, why := judge(q.object, state, root, missing); what {
	case wait:
		q.held = why
		return ctrl.Result{}, false, nil
	case discard:
		return ctrl.Result{}, true, r.replace(ctx, q, v1alpha1.ReasonDecisionDiscarded, why)
	}
	recorded, err := write(ctx, r.DB, q.row, q.object)
	if err != nil {
		return ctrl.Result{}, true, err
	}
	if err := r.reread(ctx, q); err != nil {
		return ctrl.Result{}, true, err
	}
	if !recorded || q.row == nil || q.row.ended != "" {
		return ctrl.Result{RequeueAfter: again}, true, nil
	}
	r.Logger.InfoContext(ctx, "decision recorded", "joinRequest", q.key, "verdict", q.row.verdict, "by", q.row.decidedBy)
	return ctrl.Result{}, false, nil
}

// missing returns the first right that the writer of a decision does not hold.
func (r *Reconciler) missing(ctx context.Context, jr *v1alpha1.JoinRequest, root bool) (*right, error) {
	if malformed(jr, root) != "" {
		return nil, nil // it is thrown away whoever wrote it
	}
	for _, right := range rights(jr) {
		sar := review(jr.Spec.Decision.DecidedBy, right)
		if err := r.Client.Create(ctx, sar); err != nil {
			return nil, fmt.Errorf("ask whether %q may %s: %w", jr.Spec.Decision.DecidedBy.Username, right, err)
		}
		if !sar.Status.Allowed {
			return &right, nil
		}
	}
	return nil, nil
}

// replace throws an object away and makes the undecided one again.
func (r *Reconciler) replace(ctx context.Context, q *request, reason, why string) error {
	if err := forget(ctx, r.DB, q.row.id, q.row.objectUID); err != nil {
		return err
	}
	if err := r.delete(ctx, q.object); err != nil {
		return err
	}
	r.Logger.WarnContext(ctx, "JoinRequest thrown away", "joinRequest", q.key, "reason", reason, "why", why)
	made, err := r.create(ctx, q.row)
	var about client.Object = made
	if made == nil {
		about = q.object
	}
	r.Recorder.Eventf(about, nil, corev1.EventTypeWarning, reason, "Replace", "%s; the request waits for a decision", brief(why))
	return err
}

// create makes the undecided object of a row, and returns nil where there is an
// object of the name, or no namespace to make it in.
func (r *Reconciler) create(ctx context.Context, w *row) (*v1alpha1.JoinRequest, error) {
	jr, err := object(w)
	if err != nil {
		return nil, reconcile.TerminalError(err)
	}
	switch err := r.Client.Create(ctx, jr); {
	case apierrors.IsAlreadyExists(err):
		return nil, nil
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause), apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("create JoinRequest %s/%s: %w", jr.Namespace, jr.Name, err)
	}
	return jr, adopt(ctx, r.DB, w.id, jr.UID)
}

// delete deletes exactly the object that was looked at.
func (r *Reconciler) delete(ctx context.Context, jr *v1alpha1.JoinRequest) error {
	err := r.Client.Delete(ctx, jr, client.Preconditions{UID: &jr.UID})
	if err = client.IgnoreNotFound(err); err != nil {
		return fmt.Errorf("delete JoinRequest %s/%s: %w", jr.Namespace, jr.Name, err)
	}
	return nil
}

// brief fits a text into an Event.
func brief(s string) string {
	const most = 900
	if len(s) > most {
		return s[:most] + "…"
	}
	return s
}
