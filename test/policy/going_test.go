package policy

import (
	"context"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/test/kubetest"
)

func merge(patch string) client.Patch {
	return client.RawPatch(types.MergePatchType, []byte(patch))
}

// In a namespace that is going, whoever may delete and patch by RBAC may help it
// along, but still neither decide nor forge.
func TestInANamespaceThatIsGoingOnlyWhatHelpsItAlongIsFree(t *testing.T) {
	w := newWorld(t)
	ns := w.Namespace(t, tenantLabels)
	bob, _ := w.user(t, ns, "bob", mayEdit)
	held := w.ask(t, ns, "gpu")
	if err := w.Client.Patch(t.Context(), held, merge(`{"metadata":{"finalizers":["example.com/one","example.com/two"]}}`)); err != nil {
		t.Fatal(err)
	}
	bobsIdentity := identity(t, bob, nil)
	if err := w.Client.Delete(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}); err != nil {
		t.Fatal(err)
	}
	kubetest.Eventually(t, "the namespace controller deletes the request", func(ctx context.Context) error {
		if err := w.Client.Get(ctx, client.ObjectKeyFromObject(held), held); err != nil {
			return err
		}
		if held.DeletionTimestamp.IsZero() {
			return fmt.Errorf("%s is not being deleted", held.Name)
		}
		return nil
	})
	// The namespace controller removed bob's role with all else.
	w.grantEverywhere(t, "bob")
	kubetest.Eventually(t, "bob may patch again", func(ctx context.Context) error {
		return bob.Get(ctx, client.ObjectKeyFromObject(held), &v1alpha1.JoinRequest{})
	})
	wantForbidden(t, "bob decides", bob.Patch(t.Context(), held.DeepCopy(), decision(`{"verdict":"Approved","decidedBy":`+bobsIdentity+`}`)), "fleetpools/gpu")
	wantForbidden(t, "bob labels", bob.Patch(t.Context(), held.DeepCopy(), merge(`{"metadata":{"labels":{"a":"b"}}}`)), "manage")
	wantForbidden(t, "bob creates", bob.Create(t.Context(), ask(ns, "gpu")))
	if err := bob.Patch(t.Context(), held.DeepCopy(), merge(`{"metadata":{"finalizers":["example.com/two"]}}`)); err != nil {
		t.Errorf("bob removes one finalizer: %v", err)
	}
	if err := bob.Patch(t.Context(), held.DeepCopy(), merge(`{"metadata":{"finalizers":null}}`)); err != nil {
		t.Errorf("bob removes the other: %v", err)
	}
	kubetest.Eventually(t, "the namespace is gone", func(ctx context.Context) error {
		err := w.Client.Get(ctx, client.ObjectKey{Name: ns}, &corev1.Namespace{})
		if !apierrors.IsNotFound(err) {
			return fmt.Errorf("still there: %v", err)
		}
		return nil
	})
}

// The garbage collector is whoever deletes what has an owner, and only those that
// may delete a request anyway can give it one.
func TestTheGarbageCollectorIsNotHindered(t *testing.T) {
	w := newWorld(t)
	ns := w.Namespace(t, tenantLabels)
	bob, _ := w.user(t, ns, "bob", mayEdit)
	owner := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "owner"}}
	if err := w.Client.Create(t.Context(), owner); err != nil {
		t.Fatal(err)
	}
	owned := fmt.Sprintf(`{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"ConfigMap","name":"owner","uid":%q}]}}`, owner.UID)
	jr := w.ask(t, ns, "gpu")
	wantForbidden(t, "bob gives it an owner", bob.Patch(t.Context(), jr.DeepCopy(), merge(owned)), "manage")
	if err := w.Client.Patch(t.Context(), jr, merge(owned)); err != nil {
		t.Fatal(err)
	}
	if err := w.Client.Delete(t.Context(), owner); err != nil {
		t.Fatal(err)
	}
	kubetest.Eventually(t, "the request is collected", func(ctx context.Context) error {
		err := w.Client.Get(ctx, client.ObjectKeyFromObject(jr), &v1alpha1.JoinRequest{})
		if !apierrors.IsNotFound(err) {
			return fmt.Errorf("still there: %v", err)
		}
		return nil
	})
	// Foreground deletion and orphaning leave a finalizer that the collector removes.
	for _, policy := range []metav1.DeletionPropagation{metav1.DeletePropagationForeground, metav1.DeletePropagationOrphan} {
		jr := w.ask(t, ns, "gpu")
		if err := w.manager.Delete(t.Context(), jr, client.PropagationPolicy(policy)); err != nil {
			t.Fatal(err)
		}
		kubetest.Eventually(t, string(policy), func(ctx context.Context) error {
			err := w.Client.Get(ctx, client.ObjectKeyFromObject(jr), &v1alpha1.JoinRequest{})
			if !apierrors.IsNotFound(err) {
				return fmt.Errorf("still there: %v", err)
			}
			return nil
		})
	}
}

// A decision and the removal of a finalizer are two writes.
func TestADecisionRemovesNoFinalizer(t *testing.T) {
	w := newWorld(t)
	ns := w.Namespace(t, tenantLabels)
	alice, _ := w.user(t, ns, "alice", mayEdit, mayApprove, rule([]string{"joinrequests"}, []string{"manage"}))
	jr := w.ask(t, ns, "gpu")
	if err := w.Client.Patch(t.Context(), jr, merge(`{"metadata":{"finalizers":["example.com/hold"],"labels":{"a":"b"},"annotations":{"a":"b"}}}`)); err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{"finalizers", "labels", "annotations"} {
		patch := fmt.Sprintf(`{"metadata":{%q:null},"spec":{"decision":{"verdict":"Approved","decidedBy":%s}}}`, part, identity(t, alice, nil))
		wantForbidden(t, part, alice.Patch(t.Context(), jr.DeepCopy(), merge(patch)), "alone")
	}
	if err := alice.Patch(t.Context(), jr.DeepCopy(), merge(`{"metadata":{"finalizers":null}}`)); err != nil {
		t.Errorf("alone: %v", err)
	}
}
