// Package fleetpool publishes FleetPools as rows, by which every replica of the
// join service decides, and counts their nodes.
//
// A pool that is deleted is withdrawn at once: joins into it are refused and
// tokens for it wait. Its nodes stay as they are, and are in the pool again when
// one of its name is made.
package fleetpool

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/controllers/conditions"
	"github.com/better-compute/join-operator/controllers/outbox"
	"github.com/better-compute/join-operator/controllers/tenancy"
)

const (
	// countsCoalesce is how coarse the counts of nodes are.
	countsCoalesce = 5 * time.Second
	// tenantWait is how soon to look again for a namespace that is no tenant yet.
	tenantWait = 2 * time.Second
)

// NodeObjects says whether the cluster holds as many FleetNodes as it may.
type NodeObjects interface {
	// Full reports whether no further FleetNode is made.
	Full() bool
	// Limit is how many are made in the whole cluster.
	Limit() int64
}

// Reconciler publishes FleetPools.
type Reconciler struct {
	Client client.Client
	DB     *pgxpool.Pool
	Feed   *outbox.Feed
	// Objects is asked for the condition ObjectsCapped.
	Objects NodeObjects
	// SkipNameValidation lets tests run several managers in one process.
	SkipNameValidation bool
}

// SetupWithManager adds the controller to a manager.
func (r *Reconciler) SetupWithManager(mgr ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(mgr).
		Named("fleetpool").
		For(&v1alpha1.FleetPool{}, builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Watches(&corev1.Namespace{}, handler.EnqueueRequestsFromMapFunc(r.inNamespace), builder.WithPredicates(predicate.LabelChangedPredicate{})).
		WatchesRawSource(r.Feed.Source(outbox.Subscription{
			Keys: func(ctx context.Context, events []outbox.Event) ([]reconcile.Request, error) {
				pools, err := poolsOf(ctx, r.DB, events)
				return requests(pools), err
			},
			Everything: r.everything,
			Coalesce:   countsCoalesce,
		})).
		WithOptions(controller.Options{SkipNameValidation: &r.SkipNameValidation}).
		Complete(r)
}

// Reconcile publishes one pool, or withdraws it.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var pool v1alpha1.FleetPool
	switch err := r.Client.Get(ctx, req.NamespacedName, &pool); {
	case apierrors.IsNotFound(err):
		return ctrl.Result{}, withdraw(ctx, r.DB, req.NamespacedName)
	case err != nil:
		return ctrl.Result{}, fmt.Errorf("get FleetPool: %w", err)
	}
	if !pool.DeletionTimestamp.IsZero() {
		return ctrl.Result{}, withdraw(ctx, r.DB, req.NamespacedName)
	}
	before := pool.DeepCopy()
	result, err := r.reconcile(ctx, &pool)
	if err != nil {
		of(&pool).False(v1alpha1.ConditionReady, v1alpha1.ReasonDatabase, "the database does not answer: the pool's last published version stays in force")
	}
	return result, errors.Join(err, conditions.Patch(ctx, r.Client, before, &pool))
}

func (r *Reconciler) reconcile(ctx context.Context, pool *v1alpha1.FleetPool) (ctrl.Result, error) {
	standing, err := tenancy.Of(ctx, r.Client, r.DB, pool.Namespace)
	if err != nil {
		return ctrl.Result{}, err
	}
	if !standing.InForce {
		of(pool).False(v1alpha1.ConditionReady, standing.Reason, "%s", standing.Message)
		return ctrl.Result{RequeueAfter: tenantWait}, withdraw(ctx, r.DB, client.ObjectKeyFromObject(pool))
	}
	if err := publish(ctx, r.DB, pool); err != nil {
		return ctrl.Result{}, err
	}
	counts, err := count(ctx, r.DB, client.ObjectKeyFromObject(pool))
	if err != nil {
		return ctrl.Result{}, err
	}
	pool.Status.Nodes = &counts
	of(pool).True(v1alpha1.ConditionReady, v1alpha1.ReasonPublished, "every replica of the join service decides by this version")
	r.setCapped(pool)
	return ctrl.Result{}, nil
}

// setCapped says that nodes that join now will not be seen.
func (r *Reconciler) setCapped(pool *v1alpha1.FleetPool) {
	if r.Objects == nil || pool.Spec.NodeObjects == v1alpha1.NodeObjectsNone || !r.Objects.Full() {
		of(pool).Drop(v1alpha1.ConditionObjectsCapped)
		return
	}
	of(pool).True(v1alpha1.ConditionObjectsCapped, v1alpha1.ReasonObjectsCapped,
		"the cluster holds %d FleetNodes, and no more are made: nodes join, renew and are counted, but are not shown (spec.nodeObjects: None in large pools makes room)", r.Objects.Limit())
}

func of(pool *v1alpha1.FleetPool) conditions.Set {
	return conditions.Of(pool, &pool.Status.Conditions, &pool.Status.ObservedGeneration)
}

func lifetime(p *v1alpha1.FleetPool) time.Duration {
	if p.Spec.CertificateLifetime == nil {
		return 168 * time.Hour
	}
	return p.Spec.CertificateLifetime.Duration
}

func ramdiskLifetime(p *v1alpha1.FleetPool) time.Duration {
	if p.Spec.RamdiskLifetime == nil {
		return 24 * time.Hour
	}
	return p.Spec.RamdiskLifetime.Duration
}

func onConflict(p *v1alpha1.FleetPool) v1alpha1.ConflictPolicy {
	if p.Spec.OnConflict == "" {
		return v1alpha1.ConflictHold
	}
	return p.Spec.OnConflict
}

func (r *Reconciler) inNamespace(ctx context.Context, ns client.Object) []reconcile.Request {
	return r.list(ctx, client.InNamespace(ns.GetName()))
}

// everything is all pools, and all rows: a pool may have been deleted while no
// manager ran.
func (r *Reconciler) everything(ctx context.Context) ([]reconcile.Request, error) {
	rows, err := published(ctx, r.DB)
	return append(r.list(ctx), requests(rows)...), err
}

func (r *Reconciler) list(ctx context.Context, opts ...client.ListOption) []reconcile.Request {
	var pools v1alpha1.FleetPoolList
	if err := r.Client.List(ctx, &pools, opts...); err != nil {
		return nil // the cache is stopping
	}
	keys := make([]types.NamespacedName, len(pools.Items))
	for i := range pools.Items {
		keys[i] = client.ObjectKeyFromObject(&pools.Items[i])
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
