// Package tenant keeps the row of each tenant: a namespace by name and uid.
//
// A namespace that was deleted and made again by somebody else is another one: it
// stays blocked until the nodes of the old tenant are retired or deleted and its
// last certificate ran out. A namespace that loses its label, or is gone, keeps
// its nodes: joins are refused there, and nothing is revoked.
package tenant

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/controllers/outbox"
)

const (
	// TokensRole names the RoleBinding in each tenant's namespace, and the
	// ClusterRole behind it, by which the manager makes the Secrets of tokens.
	TokensRole = "join-operator-tokens"

	// resync makes a RoleBinding again that somebody deleted.
	resync = 5 * time.Minute
	// blockedWait is how soon to look whether a blocked name is free.
	blockedWait = time.Minute
)

// Reconciler keeps the rows of tenants.
type Reconciler struct {
	Client   client.Client
	DB       *pgxpool.Pool
	Feed     *outbox.Feed
	Recorder events.EventRecorder
	// SystemNamespace is the operator's own: the root tenant, label or not.
	SystemNamespace string
	// Never are namespaces that are no tenants whatever their label says: those
	// that hold keys, into which the manager must not get a way.
	Never []string
	// ServiceAccount is the manager's, in the operator's namespace.
	ServiceAccount string
	// Resync is how soon to look again; 5 min by default, a minute while blocked.
	Resync time.Duration
	// SkipNameValidation lets tests run several managers in one process.
	SkipNameValidation bool
}

// SetupWithManager adds the controller to a manager.
func (r *Reconciler) SetupWithManager(mgr ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(mgr).
		Named("tenant").
		For(&corev1.Namespace{}, builder.WithPredicates(standing)).
		WatchesRawSource(r.Feed.Source(outbox.Subscription{
			Keys:       func(context.Context, []outbox.Event) ([]reconcile.Request, error) { return nil, nil },
			Everything: r.everything,
		})).
		WithOptions(controller.Options{SkipNameValidation: &r.SkipNameValidation}).
		Complete(r)
}

// standing passes what changes a namespace's standing: its label, its going, and
// its being made again.
var standing = predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
	return e.ObjectOld.GetLabels()[v1alpha1.TenantLabel] != e.ObjectNew.GetLabels()[v1alpha1.TenantLabel] ||
		e.ObjectOld.GetUID() != e.ObjectNew.GetUID() ||
		e.ObjectOld.GetDeletionTimestamp().IsZero() != e.ObjectNew.GetDeletionTimestamp().IsZero()
}}

// everything is the tenants that rows know of: a namespace may have gone while no
// manager ran. The cache brings the namespaces that are there.
func (r *Reconciler) everything(ctx context.Context) ([]reconcile.Request, error) {
	names, err := tenants(ctx, r.DB)
	if err != nil {
		return nil, err
	}
	out := make([]reconcile.Request, len(names))
	for i, name := range names {
		out[i].NamespacedName = types.NamespacedName{Name: name}
	}
	return out, nil
}

// Reconcile brings one namespace's row up to date.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	now := namespace{root: req.Name == r.SystemNamespace}
	var ns corev1.Namespace
	switch err := r.Client.Get(ctx, req.NamespacedName, &ns); {
	case apierrors.IsNotFound(err):
	case err != nil:
		return ctrl.Result{}, fmt.Errorf("get Namespace %s: %w", req.Name, err)
	default:
		now.uid = string(ns.UID)
		now.going = !ns.DeletionTimestamp.IsZero()
		now.labelled = ns.Labels[v1alpha1.TenantLabel] == v1alpha1.TenantLabelValue && !slices.Contains(r.Never, req.Name)
	}
	before, after, err := settle(ctx, r.DB, req.Name, now)
	if err != nil {
		return ctrl.Result{}, err
	}
	r.tell(req.Name, before, after)
	if after == nil || after.uid != now.uid || now.going {
		return ctrl.Result{RequeueAfter: r.again(after)}, nil
	}
	if now.labelled && after.state == active {
		if err := r.bind(ctx, req.Name); err != nil {
			return ctrl.Result{}, err
		}
	}
	return ctrl.Result{RequeueAfter: r.again(after)}, nil
}

// again is how soon to look once more: never at what is gone.
func (r *Reconciler) again(after *row) time.Duration {
	switch {
	case after == nil, after.state == gone, after.state == unlabelled:
		return 0
	case r.Resync > 0:
		return r.Resync
	case after.state == blocked:
		return blockedWait
	}
	return resync
}

// tell says what a person should know of a change.
func (r *Reconciler) tell(name string, before, after *row) {
	if after == nil || (before != nil && before.state == after.state) {
		return
	}
	about := &corev1.ObjectReference{APIVersion: "v1", Kind: "Namespace", Namespace: name, Name: name}
	switch {
	case after.state == blocked:
		r.Recorder.Eventf(about, nil, corev1.EventTypeWarning, v1alpha1.ReasonTenantBlocked, "Admit",
			"Namespace %s was deleted and made again: machines join only once the old tenant's nodes are retired or deleted and its last certificate ran out", name)
	case after.state == unlabelled:
		r.Recorder.Eventf(about, nil, corev1.EventTypeWarning, v1alpha1.ReasonNotATenant, "Admit",
			"Namespace %s is no tenant any more: joins, renewals and commands are refused, and nothing is revoked", name)
	case after.state == active && before != nil:
		r.Recorder.Eventf(about, nil, corev1.EventTypeNormal, v1alpha1.ReasonInForce, "Admit", "Namespace %s is a tenant: machines may join", name)
	}
}

// bind makes the RoleBinding by which the manager makes Secrets in a tenant's
// namespace. It only ever creates: an admission policy keeps it to this one.
func (r *Reconciler) bind(ctx context.Context, namespace string) error {
	err := r.Client.Create(ctx, &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: TokensRole},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: TokensRole},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: r.SystemNamespace, Name: r.ServiceAccount}},
	})
	if err == nil || apierrors.IsAlreadyExists(err) || apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		return nil
	}
	return fmt.Errorf("create RoleBinding %s/%s: %w", namespace, TokensRole, err)
}
