package configured_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/attestors"
	"github.com/better-compute/join-operator/attestors/configured"
	"github.com/better-compute/join-operator/attestors/rules"
)

// world is types whose attestors admit what a test says.
type world struct {
	out   attestors.Outcome
	fails error
	// builds is what the factory says.
	builds error
	part   string
	id     string // another one than was asked for
}

func (w *world) factory(kind string) attestors.Factory {
	return func(id string, part json.RawMessage, _ attestors.Environment) (*attestors.Attestor, error) {
		w.part = string(part)
		if w.builds != nil {
			return nil, w.builds
		}
		if w.id != "" {
			id = w.id
		}
		return attestors.Define(attestors.Spec{
			ID: id, Type: kind, Version: "3", Roles: []attestors.Role{attestors.RoleNode, attestors.RoleSite},
			Verify: func(context.Context, attestors.Evidence, *attestors.JoinContext) (attestors.Outcome, error) {
				return w.out, w.fails
			},
		})
	}
}

func (w *world) types() configured.Types {
	return configured.Types{
		"external":  {Rules: configured.RulesOptional, Variables: rules.Variables{"vendor": rules.String}, New: w.factory("")},
		"x509pop":   {Attestor: "x509pop", New: w.factory("x509pop")},
		"joinToken": {Attestor: "join-token", Rules: configured.RulesRequired, New: w.factory("join-token")},
	}
}

const (
	external = `"type": "external", "external": {"url": "https://x", "allowedTenants": ["factory"]}, "roles": ["node"]`
	aRule    = `{"name": "ams", "when": "vendor == 'acme'", "tenant": "factory", "pool": "gpu", "site": "ams"}`
)

func TestAConfiguredAttestorIsItsTypesWithWhatTheObjectSays(t *testing.T) {
	w := &world{out: &attestors.Admit{Subject: []byte("s"), Role: attestors.RoleNode, Verified: map[string]any{"vendor": "acme"}}}
	build := func(spec string) *attestors.Attestor {
		t.Helper()
		a, err := w.types().Build("verify", 17, []byte("{"+spec+"}"), attestors.Environment{})
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	verify := func(a *attestors.Attestor) (attestors.Outcome, error) {
		return a.Verify(t.Context(), attestors.Evidence{}, &attestors.JoinContext{})
	}
	a := build(external)
	if a.ID() != "verify" || a.Type() != "verify" || a.Version() != "3+17" || !a.Admits("node") || a.Admits("site") {
		t.Errorf("%s %s %s %v", a.ID(), a.Type(), a.Version(), a.Roles())
	}
	if w.part != `{"url": "https://x", "allowedTenants": ["factory"]}` {
		t.Errorf("the factory got %s", w.part)
	}
	if out, err := verify(a); err != nil || out != w.out {
		t.Errorf("without rules and approval: %v, %v", out, err)
	}

	out, err := verify(build(external + `, "rules": [` + aRule + `]`))
	if admit, ok := out.(*attestors.Admit); err != nil || !ok || admit.Tenant != "factory" || admit.Pool != "gpu" || admit.Site != "ams" {
		t.Errorf("with rules: %+v, %v", out, err)
	}
	asks := build(external + `, "approval": "Always", "rules": [` + aRule + `]`)
	out, err = verify(asks)
	if p, ok := out.(*attestors.Pending); err != nil || !ok || p.Would.Tenant != "factory" {
		t.Errorf("with approval: %+v, %v", out, err)
	}
	w.out = &attestors.Challenge{}
	if out, err := verify(asks); err != nil || out != w.out {
		t.Errorf("a challenge became %v, %v", out, err)
	}
	w.out, w.fails = nil, attestors.Refuse("bad")
	if out, err := verify(asks); out != nil || !errors.Is(err, w.fails) {
		t.Errorf("a refusal became %v, %v", out, err)
	}
	// A built-in may be configured under its own name.
	if a, err := w.types().Build("x509pop", 1, []byte(`{"type": "x509pop", "x509pop": {}, "roles": ["node"]}`), attestors.Environment{}); err != nil || a.Type() != "x509pop" {
		t.Errorf("%v, %v", a, err)
	}
}

func TestWhatIsWrongIsSaidOfTheField(t *testing.T) {
	for name, c := range map[string]struct {
		id, spec, field, reason string
		builds                  error
	}{
		"an unknown type":        {spec: `"type": "psychic", "roles": ["node"]`, field: "spec.type", reason: "no attestor of type"},
		"an unknown field":       {spec: external + `, "mood": "good"`, field: "spec", reason: "mood"},
		"an unknown part":        {spec: external + `, "External": {}`, field: "spec", reason: "External"},
		"no part":                {spec: `"type": "external", "roles": ["node"]`, field: "spec.external", reason: "missing"},
		"a role beyond the type": {spec: strings.Replace(external, `["node"]`, `["node", "ramdisk"]`, 1), field: "spec.roles[1]", reason: "ramdisk"},
		"an unknown approval":    {spec: external + `, "approval": "Sometimes"`, field: "spec.approval", reason: "Sometimes"},
		"a rule":                 {spec: external + `, "rules": [` + aRule + `, {"name": "b", "when": "vendr == ''"}]`, field: "spec.rules[1].when", reason: "undeclared reference to 'vendr'"},
		"rules too many":         {spec: `"type": "x509pop", "x509pop": {}, "roles": ["node"], "rules": [` + aRule + `]`, field: "spec.rules", reason: "takes none"},
		"rules too few":          {id: "tokens", spec: `"type": "joinToken", "joinToken": {}, "roles": ["node"]`, field: "spec.rules", reason: "at least one"},
		"a built-in's name":      {id: "tpm", spec: external, field: "metadata.name", reason: "built-in"},
		"another built-in's":     {id: "join-token", spec: `"type": "x509pop", "x509pop": {}, "roles": ["node"]`, field: "metadata.name", reason: "built-in"},
		"what the factory finds": {spec: external, builds: &attestors.FieldError{Field: "url", Reason: "it has no host"}, field: "spec.external.url", reason: "it has no host"},
		"the part as a whole":    {spec: external, builds: &attestors.FieldError{Reason: "no"}, field: "spec.external", reason: "no"},
	} {
		t.Run(name, func(t *testing.T) {
			w := &world{builds: c.builds}
			if c.id == "" {
				c.id = "verify"
			}
			_, err := w.types().Build(c.id, 1, []byte("{"+c.spec+"}"), attestors.Environment{})
			f, ok := errors.AsType[*attestors.FieldError](err)
			if !ok || f.Field != c.field || !strings.Contains(f.Reason, c.reason) {
				t.Errorf("got %v, want %s: …%s…", err, c.field, c.reason)
			}
		})
	}
	w := &world{id: "somebody-else"}
	if _, err := w.types().Build("verify", 1, []byte("{"+external+"}"), attestors.Environment{}); err == nil {
		t.Error("a factory that builds under another id")
	}
}

// A configuration of the built-in keeps uses by the built-in's type: a token admits
// no machine twice because it was named otherwise.
func TestConfiguredTokensAreKeptByTheirType(t *testing.T) {
	spec, err := json.Marshal(v1alpha1.AttestorConfigSpec{Type: v1alpha1.AttestorJoinToken, JoinToken: &v1alpha1.JoinTokenAttestor{}, Roles: []v1alpha1.Role{"node"}})
	if err != nil {
		t.Fatal(err)
	}
	a, err := configured.BuiltIn().Build("lab-tokens", 1, spec, attestors.Environment{})
	if err != nil {
		t.Fatal(err)
	}
	if a.ID() != "lab-tokens" || a.Type() != attestors.DefaultID || a.Admits(attestors.RoleSite) {
		t.Errorf("%s of type %s for %v", a.ID(), a.Type(), a.Roles())
	}
}
