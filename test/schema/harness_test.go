package schema

import (
	"strings"
	"sync"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/test/kubetest"
)

var definitions sync.Once

// cluster is the shared API server with the definitions and nothing else.
func cluster(t *testing.T) *kubetest.Cluster {
	t.Helper()
	c := kubetest.Shared(t)
	definitions.Do(func() { c.ApplyFolder(t, "config/crd") })
	return c
}

// parse reads an object of this product: kind, and the rest as YAML.
func parse(t *testing.T, namespace, kind, text string) *unstructured.Unstructured {
	t.Helper()
	u := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(text), &u.Object); err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	u.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind(kind))
	u.SetNamespace(namespace)
	return u
}

// change is a table's row: an object, and what happens to a merge patch of it.
// Where patch is empty, the creation is what is tested.
type change struct {
	object string
	patch  string
	// want is a part of the message of the refusal; empty where it is taken.
	want string
}

func (c change) test(t *testing.T, kind string) {
	t.Helper()
	cl := cluster(t)
	ns := cl.Namespace(t, nil)
	u := parse(t, ns, kind, c.object)
	if u.GetName() == "" {
		u.SetName("x")
	}
	err := cl.Client.Create(t.Context(), u)
	if c.patch != "" {
		if err != nil {
			t.Fatalf("create: %v", err)
		}
		err = cl.Client.Patch(t.Context(), u, client.RawPatch(types.MergePatchType, []byte(c.patch)))
	}
	refused(t, err, c.want)
}

// refused checks that err is a refusal of the schema that says what it must.
func refused(t *testing.T, err error, want string) {
	t.Helper()
	switch {
	case want == "" && err != nil:
		t.Errorf("refused: %v", err)
	case want != "" && err == nil:
		t.Errorf("taken; want a refusal that says %q", want)
	case want != "" && (!apierrors.IsInvalid(err) || !strings.Contains(err.Error(), want)):
		t.Errorf("got %v; want a refusal that says %q", err, want)
	}
}

func run(t *testing.T, kind string, changes map[string]change) {
	t.Helper()
	for name, c := range changes {
		t.Run(name, func(t *testing.T) { c.test(t, kind) })
	}
}
