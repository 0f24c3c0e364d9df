package secrets_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/better-compute/join-operator/joinsvc/secrets"
	"github.com/better-compute/join-operator/test/kubetest"
)

// follower is a Follow under way.
type follower struct {
	mu   sync.Mutex
	last secrets.Snapshot
	seen int
}

func follow(t *testing.T, cfg *rest.Config, namespace string) *follower {
	t.Helper()
	f := &follower{}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- secrets.Follow(ctx, cfg, namespace, slog.New(slog.DiscardHandler), func(s secrets.Snapshot) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.last, f.seen = s, f.seen+1
		})
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return f
}

// shows waits until the snapshot is "name=value" of each Secret's item "v".
func (f *follower) shows(t *testing.T, want ...string) {
	t.Helper()
	kubetest.Eventually(t, "the snapshot "+strings.Join(want, " "), func(context.Context) error {
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.seen == 0 {
			return errors.New("no snapshot yet")
		}
		got := []string{}
		for _, name := range slices.Sorted(maps.Keys(f.last)) {
			got = append(got, name+"="+string(f.last[name]["v"]))
		}
		if !slices.Equal(got, want) {
			return fmt.Errorf("it is %v", got)
		}
		return nil
	})
}

func secret(namespace, name, value string) *corev1.Secret {
	return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Data: map[string][]byte{"v": []byte(value)}}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestChangesArriveByARoleThatReadsOneNamespace uses the rights of config/rbac.
func TestChangesArriveByARoleThatReadsOneNamespace(t *testing.T) {
	c := kubetest.Shared(t)
	ns, other := c.Namespace(t, nil), c.Namespace(t, nil)
	must(t, c.Client.Create(t.Context(), &rbacv1.Role{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "keys"},
		Rules:      []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"secrets"}, Verbs: []string{"get", "list", "watch"}}},
	}))
	must(t, c.Client.Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "keys"},
		Subjects:   []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: "service"}},
		RoleRef:    rbacv1.RoleRef{Kind: "Role", APIGroup: rbacv1.GroupName, Name: "keys"},
	}))
	f := follow(t, c.As(t, "service"), ns)
	f.shows(t) // an empty namespace is one, too
	must(t, c.Client.Create(t.Context(), secret(other, "elsewhere", "x")))
	must(t, c.Client.Create(t.Context(), secret(ns, "a", "1")))
	must(t, c.Client.Create(t.Context(), secret(ns, "b", "1")))
	f.shows(t, "a=1", "b=1")
	must(t, c.Client.Update(t.Context(), secret(ns, "a", "2")))
	f.shows(t, "a=2", "b=1")
	must(t, c.Client.Delete(t.Context(), secret(ns, "b", "")))
	f.shows(t, "a=2")
}

// TestAnOutageIsWaitedOut starts while the API server is down, and loses it again.
func TestAnOutageIsWaitedOut(t *testing.T) {
	t.Parallel()
	c := kubetest.Start(t)
	ns := c.Namespace(t, nil)
	must(t, c.Client.Create(t.Context(), secret(ns, "a", "1")))
	c.StopAPIServer()
	f := follow(t, c.Admin(), ns)
	start := func() {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		must(t, c.StartAPIServer(ctx))
	}
	start()
	f.shows(t, "a=1")
	c.StopAPIServer()
	f.shows(t, "a=1")
	start()
	must(t, c.Client.Update(t.Context(), secret(ns, "a", "2")))
	f.shows(t, "a=2")
}
