package jointoken

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/controllers/outbox"
)

// usesCoalesce is how coarse usesLeft and lastUsedAt are.
const usesCoalesce = time.Second

// SetupWithManager adds the controller to a manager.
func (r *Reconciler) SetupWithManager(mgr ctrl.Manager) error {
	if r.Resync == 0 {
		r.Resync = 10 * time.Minute
	}
	return ctrl.NewControllerManagedBy(mgr).
		Named("jointoken").
		For(&v1alpha1.JoinToken{}, builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Watches(&v1alpha1.FleetPool{}, handler.EnqueueRequestsFromMapFunc(r.forPool), builder.WithPredicates(published)).
		Watches(&corev1.Namespace{}, handler.EnqueueRequestsFromMapFunc(r.inNamespace), builder.WithPredicates(predicate.LabelChangedPredicate{})).
		WatchesRawSource(r.Feed.Source(outbox.Subscription{Keys: r.named, Everything: r.everything, Coalesce: usesCoalesce})).
		WithOptions(controller.Options{MaxConcurrentReconciles: 4, SkipNameValidation: &r.SkipNameValidation}).
		Complete(r)
}

// published passes pools that appear, go, or change whether they are in force,
// and not each change of their counts.
var published = predicate.Funcs{
	UpdateFunc: func(e event.UpdateEvent) bool { return inForceNow(e.ObjectOld) != inForceNow(e.ObjectNew) },
}

func inForceNow(o client.Object) bool {
	pool, ok := o.(*v1alpha1.FleetPool)
	return ok && meta.IsStatusConditionTrue(pool.Status.Conditions, v1alpha1.ConditionReady)
}

// named returns the JoinTokens that events spent uses of.
func (r *Reconciler) named(ctx context.Context, events []outbox.Event) ([]reconcile.Request, error) {
	tokens, err := outbox.Tokens(ctx, r.DB, events)
	if err != nil {
		return nil, err
	}
	keys := make([]types.NamespacedName, 0, len(tokens))
	for _, t := range tokens {
		keys = append(keys, t.NamespacedName)
	}
	return requests(keys), nil
}

// everything is all objects, and all rows in force: an object may have been torn
// away while no manager ran.
func (r *Reconciler) everything(ctx context.Context) ([]reconcile.Request, error) {
	rows, err := inForce(ctx, r.DB)
	if err != nil {
		return nil, err
	}
	return append(r.list(ctx, ""), requests(rows)...), nil
}

func (r *Reconciler) forPool(ctx context.Context, pool client.Object) []reconcile.Request {
	return r.list(ctx, pool.GetName(), client.InNamespace(pool.GetNamespace()))
}

func (r *Reconciler) inNamespace(ctx context.Context, ns client.Object) []reconcile.Request {
	return r.list(ctx, "", client.InNamespace(ns.GetName()))
}

// list returns the JoinTokens for a pool, or all where it is empty.
func (r *Reconciler) list(ctx context.Context, pool string, opts ...client.ListOption) []reconcile.Request {
	var tokens v1alpha1.JoinTokenList
	if err := r.Client.List(ctx, &tokens, opts...); err != nil {
		return nil // the cache is stopping
	}
	var keys []types.NamespacedName
	for i := range tokens.Items {
		if pool == "" || tokens.Items[i].Spec.Pool == pool {
			keys = append(keys, client.ObjectKeyFromObject(&tokens.Items[i]))
		}
	}
	return requests(keys)
}

func requests(keys []types.NamespacedName) []reconcile.Request {
	out := make([]reconcile.Request, len(keys))
	for i, k := range keys {
		out[i] = reconcile.Request{NamespacedName: k}
	}
	return out
}
