package configured

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	kjson "sigs.k8s.io/json"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/attestors"
	"github.com/better-compute/join-operator/attestors/rules"
)

// RuleUse says whether an attestor type needs rules.
type RuleUse int

// What a type may do with rules.
const (
	// RulesNever: the evidence itself says where the machine belongs.
	RulesNever RuleUse = iota
	// RulesOptional: it may say so, and rules overrule it.
	RulesOptional
	// RulesRequired: it proves what a machine is, not where it belongs.
	RulesRequired
)

// Type is a type of attestor that can be configured.
type Type struct {
	// Attestor is what its attestors keep uses, bindings and approvals by
	// ([attestors.Spec].Type). Empty where each keeps them by its own id.
	Attestor string
	Rules    RuleUse
	// Variables are what its rules may speak of, besides those of all types.
	Variables rules.Variables
	// New builds the attestor of the spec's part.
	New attestors.Factory
}

// Types are the types of attestors, by what spec.type says.
type Types map[v1alpha1.AttestorType]Type

// builtins are the ids of built-in attestors, which only their own types may have.
var builtins = []string{"join-token", "x509pop", "image", "discovery", "cloud-iid", "tpm"}

// Build makes the attestor of an AttestorConfig: its id is the object's name; spec is
// the object's spec as JSON, with every reference resolved; version is that of the
// published configuration, and part of the attestor's, so that a challenge is only
// finished under the configuration that it was handed out under. What is wrong with
// the configuration is a [*attestors.FieldError], its field as people write it
// ("spec.rules[2].when").
func (t Types) Build(id string, version int64, spec []byte, env attestors.Environment) (*attestors.Attestor, error) {
	var s v1alpha1.AttestorConfigSpec
	parts := map[string]json.RawMessage{}
	// What a newer release wrote and this one does not know must not be left out.
	strict, err := kjson.UnmarshalStrict(spec, &s)
	if err = errors.Join(append(strict, err)...); err != nil {
		return nil, &attestors.FieldError{Field: "spec", Reason: "this release does not know it: " + err.Error()}
	}
	if err := kjson.UnmarshalCaseSensitivePreserveInts(spec, &parts); err != nil {
		return nil, fmt.Errorf("decode the configuration: %w", err)
	}
	kind, known := t[s.Type]
	if !known {
		return nil, &attestors.FieldError{Field: "spec.type", Reason: fmt.Sprintf("this release has no attestor of type %q", s.Type)}
	}
	if slices.Contains(builtins, id) && kind.Attestor != id {
		return nil, &attestors.FieldError{Field: "metadata.name", Reason: fmt.Sprintf("%s is a built-in attestor: a configuration of type %s needs another name", id, s.Type)}
	}
	part, given := parts[string(s.Type)]
	if !given {
		return nil, &attestors.FieldError{Field: "spec." + string(s.Type), Reason: "it is missing"}
	}
	a, err := kind.New(id, part, env)
	if err != nil {
		return nil, within(err, "spec."+string(s.Type))
	}
	if want := cmp.Or(kind.Attestor, id); a.ID() != id || a.Type() != want {
		return nil, fmt.Errorf("type %s built an attestor with id %s and type %s, want %s and %s", s.Type, a.ID(), a.Type(), id, want)
	}
	if a, err = kind.ruled(a, s.Rules); err != nil {
		return nil, err
	}
	return finish(a, version, &s)
}

// within tells an error of a part of the spec from the object's point of view.
func within(err error, parent string) error {
	if f, ok := errors.AsType[*attestors.FieldError](err); ok {
		return f.Within(parent)
	}
	return fmt.Errorf("%s: %w", parent, err)
}

// ruled has rules say where machines belong.
func (t Type) ruled(a *attestors.Attestor, list []v1alpha1.AttestorRule) (*attestors.Attestor, error) {
	switch {
	case len(list) > 0 && t.Rules == RulesNever:
		return nil, &attestors.FieldError{Field: "spec.rules", Reason: "this type takes none"}
	case len(list) == 0 && t.Rules == RulesRequired:
		return nil, &attestors.FieldError{Field: "spec.rules", Reason: "this type proves what a machine is, not where it belongs: give at least one rule"}
	case len(list) == 0:
		return a, nil
	}
	compiled := make([]rules.Rule, len(list))
	for i, r := range list {
		compiled[i] = rules.Rule{Name: r.Name, When: r.When, Tenant: r.Tenant, Pool: r.Pool, Site: r.Site}
	}
	set, err := rules.Compile(t.Variables, compiled)
	if wrong, ok := errors.AsType[*rules.CompileError](err); ok {
		return nil, &attestors.FieldError{Field: fmt.Sprintf("spec.rules[%d].when", wrong.Index), Reason: wrong.Reason}
	}
	if err != nil {
		return nil, within(err, "spec.rules")
	}
	return rules.Apply(a, set)
}

// finish puts around an attestor what is the same for all types.
func finish(a *attestors.Attestor, version int64, s *v1alpha1.AttestorConfigSpec) (*attestors.Attestor, error) {
	spec := a.Spec()
	spec.Version = fmt.Sprintf("%s+%d", spec.Version, version)
	spec.Roles = nil
	for i, r := range s.Roles {
		if !a.Admits(attestors.Role(r)) {
			return nil, &attestors.FieldError{Field: fmt.Sprintf("spec.roles[%d]", i), Reason: fmt.Sprintf("attestors of this type do not admit the role %s", r)}
		}
		spec.Roles = append(spec.Roles, attestors.Role(r))
	}
	switch s.Approval {
	case "", v1alpha1.ApprovalNever:
	case v1alpha1.ApprovalAlways:
		spec.Verify = asking(spec.Verify)
	default:
		return nil, &attestors.FieldError{Field: "spec.approval", Reason: fmt.Sprintf("this release does not know %q", s.Approval)}
	}
	return attestors.Define(spec)
}

// asking makes every join wait for a person: what would be admitted is asked about,
// on the rows that pools ask by.
func asking(verify attestors.VerifyFunc) attestors.VerifyFunc {
	return func(ctx context.Context, ev attestors.Evidence, jc *attestors.JoinContext) (attestors.Outcome, error) {
		out, err := verify(ctx, ev, jc)
		if admit, ok := out.(*attestors.Admit); ok && err == nil {
			return &attestors.Pending{Would: admit}, nil
		}
		return out, err
	}
}
