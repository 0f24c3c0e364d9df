// Package secrets follows the Secrets of one namespace.
//
// The join service reads Secrets in the one namespace that holds nothing but its
// CAs and keys. Whatever changes there reaches it as a whole [Snapshot], so that
// who uses it never has to think of the order of events.
package secrets

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

// Snapshot is the data of all Secrets of the namespace by their names. Nobody may
// change it.
type Snapshot map[string]map[string][]byte

// settle is how long changes are collected before they are handed on: a CA's
// renewal is several writes in a row.
const settle = 20 * time.Millisecond

// Follow calls use with the namespace as it is, and again after each change, until
// ctx ends; never twice at once. It outlives outages of the API server: what was
// seen last stays. It fails only where cfg is none.
func Follow(ctx context.Context, cfg *rest.Config, namespace string, log *slog.Logger, use func(Snapshot)) error {
	client, err := corev1client.NewForConfig(cfg)
	if err != nil {
		return fmt.Errorf("client for secrets: %w", err)
	}
	list := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return client.Secrets(namespace).List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			return client.Secrets(namespace).Watch(ctx, o)
		},
	}
	informer := cache.NewSharedIndexInformer(list, &corev1.Secret{}, 0, cache.Indexers{})
	changed := make(chan struct{}, 1)
	notice := func() {
		select {
		case changed <- struct{}{}:
		default:
		}
	}
	if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { notice() }, UpdateFunc: func(any, any) { notice() }, DeleteFunc: func(any) { notice() },
	}); err != nil {
		return fmt.Errorf("watch secrets of %s: %w", namespace, err)
	}
	if err := informer.SetWatchErrorHandlerWithContext(func(_ context.Context, _ *cache.Reflector, err error) {
		log.Warn("the Secrets of the keys' namespace cannot be followed; what was read last stays in use", "namespace", namespace, "error", err)
	}); err != nil {
		return fmt.Errorf("watch secrets of %s: %w", namespace, err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		informer.RunWithContext(ctx)
	}()
	defer func() { <-done }()
	if !cache.WaitForCacheSync(ctx.Done(), informer.HasSynced) {
		return nil
	}
	notice() // also where the namespace is empty
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(settle):
		}
		snapshot := Snapshot{}
		for _, o := range informer.GetStore().List() {
			if s, ok := o.(*corev1.Secret); ok {
				snapshot[s.Name] = s.Data
			}
		}
		use(snapshot)
	}
}
