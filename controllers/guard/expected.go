package guard

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
	sigsyaml "sigs.k8s.io/yaml"
)

// Expected is the admission policies and their bindings as this release needs
// them, by name.
type Expected struct {
	policies map[string]admissionv1.ValidatingAdmissionPolicySpec
	bindings map[string]admissionv1.ValidatingAdmissionPolicyBindingSpec
}

// Parse reads the manifests that are installed: any number of YAML documents, of
// which other kinds are passed over. Every policy must have a binding that denies,
// and every binding its policy, since half a guard is none.
func Parse(manifests ...[]byte) (Expected, error) {
	e := Expected{
		policies: map[string]admissionv1.ValidatingAdmissionPolicySpec{},
		bindings: map[string]admissionv1.ValidatingAdmissionPolicyBindingSpec{},
	}
	for _, m := range manifests {
		documents := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(m)))
		for {
			document, err := documents.Read()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return Expected{}, fmt.Errorf("read the admission policies: %w", err)
			}
			if err := e.add(document); err != nil {
				return Expected{}, err
			}
		}
	}
	return e, e.complete()
}

func (e Expected) add(document []byte) error {
	var kind metav1.TypeMeta
	if err := sigsyaml.Unmarshal(document, &kind); err != nil {
		return fmt.Errorf("parse the admission policies: %w", err)
	}
	if kind.APIVersion != admissionv1.SchemeGroupVersion.String() {
		return nil
	}
	switch kind.Kind {
	case "ValidatingAdmissionPolicy":
		var p admissionv1.ValidatingAdmissionPolicy
		if err := sigsyaml.UnmarshalStrict(document, &p); err != nil {
			return fmt.Errorf("parse an admission policy: %w", err)
		}
		e.policies[p.Name] = normalPolicy(p.Spec)
	case "ValidatingAdmissionPolicyBinding":
		var b admissionv1.ValidatingAdmissionPolicyBinding
		if err := sigsyaml.UnmarshalStrict(document, &b); err != nil {
			return fmt.Errorf("parse the binding of an admission policy: %w", err)
		}
		e.bindings[b.Name] = normalBinding(b.Spec)
	}
	return nil
}

func (e Expected) complete() error {
	if len(e.policies) == 0 {
		return errors.New("there is no admission policy to expect")
	}
	bound := map[string]bool{}
	for name, b := range e.bindings {
		if _, ok := e.policies[b.PolicyName]; !ok {
			return fmt.Errorf("binding %s is of the unknown policy %s", name, b.PolicyName)
		}
		if slices.Contains(b.ValidationActions, admissionv1.Deny) {
			bound[b.PolicyName] = true
		}
	}
	for name := range e.policies {
		if !bound[name] {
			return fmt.Errorf("policy %s has no binding that denies", name)
		}
	}
	return nil
}

// normalPolicy returns a spec as the API server stores it, with the defaults of
// admissionregistration.k8s.io/v1.
func normalPolicy(s admissionv1.ValidatingAdmissionPolicySpec) admissionv1.ValidatingAdmissionPolicySpec {
	s = *s.DeepCopy()
	if s.FailurePolicy == nil {
		fail := admissionv1.Fail
		s.FailurePolicy = &fail
	}
	normalMatch(s.MatchConstraints)
	return s
}

func normalBinding(s admissionv1.ValidatingAdmissionPolicyBindingSpec) admissionv1.ValidatingAdmissionPolicyBindingSpec {
	s = *s.DeepCopy()
	normalMatch(s.MatchResources)
	return s
}

func normalMatch(m *admissionv1.MatchResources) {
	if m == nil {
		return
	}
	if m.MatchPolicy == nil {
		equivalent := admissionv1.Equivalent
		m.MatchPolicy = &equivalent
	}
	if m.NamespaceSelector == nil {
		m.NamespaceSelector = &metav1.LabelSelector{}
	}
	if m.ObjectSelector == nil {
		m.ObjectSelector = &metav1.LabelSelector{}
	}
	for _, rules := range [][]admissionv1.NamedRuleWithOperations{m.ResourceRules, m.ExcludeResourceRules} {
		for i := range rules {
			if rules[i].Scope == nil {
				all := admissionv1.AllScopes
				rules[i].Scope = &all
			}
		}
	}
}
