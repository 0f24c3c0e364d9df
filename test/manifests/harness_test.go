package manifests

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/better-compute/join-operator/hack/controlplane"
	"github.com/better-compute/join-operator/test/kubetest"
)

// values are what config/settings says, as the chart has it.
var values = []string{"--namespace", "join-system", "--set", "trustDomain=example.org", "--set", "endpoints={https://join.example.org}"}

func repository(t *testing.T) string {
	t.Helper()
	root, err := controlplane.RepositoryRoot()
	if err != nil {
		t.Fatal(err)
	}
	return root
}

// run runs one of the tools and returns what it prints.
func run(t *testing.T, stdin []byte, tool string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	path, err := controlplane.Binary(tool)
	if err != nil {
		t.Fatal(err)
	}
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(t.Context(), path, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(stdin), &out, &errs
	err = cmd.Run()
	return out.String(), errs.String(), err
}

// chart renders the chart, with more arguments for helm template.
func chart(t *testing.T, args ...string) []*unstructured.Unstructured {
	t.Helper()
	out, errs, err := helm(t, args...)
	if err != nil {
		t.Fatalf("helm template: %v\n%s", err, errs)
	}
	objects, err := controlplane.Decode([]byte(out))
	if err != nil {
		t.Fatal(err)
	}
	return objects
}

func helm(t *testing.T, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	return run(t, nil, "helm", append([]string{"template", "join", filepath.Join(repository(t), "charts", "join-operator")}, args...)...)
}

var definitions sync.Once

// cluster is the shared API server, which knows our kinds and cert-manager's.
func cluster(t *testing.T) *kubetest.Cluster {
	t.Helper()
	c := kubetest.Shared(t)
	definitions.Do(func() {
		c.ApplyFolder(t, "config/crd")
		cmd := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "github.com/cert-manager/cert-manager")
		cmd.Dir = filepath.Join(repository(t), "hack", "devcluster")
		dir, err := cmd.Output()
		if err != nil {
			t.Fatalf("find cert-manager's module: %v", err)
		}
		files, err := filepath.Glob(filepath.Join(strings.TrimSpace(string(dir)), "deploy", "crds", "*.yaml"))
		if err != nil || len(files) == 0 {
			t.Fatalf("%d definitions of cert-manager, %v", len(files), err)
		}
		for _, file := range files {
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			objects, err := controlplane.Decode(b)
			if err != nil {
				t.Fatal(err)
			}
			c.Apply(t, objects)
		}
	})
	return c
}

// taken has the API server judge objects as if they were applied, strictly, and
// fails where it refuses or warns. The namespaces that they lie in must be there, and
// are made; where one of the objects is that namespace, as that object says.
func taken(t *testing.T, objects []*unstructured.Unstructured) {
	t.Helper()
	c := cluster(t)
	var spaces []*unstructured.Unstructured
	seen := map[string]bool{}
	for _, o := range objects {
		if o.GetKind() == "Namespace" {
			spaces = append(spaces, o)
			seen[o.GetName()] = true
		}
	}
	for _, o := range objects {
		if ns := o.GetNamespace(); ns != "" && !seen[ns] {
			seen[ns] = true
			u := &unstructured.Unstructured{}
			u.SetAPIVersion("v1")
			u.SetKind("Namespace")
			u.SetName(ns)
			// The admission of pods warns about what it would not let run.
			u.SetLabels(map[string]string{"pod-security.kubernetes.io/warn": "restricted"})
			spaces = append(spaces, u)
		}
	}
	c.Apply(t, spaces)
	var all bytes.Buffer
	for _, o := range objects {
		b, err := yaml.Marshal(o.Object)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&all, "---\n%s", b)
	}
	out, errs, err := run(t, all.Bytes(), "kubectl", "--kubeconfig", kubetest.Kubeconfig(t, c.Admin()),
		"apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "-f", "-")
	if err != nil {
		t.Fatalf("refused: %v\n%s", err, errs)
	}
	if strings.Contains(errs, "Warning") {
		t.Errorf("taken with a warning:\n%s", errs)
	}
	if n := strings.Count(out, "serverside-applied"); n != len(objects) {
		t.Errorf("%d of %d objects were taken:\n%s", n, len(objects), out)
	}
}

// key names an object among others.
func key(o *unstructured.Unstructured) string {
	return fmt.Sprintf("%s %s/%s", o.GetKind(), o.GetNamespace(), o.GetName())
}

func keys(objects []*unstructured.Unstructured) []string {
	var out []string
	for _, o := range objects {
		out = append(out, key(o))
	}
	slices.Sort(out)
	return out
}
