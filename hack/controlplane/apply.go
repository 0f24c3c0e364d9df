package controlplane

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// fieldManager is who owns what Apply sets.
const fieldManager = "join-install"

// Decode reads the objects of a YAML stream.
func Decode(manifests []byte) ([]*unstructured.Unstructured, error) {
	var objects []*unstructured.Unstructured
	d := utilyaml.NewYAMLOrJSONDecoder(bytes.NewReader(manifests), 4096)
	for {
		u := &unstructured.Unstructured{}
		err := d.Decode(&u.Object)
		if errors.Is(err, io.EOF) {
			return objects, nil
		}
		if err != nil {
			return nil, err
		}
		if len(u.Object) > 0 {
			objects = append(objects, u)
		}
	}
}

// Apply applies objects server-side, in the order that lets each find what it
// needs: definitions first (and waits until they are served), then namespaces, then
// the rest. What is not accepted yet because something else is still on its way (a
// namespace, a webhook, a definition) is tried again until ctx ends.
func Apply(ctx context.Context, c client.Client, objects []*unstructured.Unstructured) error {
	for _, kinds := range [][]schema.GroupKind{
		{{Group: "apiextensions.k8s.io", Kind: "CustomResourceDefinition"}, {Kind: "Namespace"}},
		{{Kind: "ServiceAccount"}, {Group: "rbac.authorization.k8s.io", Kind: "ClusterRole"}, {Group: "rbac.authorization.k8s.io", Kind: "Role"}},
		nil,
	} {
		for _, u := range objects {
			if !among(u, kinds) {
				continue
			}
			if err := applyOne(ctx, c, u.DeepCopy()); err != nil {
				return fmt.Errorf("apply %s %s/%s: %w", u.GetKind(), u.GetNamespace(), u.GetName(), err)
			}
		}
		for _, u := range objects {
			if u.GetKind() == "CustomResourceDefinition" {
				if err := established(ctx, c, u.GetName()); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// among tells whether an object is of one of the kinds; no kinds are all.
func among(u *unstructured.Unstructured, kinds []schema.GroupKind) bool {
	for _, k := range kinds {
		if u.GroupVersionKind().GroupKind() == k {
			return true
		}
	}
	return kinds == nil
}

func applyOne(ctx context.Context, c client.Client, u *unstructured.Unstructured) error {
	return retry(ctx, func() error {
		err := c.Apply(ctx, client.ApplyConfigurationFromUnstructured(u.DeepCopy()), client.FieldOwner(fieldManager), client.ForceOwnership)
		if apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) {
			return permanent{err}
		}
		return err
	})
}

func established(ctx context.Context, c client.Client, name string) error {
	return retry(ctx, func() error {
		u := &unstructured.Unstructured{}
		u.SetGroupVersionKind(apiextensionsv1.SchemeGroupVersion.WithKind("CustomResourceDefinition"))
		if err := c.Get(ctx, client.ObjectKey{Name: name}, u); err != nil {
			return err
		}
		conditions, _, err := unstructured.NestedSlice(u.Object, "status", "conditions")
		if err != nil {
			return err // they are null until the server has looked at the definition
		}
		for _, condition := range conditions {
			if m, ok := condition.(map[string]any); ok && m["type"] == "Established" && m["status"] == "True" {
				return nil
			}
		}
		return fmt.Errorf("definition %s is not established", name)
	})
}

// permanent is an error that trying again does not cure.
type permanent struct{ error }

func retry(ctx context.Context, do func() error) error {
	for {
		err := do()
		var p permanent
		if err == nil || errors.As(err, &p) {
			return err
		}
		if meta.IsNoMatchError(err) && ctx.Err() == nil {
			err = fmt.Errorf("no such kind yet: %w", err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w (gave up: %w)", err, context.Cause(ctx))
		case <-time.After(100 * time.Millisecond):
		}
	}
}
