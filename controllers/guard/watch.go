package guard

import (
	"context"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
)

// request is the one key of the guard: it is looked at as a whole.
var request = reconcile.Request{NamespacedName: types.NamespacedName{Name: "admission"}}

func one(context.Context, client.Object) []reconcile.Request { return []reconcile.Request{request} }

// atStart looks once though no policy is there to be seen.
var atStart = source.Func(func(_ context.Context, q workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
	q.Add(request)
	return nil
})

// uidChanged passes an object that was deleted and made again between two looks.
var uidChanged = predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool { return e.ObjectOld.GetUID() != e.ObjectNew.GetUID() }}
