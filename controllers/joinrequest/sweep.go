package joinrequest

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/controllers/outbox"
)

type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]

// sweep looks, again and again, for rows that have come to something: what is
// missing is made and what is over is ended, though no event tells of it.
func (r *Reconciler) sweep(ctx context.Context, q queue) error {
	go func() {
		tick := time.NewTicker(r.Sweep)
		defer tick.Stop()
		for {
			if err := r.sweepOnce(ctx, q); err != nil && ctx.Err() == nil {
				r.Logger.WarnContext(ctx, "the sweep of join requests failed; trying again", "error", err)
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
		}
	}()
	return nil
}

func (r *Reconciler) sweepOnce(ctx context.Context, q queue) error {
	if err := r.makeRoom(ctx); err != nil {
		return err
	}
	due, err := keys(ctx, r.DB, dueSQL, undecidedFor, decidedFor, shownFor)
	if err != nil {
		return err
	}
	for _, k := range due {
		q.Add(reconcile.Request{NamespacedName: k})
	}
	return nil
}

// makeRoom lets capped requests have objects as others are decided, and says once
// where some have none.
func (r *Reconciler) makeRoom(ctx context.Context) error {
	capped, err := waiting(ctx, r.DB, cappedSQL)
	if err != nil {
		return err
	}
	if len(capped) == 0 {
		r.tellCapped(nil)
		return nil
	}
	shown, err := waiting(ctx, r.DB, shownSQL)
	if err != nil {
		return err
	}
	left, err := usesLeft(ctx, r.DB, tokensOf(capped))
	if err != nil {
		return err
	}
	admitted := r.Limits.admit(shown, capped, left)
	if len(admitted) > 0 {
		ids := make([]string, len(admitted))
		for i, w := range admitted {
			ids[i] = w.id
		}
		if err := uncap(ctx, r.DB, ids); err != nil {
			return err
		}
	}
	still := map[string]int{}
	for _, w := range capped {
		still[w.namespace]++
	}
	for _, w := range admitted {
		if still[w.namespace]--; still[w.namespace] == 0 {
			delete(still, w.namespace)
		}
	}
	r.tellCapped(still)
	return nil
}

func tokensOf(ws []waiter) []string {
	seen := map[string]bool{}
	var out []string
	for _, w := range ws {
		if w.token != "" && !seen[w.token] {
			seen[w.token] = true
			out = append(out, w.token)
		}
	}
	return out
}

// tellCapped measures, and makes one Event in each namespace where requests
// begin to wait unseen.
func (r *Reconciler) tellCapped(still map[string]int) {
	n := 0
	for namespace, count := range still {
		n += count
		if !r.toldCapped[namespace] {
			r.Recorder.Eventf(namespaceReference(namespace), nil, corev1.EventTypeWarning, v1alpha1.ReasonRequestsCapped, "Sweep",
				"%d machines wait without a JoinRequest, since too many are undecided: they are shown as others are decided", count)
		}
	}
	r.capped.Set(float64(n))
	clear(r.toldCapped)
	for namespace := range still {
		r.toldCapped[namespace] = true
	}
}

// named returns the requests that events speak of.
func (r *Reconciler) named(ctx context.Context, events []outbox.Event) ([]reconcile.Request, error) {
	var ids []string
	for _, e := range events {
		switch e.Type {
		case "join.pending", "join.decided", "node.joined":
		default:
			continue
		}
		var data struct {
			ID          string `json:"id"`
			JoinRequest string `json:"joinRequest"`
		}
		// What does not parse names no request.
		_ = json.Unmarshal(e.Data, &data)
		for _, name := range []string{data.ID, data.JoinRequest} {
			if name != "" {
				ids = append(ids, idOf(name))
			}
		}
	}
	if len(ids) == 0 {
		return nil, nil
	}
	found, err := keys(ctx, r.DB, namedSQL, ids)
	return requests(found), err
}

// everything is all objects and all live rows.
func (r *Reconciler) everything(ctx context.Context) ([]reconcile.Request, error) {
	live, err := keys(ctx, r.DB, liveSQL)
	if err != nil {
		return nil, err
	}
	objects, err := r.objects(ctx)
	return append(requests(live), objects...), err
}

// objects returns all JoinRequests.
func (r *Reconciler) objects(ctx context.Context, opts ...client.ListOption) ([]reconcile.Request, error) {
	var list v1alpha1.JoinRequestList
	if err := r.Client.List(ctx, &list, append(opts, client.UnsafeDisableDeepCopy)...); err != nil {
		return nil, fmt.Errorf("list JoinRequests: %w", err)
	}
	found := make([]types.NamespacedName, len(list.Items))
	for i := range list.Items {
		found[i] = client.ObjectKeyFromObject(&list.Items[i])
	}
	return requests(found), nil
}

func requests(keys []types.NamespacedName) []reconcile.Request {
	out := make([]reconcile.Request, len(keys))
	for i, k := range keys {
		out[i].NamespacedName = k
	}
	return out
}

// namespaceReference carries the namespace's own name as namespace, so that
// Events lie where the tenant's people look.
func namespaceReference(name string) *corev1.ObjectReference {
	return &corev1.ObjectReference{APIVersion: "v1", Kind: "Namespace", Namespace: name, Name: name}
}
