package fleetnode

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/controllers/conditions"
	"github.com/better-compute/join-operator/controllers/tenancy"
)

const (
	actionRetire = "Retire"
	actionDelete = "Delete"

	crdName = "fleetnodes.join.better-compute.dev"

	// settleWait is how soon to look whether a confirmed burst is over.
	settleWait = 5 * time.Second
)

// finalize deletes the node of an object that is being deleted, unless it must
// not, and lets the object go.
func (r *Reconciler) finalize(ctx context.Context, fn *v1alpha1.FleetNode) error {
	if !controllerutil.ContainsFinalizer(fn, v1alpha1.NodeFinalizer) {
		return nil
	}
	standing, err := tenancy.Of(ctx, r.Live, r.DB, fn.Namespace)
	if err != nil {
		return err
	}
	if standing.Terminating {
		return r.release(ctx, fn)
	}
	n, err := readNode(ctx, r.DB, client.ObjectKeyFromObject(fn))
	if err != nil {
		return err
	}
	if n == nil {
		return r.release(ctx, fn)
	}
	crdGoing, err := r.crdGoing(ctx)
	if err != nil {
		return err
	}
	out, err := braked(ctx, r.DB, client.ObjectKeyFromObject(fn), standing.Annotations[v1alpha1.BrakeAnnotation], crdGoing, r.wanted(ctx, fn), remove)
	if err != nil {
		return err
	}
	switch out.verdict {
	case hold:
		return r.hold(ctx, fn, standing, out)
	case cancel:
		// The object cannot be kept, its node can: it is shown again from its row.
		r.Recorder.Eventf(fn, nil, corev1.EventTypeNormal, v1alpha1.ReasonHeld, actionDelete, "The deletion was cancelled: the node stays, and its object is made again")
		return r.release(ctx, fn)
	}
	r.Recorder.Eventf(fn, nil, corev1.EventTypeNormal, "Deleted", actionDelete, "The node is deleted: its certificates are revoked and its bindings dropped")
	return r.release(ctx, fn)
}

// retire takes the node out, or holds or cancels that. gone is true where the
// object goes, to be made again without the wish.
func (r *Reconciler) retire(ctx context.Context, fn *v1alpha1.FleetNode) (result ctrl.Result, gone bool, err error) {
	standing, err := tenancy.Of(ctx, r.Live, r.DB, fn.Namespace)
	if err != nil {
		return ctrl.Result{}, false, err
	}
	out, err := braked(ctx, r.DB, client.ObjectKeyFromObject(fn), standing.Annotations[v1alpha1.BrakeAnnotation], false, r.wanted(ctx, fn), retire)
	if err != nil {
		return ctrl.Result{}, false, err
	}
	switch out.verdict {
	case hold:
		return ctrl.Result{}, true, r.hold(ctx, fn, standing, out)
	case cancel:
		// spec.retired is final, so the object is made again.
		if err := client.IgnoreNotFound(r.Client.Delete(ctx, fn, client.Preconditions{UID: &fn.UID})); err != nil {
			return ctrl.Result{}, false, fmt.Errorf("cancel a retirement: %w", err)
		}
		return ctrl.Result{}, true, r.release(ctx, fn)
	case goOnConfirmed:
		result.RequeueAfter = settleWait
	}
	clearHeld(fn)
	return result, false, nil
}

// hold shows that a node is held, and tells the tenant's people once.
func (r *Reconciler) hold(ctx context.Context, fn *v1alpha1.FleetNode, standing tenancy.Standing, out outcome) error {
	message := holdMessage(fn.Namespace, standing.Annotations[v1alpha1.BrakeAnnotation], out.brake)
	if out.tripped {
		ns := corev1.ObjectReference{APIVersion: "v1", Kind: "Namespace", Namespace: fn.Namespace, Name: fn.Namespace}
		r.Recorder.Eventf(&ns, nil, corev1.EventTypeWarning, v1alpha1.ReasonHeld, "Brake", "%s", message)
	}
	r.holding.Store(true)
	before := fn.DeepCopy()
	of(fn).True(v1alpha1.ConditionHeld, v1alpha1.ReasonHeld, "%s", message)
	return conditions.Patch(ctx, r.Client, before, fn)
}

func clearHeld(fn *v1alpha1.FleetNode) {
	of(fn).Drop(v1alpha1.ConditionHeld)
}

// release takes the finalizer off.
func (r *Reconciler) release(ctx context.Context, fn *v1alpha1.FleetNode) error {
	patch := client.MergeFromWithOptions(fn.DeepCopy(), client.MergeFromWithOptimisticLock{})
	if !controllerutil.RemoveFinalizer(fn, v1alpha1.NodeFinalizer) {
		return nil
	}
	if err := r.Client.Patch(ctx, fn, patch); err != nil {
		return client.IgnoreNotFound(err)
	}
	r.Budget.give()
	return nil
}

// wanted counts the nodes of a tenant that are to go, as the cache has them, the
// given one included.
func (r *Reconciler) wanted(ctx context.Context, fn *v1alpha1.FleetNode) func() (int64, error) {
	return func() (int64, error) {
		leaving, err := r.leaving(ctx, fn.Namespace)
		n := int64(len(leaving))
		for i := range leaving {
			if leaving[i].Name == fn.Name {
				return n, err
			}
		}
		return n + 1, err
	}
}

// settle ends a hold that nothing is held by any more.
func (r *Reconciler) settle(ctx context.Context, tenant string) error {
	if !r.holding.Load() {
		return nil
	}
	tenants, err := trippedBrakes(ctx, r.DB)
	if err != nil {
		return err
	}
	for _, t := range tenants {
		if t != tenant {
			continue
		}
		leaving, err := r.leaving(ctx, tenant)
		if err != nil || len(leaving) > 0 {
			return err
		}
		return releaseBrake(ctx, r.DB, tenant)
	}
	return nil
}

// crdGoing looks at the CRD as it is now; not to know is not to delete.
func (r *Reconciler) crdGoing(ctx context.Context) (bool, error) {
	var crd metav1.PartialObjectMetadata
	crd.SetGroupVersionKind(schema.GroupVersionKind{Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition"})
	switch err := r.Live.Get(ctx, client.ObjectKey{Name: crdName}, &crd); {
	case apierrors.IsNotFound(err):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("get the FleetNode CRD: %w", err)
	}
	return !crd.DeletionTimestamp.IsZero(), nil
}
