package kubetest_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/test/kubetest"
)

func TestUsersHaveTheRightsThatTheyAreGranted(t *testing.T) {
	c := kubetest.Shared(t)
	ns := c.Namespace(t, nil)
	alice := kubetest.ClientFor(t, c.As(t, "alice", "operators"))
	if err := alice.List(t.Context(), &corev1.SecretList{}, client.InNamespace(ns)); !apierrors.IsForbidden(err) {
		t.Fatalf("alice lists secrets: %v, want forbidden", err)
	}
	if err := c.Client.Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "operators"},
		Subjects:   []rbacv1.Subject{{Kind: "Group", APIGroup: rbacv1.GroupName, Name: "operators"}},
		RoleRef:    rbacv1.RoleRef{Kind: "ClusterRole", APIGroup: rbacv1.GroupName, Name: "admin"},
	}); err != nil {
		t.Fatal(err)
	}
	kubetest.Eventually(t, "alice's right", func(ctx context.Context) error {
		return alice.List(ctx, &corev1.SecretList{}, client.InNamespace(ns))
	})
}

func TestServiceAccountsComeWithTheServersOwnTokens(t *testing.T) {
	c := kubetest.Shared(t)
	ns := c.Namespace(t, nil)
	kubetest.Eventually(t, "the namespace's default account", func(ctx context.Context) error {
		return c.Client.Get(ctx, client.ObjectKey{Namespace: ns, Name: "default"}, &corev1.ServiceAccount{})
	})
	sa := kubetest.ClientFor(t, c.ServiceAccount(t, ns, "default"))
	err := sa.List(t.Context(), &corev1.PodList{}, client.InNamespace(ns))
	if want := fmt.Sprintf("system:serviceaccount:%s:default", ns); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), want) {
		t.Errorf("got %v, want forbidden for %s", err, want)
	}
}

func TestNamespacesAreDeletedByTheNamespaceController(t *testing.T) {
	c := kubetest.Shared(t)
	ns := c.Namespace(t, nil)
	if err := c.Client.Delete(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}); err != nil {
		t.Fatal(err)
	}
	kubetest.Eventually(t, "the namespace's end", func(ctx context.Context) error {
		err := c.Client.Get(ctx, client.ObjectKey{Name: ns}, &corev1.Namespace{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("still there (%v)", err)
	})
}

func TestAClusterOfOnesOwnComesBackAfterAnOutage(t *testing.T) {
	t.Parallel()
	c := kubetest.Start(t)
	ns := c.Namespace(t, nil)
	c.StopAPIServer()
	k, err := kubernetes.NewForConfig(c.Admin())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := k.ServerVersion(); err == nil {
		t.Fatal("a stopped server answers")
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := c.StartAPIServer(ctx); err != nil {
		t.Fatal(err)
	}
	if err := c.Client.Get(t.Context(), client.ObjectKey{Name: ns}, &corev1.Namespace{}); err != nil {
		t.Error(err)
	}
}
