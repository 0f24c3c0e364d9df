// Package fleetnode shows each node's row as a FleetNode and carries back what an
// administrator wants of it: to retire it, to delete it, to move it.
//
// Rows are the truth. An object that vanishes is made again from its row; only a
// deletion that this controller sees, through its finalizer, deletes a node.
// These never do, so that an uninstall or a pruned folder does not revoke a fleet:
//
//   - the namespace is going: its objects go, the rows stay, and the tenant is
//     blocked until somebody takes its machines out;
//   - a burst of deletions or retirements, or the deletion of the CRD: held until an
//     administrator confirms or cancels it by an annotation on the namespace.
//
// In a tenant that is blocked, because its namespace was made again by somebody
// else, nothing is shown; who knows a node's id may still make its FleetNode, to
// retire or delete it.
package fleetnode

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/controllers/conditions"
	"github.com/better-compute/join-operator/controllers/outbox"
	"github.com/better-compute/join-operator/controllers/tenancy"
)

// Reconciler projects node rows and carries out what FleetNodes ask for.
type Reconciler struct {
	Client client.Client
	// Live reads without a cache: before a node is deleted, its namespace and the
	// CRD are looked at as they are now.
	Live     client.Reader
	DB       *pgxpool.Pool
	Feed     *outbox.Feed
	Recorder events.EventRecorder
	Budget   *Budget
	// SkipNameValidation lets tests run several managers in one process.
	SkipNameValidation bool

	// holding is true while a brake may be tripped.
	holding atomic.Bool
}

// Reconcile brings one FleetNode and its row together.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var fn v1alpha1.FleetNode
	switch err := r.Client.Get(ctx, req.NamespacedName, &fn); {
	case apierrors.IsNotFound(err):
		return ctrl.Result{}, r.project(ctx, req.NamespacedName)
	case err != nil:
		return ctrl.Result{}, fmt.Errorf("get FleetNode: %w", err)
	}
	if !fn.DeletionTimestamp.IsZero() {
		return ctrl.Result{}, r.finalize(ctx, &fn)
	}
	return r.sync(ctx, &fn)
}

// project makes the object of a node that has none.
func (r *Reconciler) project(ctx context.Context, key types.NamespacedName) error {
	if err := r.settle(ctx, key.Namespace); err != nil || r.Budget.Full() {
		return err
	}
	n, err := readNode(ctx, r.DB, key)
	if err != nil || n == nil {
		return err
	}
	shown, err := r.shown(ctx, key.Namespace, n.pool)
	if err != nil || !shown || !r.Budget.take() {
		return err
	}
	fn := &v1alpha1.FleetNode{
		ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name, Finalizers: []string{v1alpha1.NodeFinalizer}},
		Spec:       v1alpha1.FleetNodeSpec{Retired: n.state == stateRetired, Pool: n.pool, Site: n.site},
	}
	if err := r.Client.Create(ctx, fn); err != nil {
		r.Budget.give()
		if apierrors.IsAlreadyExists(err) || apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
			return nil
		}
		return fmt.Errorf("create FleetNode %s: %w", key, err)
	}
	before := fn.DeepCopy()
	r.report(fn, n)
	return conditions.Patch(ctx, r.Client, before, fn)
}

// shown reports whether nodes of a pool are made into objects.
func (r *Reconciler) shown(ctx context.Context, namespace, pool string) (bool, error) {
	var fp v1alpha1.FleetPool
	switch err := r.Client.Get(ctx, types.NamespacedName{Namespace: namespace, Name: pool}, &fp); {
	case apierrors.IsNotFound(err): // the pool was deleted, its nodes stay
	case err != nil:
		return false, fmt.Errorf("get FleetPool: %w", err)
	case fp.Spec.NodeObjects == v1alpha1.NodeObjectsNone:
		return false, nil
	}
	standing, err := tenancy.Of(ctx, r.Client, r.DB, namespace)
	if err != nil {
		return false, err
	}
	return !standing.Terminating && standing.Reason != v1alpha1.ReasonTenantBlocked, nil
}

// sync carries out the spec and shows the row.
func (r *Reconciler) sync(ctx context.Context, fn *v1alpha1.FleetNode) (ctrl.Result, error) {
	key := client.ObjectKeyFromObject(fn)
	before := fn.DeepCopy()
	n, err := readNode(ctx, r.DB, key)
	if err != nil {
		return ctrl.Result{}, err
	}
	if n == nil {
		of(fn).False(v1alpha1.ConditionReady, v1alpha1.ReasonRowMissing, "the tenant has no node of this id")
		return ctrl.Result{}, conditions.Patch(ctx, r.Client, before, fn)
	}
	// An object that somebody made takes its node over from here.
	if controllerutil.AddFinalizer(fn, v1alpha1.NodeFinalizer) {
		if err := r.Client.Patch(ctx, fn, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
			return ctrl.Result{}, client.IgnoreNotFound(err)
		}
		before = fn.DeepCopy()
	}
	var result ctrl.Result
	var unmoved bool
	if fn.Spec.Retired && n.state != stateRetired {
		var gone bool
		if result, gone, err = r.retire(ctx, fn); err != nil || gone {
			return result, err
		}
	} else {
		clearHeld(fn)
		if unmoved, err = r.move(ctx, fn, n); err != nil {
			return ctrl.Result{}, err
		}
	}
	if n, err = readNode(ctx, r.DB, key); err != nil {
		return ctrl.Result{}, err
	}
	if n == nil {
		return ctrl.Result{RequeueAfter: time.Second}, nil // deleted in between
	}
	r.report(fn, n)
	if unmoved {
		of(fn).False(v1alpha1.ConditionReady, v1alpha1.ReasonPoolMissing, "spec.pool: there is no FleetPool %s; the node stays in %s", fn.Spec.Pool, n.pool)
	}
	r.announce(before, fn)
	if fn.Spec.Retired && n.state == stateRetired {
		if err := r.settle(ctx, fn.Namespace); err != nil {
			return ctrl.Result{}, err
		}
	}
	return result, conditions.Patch(ctx, r.Client, before, fn)
}

// move puts the node where the spec says; it reports true where that pool does
// not exist.
func (r *Reconciler) move(ctx context.Context, fn *v1alpha1.FleetNode, n *node) (unmoved bool, err error) {
	pool, site := fn.Spec.Pool, fn.Spec.Site
	if pool == "" {
		pool = n.pool
	}
	if site == "" {
		site = n.site
	}
	if (pool == n.pool && site == n.site) || n.state == stateRetired {
		return false, nil
	}
	err = move(ctx, r.DB, client.ObjectKeyFromObject(fn), pool, site)
	if errors.Is(err, errNoPool) {
		return true, nil
	}
	return false, err
}
