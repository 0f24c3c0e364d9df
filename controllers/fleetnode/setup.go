package fleetnode

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
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

const (
	// nodeCoalesce lets a join and its confirmation cost one write.
	nodeCoalesce = 250 * time.Millisecond
	// pageSize is how many rows a full pass reads at a time.
	pageSize = 5000

	// leavingIndex finds the objects that ask for a deletion or a retirement that
	// has not been carried out.
	leavingIndex = "join.leaving"
)

// SetupWithManager adds the controller to a manager.
func (r *Reconciler) SetupWithManager(mgr ctrl.Manager) error {
	if r.Budget == nil {
		r.Budget = NewBudget(0)
	}
	err := mgr.GetFieldIndexer().IndexField(context.Background(), &v1alpha1.FleetNode{}, leavingIndex, func(o client.Object) []string {
		fn := o.(*v1alpha1.FleetNode)
		if !fn.DeletionTimestamp.IsZero() || (fn.Spec.Retired && fn.Status.State != v1alpha1.NodeRetired) {
			return []string{"true"}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("index FleetNodes: %w", err)
	}
	answered := predicate.Funcs{
		CreateFunc: func(event.CreateEvent) bool { return false },
		UpdateFunc: func(e event.UpdateEvent) bool {
			return e.ObjectOld.GetAnnotations()[v1alpha1.BrakeAnnotation] != e.ObjectNew.GetAnnotations()[v1alpha1.BrakeAnnotation] ||
				e.ObjectOld.GetDeletionTimestamp().IsZero() != e.ObjectNew.GetDeletionTimestamp().IsZero()
		},
	}
	return ctrl.NewControllerManagedBy(mgr).
		Named("fleetnode").
		For(&v1alpha1.FleetNode{}, builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Watches(&corev1.Namespace{}, handler.EnqueueRequestsFromMapFunc(r.heldIn), builder.WithPredicates(answered)).
		WatchesRawSource(r.Feed.Source(outbox.Subscription{Keys: r.nodesOf, Everything: r.everything, Coalesce: nodeCoalesce})).
		WithOptions(controller.Options{MaxConcurrentReconciles: 4, SkipNameValidation: &r.SkipNameValidation}).
		Complete(r)
}

// nodesOf returns the nodes that events speak of, but for new ones of pools that
// show none: a fleet that is kept in the database alone must not cost a look at
// every join.
func (r *Reconciler) nodesOf(ctx context.Context, events []outbox.Event) ([]reconcile.Request, error) {
	hidden, err := r.hidden(ctx)
	if err != nil {
		return nil, err
	}
	var out []reconcile.Request
	for _, e := range events {
		if e.NodeID != "" && strings.HasPrefix(e.Type, "node.") && !entersHidden(e, hidden) {
			out = append(out, reconcile.Request{NamespacedName: types.NamespacedName{Namespace: e.Tenant, Name: e.NodeID}})
		}
	}
	return out, nil
}

// entersHidden reports whether an event is a new node's in one of these pools.
func entersHidden(e outbox.Event, hidden []types.NamespacedName) bool {
	if e.Type != "node.joined" || len(hidden) == 0 {
		return false
	}
	var data struct {
		Pool      string `json:"pool"`
		Reclaimed bool   `json:"reclaimed"`
	}
	if err := json.Unmarshal(e.Data, &data); err != nil || data.Reclaimed {
		return false // a known node may have an object, whatever its pool shows
	}
	return slices.Contains(hidden, types.NamespacedName{Namespace: e.Tenant, Name: data.Pool})
}

// leaving returns the objects of a namespace that ask for what has not been
// carried out.
func (r *Reconciler) leaving(ctx context.Context, namespace string) ([]v1alpha1.FleetNode, error) {
	var list v1alpha1.FleetNodeList
	err := r.Client.List(ctx, &list, client.InNamespace(namespace), client.MatchingFields{leavingIndex: "true"}, client.UnsafeDisableDeepCopy)
	if err != nil {
		return nil, fmt.Errorf("list the leaving FleetNodes of %s: %w", namespace, err)
	}
	return list.Items, nil
}

func (r *Reconciler) heldIn(ctx context.Context, ns client.Object) []reconcile.Request {
	leaving, err := r.leaving(ctx, ns.GetName())
	if err != nil {
		return nil // the cache is stopping
	}
	out := make([]reconcile.Request, len(leaving))
	for i := range leaving {
		out[i].NamespacedName = client.ObjectKeyFromObject(&leaving[i])
	}
	return out
}

// everything is all objects, and the rows that have none, as many as there is
// room for.
func (r *Reconciler) everything(ctx context.Context) ([]reconcile.Request, error) {
	var nodes v1alpha1.FleetNodeList
	if err := r.Client.List(ctx, &nodes, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list FleetNodes: %w", err)
	}
	r.Budget.set(int64(len(nodes.Items)))
	seen := make(map[types.NamespacedName]bool, len(nodes.Items))
	out := make([]reconcile.Request, 0, len(nodes.Items))
	for i := range nodes.Items {
		key := client.ObjectKeyFromObject(&nodes.Items[i])
		seen[key] = true
		out = append(out, reconcile.Request{NamespacedName: key})
	}
	brakes, err := trippedBrakes(ctx, r.DB)
	if err != nil {
		return nil, err
	}
	r.holding.Store(len(brakes) > 0)
	for _, tenant := range brakes {
		if err := r.settle(ctx, tenant); err != nil {
			return nil, err
		}
	}
	hidden, err := r.hidden(ctx)
	if err != nil {
		return nil, err
	}
	room, after := r.Budget.room(), ""
	for room > 0 {
		rows, err := page(ctx, r.DB, after, hidden, pageSize)
		if err != nil {
			return nil, err
		}
		for _, key := range rows {
			if !seen[key] && room > 0 {
				room--
				out = append(out, reconcile.Request{NamespacedName: key})
			}
		}
		if len(rows) < pageSize {
			break
		}
		after = rows[len(rows)-1].Name
	}
	return out, nil
}

// hidden returns the pools whose nodes are not shown.
func (r *Reconciler) hidden(ctx context.Context) ([]types.NamespacedName, error) {
	var pools v1alpha1.FleetPoolList
	if err := r.Client.List(ctx, &pools, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list FleetPools: %w", err)
	}
	var out []types.NamespacedName
	for i := range pools.Items {
		if pools.Items[i].Spec.NodeObjects == v1alpha1.NodeObjectsNone {
			out = append(out, client.ObjectKeyFromObject(&pools.Items[i]))
		}
	}
	return out, nil
}
