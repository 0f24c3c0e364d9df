package schema

import (
	"context"
	"errors"
	"os/exec"
	"strings"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/hack/controlplane"
	"github.com/better-compute/join-operator/test/kubetest"
)

// kubectl runs kubectl as an administrator.
func kubectl(t *testing.T, args ...string) string {
	t.Helper()
	path, err := controlplane.Binary("kubectl")
	if err != nil {
		t.Fatal(err)
	}
	args = append([]string{"--kubeconfig", kubetest.Kubeconfig(t, cluster(t).Admin())}, args...)
	out, err := exec.CommandContext(t.Context(), path, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("kubectl %s: %v\n%s", strings.Join(args[2:], " "), err, out)
	}
	return string(out)
}

func TestKubectlKnowsTheShortNamesAndTheCategory(t *testing.T) {
	cluster(t)
	out := kubectl(t, "api-resources", "--categories=join", "--no-headers")
	for _, want := range []string{"joinrequests", "jointokens", "fleetnodes", "fleetpools", "attestorconfigs", " jr ", " jt ", " fn ", " fp ", " ac "} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
}

func TestEveryFieldIsExplained(t *testing.T) {
	c := cluster(t)
	for path, want := range map[string]string{
		"jr":                         "kubectl approve joinrequest NAME",
		"jr.spec.claims":             "Nobody proved any of it",
		"jr.spec.decision":           "final from then on",
		"jt.spec.uses":               "It may grow",
		"fp.spec.requireApproval":    "wait for a person",
		"ac.spec.rules.when":         "Nothing that a machine merely claims is visible",
		"fn.spec.retired":            "takes the node out of the fleet",
		"jt.spec.expect.productUUID": "in any spelling",
	} {
		if out := kubectl(t, "explain", path); !strings.Contains(strings.Join(strings.Fields(out), " "), want) {
			t.Errorf("kubectl explain %s says no %q:\n%s", path, want, out)
		}
	}
	var list apiextensionsv1.CustomResourceDefinitionList
	if err := c.Client.List(t.Context(), &list); err != nil {
		t.Fatal(err)
	}
	if len(list.Items) < 5 {
		t.Fatalf("%d definitions", len(list.Items))
	}
	for _, crd := range list.Items {
		for _, v := range crd.Spec.Versions {
			undocumented(t, crd.Spec.Names.Kind, v.Schema.OpenAPIV3Schema)
		}
	}
}

// undocumented fails for each field without a description.
func undocumented(t *testing.T, path string, s *apiextensionsv1.JSONSchemaProps) {
	t.Helper()
	for name, p := range s.Properties {
		field := path + "." + name
		if p.Description == "" && name != "metadata" {
			t.Errorf("%s has no description", field)
		}
		undocumented(t, field, &p)
		if p.Items != nil && p.Items.Schema != nil {
			undocumented(t, field+"[]", p.Items.Schema)
		}
	}
}

func TestColumnsTellWhatMatters(t *testing.T) {
	c := cluster(t)
	ns := c.Namespace(t, nil)
	for kind, object := range map[string]string{"JoinRequest": full, "JoinToken": token, "FleetPool": "{}", "FleetNode": "{}"} {
		u := parse(t, ns, kind, object)
		u.SetName("x")
		if err := c.Client.Create(t.Context(), u); err != nil {
			t.Fatal(err)
		}
	}
	for kind, columns := range map[string][]string{
		"jr": {"VERDICT", "READY", "ATTESTOR", "ROLE", "POOL", "SERIAL", "DECIDED BY", "NODE", "AGE"},
		"jt": {"READY", "REASON", "ROLE", "POOL", "USES LEFT", "EXPIRES", "LAST USED", "SECRET", "AGE"},
		"fn": {"STATE", "ROLE", "POOL", "SITE", "ATTESTOR", "CERT EXPIRES", "LAST SEEN", "NODE KEY", "SERIAL", "AGE"},
		"fp": {"READY", "APPROVAL", "ACTIVE", "ADOPTING", "RETIRED", "LIFETIME", "AGE"},
	} {
		kubetest.Eventually(t, "columns of "+kind, func(context.Context) error {
			header, _, _ := strings.Cut(kubectl(t, "get", kind, "-n", ns, "-o", "wide"), "\n")
			for _, column := range columns {
				if !strings.Contains(header, column) {
					return errors.New(column + " is missing in " + header)
				}
			}
			return nil
		})
	}
}

// A definition that breaks the API server's own rules is told by a condition.
func TestDefinitionsHaveNoViolations(t *testing.T) {
	c := cluster(t)
	var list apiextensionsv1.CustomResourceDefinitionList
	if err := c.Client.List(t.Context(), &list, &client.ListOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, crd := range list.Items {
		for _, condition := range crd.Status.Conditions {
			if condition.Type == apiextensionsv1.NonStructuralSchema || (condition.Type == apiextensionsv1.NamesAccepted && condition.Status != apiextensionsv1.ConditionTrue) {
				t.Errorf("%s: %s %s: %s", crd.Name, condition.Type, condition.Status, condition.Message)
			}
		}
	}
}
