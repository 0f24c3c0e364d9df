package manifests

import (
	"context"
	"fmt"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/test/kubetest"
)

// The operator's ClusterIssuers would issue for anybody who may ask in any namespace:
// a tenant's editor could be the gateway.
func TestTheOperatorsIssuersServeItsNamespaceAlone(t *testing.T) {
	c := cluster(t)
	var policy []*unstructured.Unstructured
	for _, o := range kubetest.Kustomize(t, "config/certmanager") {
		if strings.HasPrefix(o.GetKind(), "ValidatingAdmissionPolicy") {
			policy = append(policy, o)
		}
	}
	c.Apply(t, policy)
	c.ApplyFolder(t, "config/namespaces")
	tenant := c.Namespace(t, nil)
	ask := func(ctx context.Context, namespace, kind, issuer string) error {
		return c.Client.Create(ctx, &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "cert-manager.io/v1", "kind": "CertificateRequest",
			"metadata": map[string]any{"generateName": "x-", "namespace": namespace},
			"spec":     map[string]any{"request": "AA==", "issuerRef": map[string]any{"group": "cert-manager.io", "kind": kind, "name": issuer}},
		}}, client.DryRunAll)
	}
	kubetest.Eventually(t, "the policy is in force", func(ctx context.Context) error {
		if err := ask(ctx, tenant, "ClusterIssuer", "join-internal-ca"); !apierrors.IsForbidden(err) {
			return fmt.Errorf("got %v, want Forbidden", err)
		}
		return nil
	})
	for issuer, kind := range map[string]string{"join-tls-ca": "ClusterIssuer", "join-internal-ca": "ClusterIssuer"} {
		if err := ask(t.Context(), tenant, kind, issuer); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), issuer) {
			t.Errorf("a tenant asks %s: got %v, want Forbidden", issuer, err)
		}
		if err := ask(t.Context(), "join-system", kind, issuer); err != nil {
			t.Errorf("the operator asks %s: %v", issuer, err)
		}
	}
	// Others of that name are none of ours.
	for kind, issuer := range map[string]string{"Issuer": "join-tls-ca", "ClusterIssuer": "letsencrypt"} {
		if err := ask(t.Context(), tenant, kind, issuer); err != nil {
			t.Errorf("a tenant asks the %s %s: %v", kind, issuer, err)
		}
	}
}
