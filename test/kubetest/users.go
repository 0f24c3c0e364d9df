package kubetest

import (
	"path/filepath"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/hack/controlplane"
)

// Admin is an administrator's access (group system:masters).
func (c *Cluster) Admin() *rest.Config { return rest.CopyConfig(c.admin) }

// As is the access of a user with a client certificate, who has no rights but
// those that the test grants.
func (c *Cluster) As(tb testing.TB, user string, groups ...string) *rest.Config {
	tb.Helper()
	cfg, err := c.layout.As(user, groups...)
	if err != nil {
		tb.Fatal(err)
	}
	cfg.QPS = -1
	return cfg
}

// ServiceAccount is the access of a service account, by a token of an hour that
// the API server issued. The account must exist.
func (c *Cluster) ServiceAccount(tb testing.TB, namespace, name string) *rest.Config {
	tb.Helper()
	k, err := kubernetes.NewForConfig(c.admin)
	if err != nil {
		tb.Fatal(err)
	}
	token, err := k.CoreV1().ServiceAccounts(namespace).CreateToken(tb.Context(), name, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		tb.Fatalf("token of service account %s/%s: %v", namespace, name, err)
	}
	cfg := rest.AnonymousClientConfig(c.admin)
	cfg.BearerToken, cfg.QPS = token.Status.Token, -1
	return cfg
}

// ClientFor is a client with the access of cfg.
func ClientFor(tb testing.TB, cfg *rest.Config) client.Client {
	tb.Helper()
	cl, err := NewClient(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	return cl
}

// Kubeconfig writes cfg to a file of the test's and returns its path, for programs
// that take one.
func Kubeconfig(tb testing.TB, cfg *rest.Config) string {
	tb.Helper()
	path := filepath.Join(tb.TempDir(), "kubeconfig")
	if err := controlplane.WriteKubeconfig(path, cfg); err != nil {
		tb.Fatal(err)
	}
	return path
}

// Namespace makes a namespace named after the test, with the given labels.
func (c *Cluster) Namespace(tb testing.TB, labels map[string]string) string {
	tb.Helper()
	prefix := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9':
			return r
		case r >= 'A' && r <= 'Z':
			return r + 'a' - 'A'
		default:
			return '-'
		}
	}, tb.Name())
	prefix = strings.Trim(prefix[:min(len(prefix), 40)], "-")
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: prefix + "-", Labels: labels}}
	if err := c.Client.Create(tb.Context(), ns); err != nil {
		tb.Fatal(err)
	}
	return ns.Name
}
