// Package bundle copies the newest join bundle from the database into the
// ConfigMap that images and cloud-init take it from.
package bundle

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/better-compute/join-operator/controllers/outbox"
)

const (
	// ConfigMapName is the ConfigMap in the operator's namespace.
	ConfigMapName = "join-bundle"
	// Key is the bundle's place in it.
	Key = "bundle.json"

	// GenerationAnnotation says which generation of the bundle it holds.
	GenerationAnnotation = "join.better-compute.dev/bundle-generation"

	// resync finds a bundle whose event was missed.
	resync = 5 * time.Minute
	// firstWait is how soon to look again for the first bundle.
	firstWait = 5 * time.Second
)

// Reconciler keeps the ConfigMap right.
type Reconciler struct {
	Client          client.Client
	DB              *pgxpool.Pool
	Feed            *outbox.Feed
	SystemNamespace string
	// SkipNameValidation lets tests run several managers in one process.
	SkipNameValidation bool

	configMaps client.Reader
}

// SetupWithManager adds the controller to a manager. It watches one ConfigMap
// through a cache of its own, since the manager may read no other.
func (r *Reconciler) SetupWithManager(mgr ctrl.Manager) error {
	own, err := cache.New(mgr.GetConfig(), cache.Options{
		Scheme: mgr.GetScheme(), Mapper: mgr.GetRESTMapper(), HTTPClient: mgr.GetHTTPClient(),
		ByObject: map[client.Object]cache.ByObject{&corev1.ConfigMap{}: {Namespaces: map[string]cache.Config{
			r.SystemNamespace: {FieldSelector: fields.OneTermEqualSelector("metadata.name", ConfigMapName)},
		}}},
	})
	if err != nil {
		return fmt.Errorf("cache of the bundle's ConfigMap: %w", err)
	}
	if err := mgr.Add(own); err != nil {
		return fmt.Errorf("cache of the bundle's ConfigMap: %w", err)
	}
	r.configMaps = own
	return ctrl.NewControllerManagedBy(mgr).
		Named("bundle").
		WatchesRawSource(source.Kind(own, &corev1.ConfigMap{}, &handler.TypedEnqueueRequestForObject[*corev1.ConfigMap]{})).
		WatchesRawSource(r.Feed.Source(outbox.Subscription{
			Keys: func(_ context.Context, events []outbox.Event) ([]reconcile.Request, error) {
				for _, e := range events {
					if e.Type == "bundle.published" {
						return r.only(), nil
					}
				}
				return nil, nil
			},
			Everything: func(context.Context) ([]reconcile.Request, error) { return r.only(), nil },
		})).
		WithOptions(controller.Options{SkipNameValidation: &r.SkipNameValidation}).
		Complete(r)
}

func (r *Reconciler) only() []reconcile.Request {
	return []reconcile.Request{{NamespacedName: r.key()}}
}

func (r *Reconciler) key() types.NamespacedName {
	return types.NamespacedName{Namespace: r.SystemNamespace, Name: ConfigMapName}
}

// Reconcile writes the newest bundle into the ConfigMap, whatever it holds.
func (r *Reconciler) Reconcile(ctx context.Context, _ ctrl.Request) (ctrl.Result, error) {
	generation, payload, err := newest(ctx, r.DB)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return ctrl.Result{RequeueAfter: firstWait}, nil // the keys' job has not run yet
	case err != nil:
		return ctrl.Result{}, err
	}
	var cm corev1.ConfigMap
	wanted := string(payload)
	switch err := r.configMaps.Get(ctx, r.key(), &cm); {
	case apierrors.IsNotFound(err):
		cm = corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: r.SystemNamespace, Name: ConfigMapName,
				Annotations: map[string]string{GenerationAnnotation: strconv.Itoa(generation)},
			},
			Data: map[string]string{Key: wanted},
		}
		if err := r.Client.Create(ctx, &cm); err != nil {
			return ctrl.Result{}, fmt.Errorf("create ConfigMap %s: %w", r.key(), err)
		}
		return ctrl.Result{RequeueAfter: resync}, nil
	case err != nil:
		return ctrl.Result{}, fmt.Errorf("get ConfigMap %s: %w", r.key(), err)
	}
	if cm.Data[Key] == wanted && len(cm.Data) == 1 && len(cm.BinaryData) == 0 && cm.Annotations[GenerationAnnotation] == strconv.Itoa(generation) {
		return ctrl.Result{RequeueAfter: resync}, nil
	}
	cm.Data, cm.BinaryData = map[string]string{Key: wanted}, nil
	if cm.Annotations == nil {
		cm.Annotations = map[string]string{}
	}
	cm.Annotations[GenerationAnnotation] = strconv.Itoa(generation)
	if err := r.Client.Update(ctx, &cm); err != nil {
		return ctrl.Result{}, fmt.Errorf("update ConfigMap %s: %w", r.key(), err)
	}
	return ctrl.Result{RequeueAfter: resync}, nil
}
