package schema

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/api/v1alpha1"
)

const (
	externalPart = "url: https://verify.example, caConfigMapRef: {name: verify-ca}, allowedTenants: [factory, lab]"
	external     = "type: external, external: {" + externalPart + "}, roles: [node]"
	rule         = "{name: all, when: 'true', tenant: factory, pool: gpu}"
)

// configs tests AttestorConfigs, which are of no namespace, one after the other.
func configs(t *testing.T, changes map[string]change) {
	t.Helper()
	cl := cluster(t)
	for name, c := range changes {
		t.Run(name, func(t *testing.T) {
			u := parse(t, "", "AttestorConfig", c.object)
			if u.GetName() == "" {
				u.SetName("example")
			}
			err := cl.Client.Create(t.Context(), u)
			if err == nil {
				defer func() {
					if err := cl.Client.Delete(context.WithoutCancel(t.Context()), u); err != nil {
						t.Error(err)
					}
				}()
			}
			if c.patch != "" {
				if err != nil {
					t.Fatalf("create: %v", err)
				}
				err = cl.Client.Patch(t.Context(), u, client.RawPatch(types.MergePatchType, []byte(c.patch)))
			}
			refused(t, err, c.want)
		})
	}
}

func TestAConfigurationHasTheOnePartOfItsType(t *testing.T) {
	configs(t, map[string]change{
		"external":               {object: "{spec: {" + external + "}}"},
		"x509pop":                {object: "{spec: {type: x509pop, x509pop: {}, roles: [node, site]}}"},
		"joinToken":              {object: "{spec: {type: joinToken, joinToken: {}, roles: [node, site, ramdisk], approval: Always}}"},
		"no part":                {object: "{spec: {type: external, roles: [node]}}", want: "spec.external goes with spec.type external"},
		"another's part":         {object: "{spec: {type: joinToken, x509pop: {}, roles: [node]}}", want: "spec.x509pop goes with spec.type x509pop"},
		"two parts":              {object: "{spec: {" + external + ", joinToken: {}}}", want: "spec.joinToken goes with spec.type joinToken"},
		"a type that is none":    {object: "{spec: {type: psychic, roles: [node]}}", want: "Unsupported value"},
		"the type changes":       {object: "{spec: {type: joinToken, joinToken: {}, roles: [node]}}", patch: `{"spec": {"type": "x509pop", "joinToken": null, "x509pop": {}}}`, want: "spec.type is immutable"},
		"no roles":               {object: "{spec: {type: joinToken, joinToken: {}}}", want: "spec.roles: Required value"},
		"an empty list of roles": {object: "{spec: {type: joinToken, joinToken: {}, roles: []}}", want: "spec.roles"},
		"a role twice":           {object: "{spec: {type: joinToken, joinToken: {}, roles: [node, node]}}", want: "Duplicate value"},
		"a role that is none":    {object: "{spec: {type: joinToken, joinToken: {}, roles: [root]}}", want: "Unsupported value"},
		"approval at will":       {object: "{spec: {" + external + ", approval: Sometimes}}", want: "Unsupported value"},
		"rules for tokens":       {object: "{spec: {type: joinToken, joinToken: {}, roles: [node], rules: [" + rule + "]}}", want: "spec.rules do not go with this type"},
		"long ago":               {object: "{spec: {type: x509pop, x509pop: {maxExpired: 8761h}, roles: [node]}}", want: "spec.x509pop.maxExpired must be from 0s to 8760h"},
		"not yet":                {object: "{spec: {type: x509pop, x509pop: {maxExpired: -1h}, roles: [node]}}", want: "spec.x509pop.maxExpired must be from 0s to 8760h"},
		"days":                   {object: "{spec: {type: x509pop, x509pop: {maxExpired: 90d}, roles: [node]}}", want: "spec.x509pop.maxExpired"},
		"never after the end":    {object: "{spec: {type: x509pop, x509pop: {maxExpired: 0s}, roles: [node]}}"},
	})
}

// A name is what machines ask for: it must not stand for something else.
func TestAConfigurationsNameIsAnAttestorsID(t *testing.T) {
	named := func(name, spec string) string { return "{metadata: {name: " + name + "}, spec: {" + spec + "}}" }
	tokens, pop := "type: joinToken, joinToken: {}, roles: [node]", "type: x509pop, x509pop: {}, roles: [node]"
	configs(t, map[string]change{
		"the built-in's own":         {object: named("join-token", tokens)},
		"the certificates' own":      {object: named("x509pop", pop)},
		"another of a built-in type": {object: named("lab-tokens", tokens)},
		"as long as it may be":       {object: named(strings.Repeat("a", 40), tokens)},
		"tokens by an endpoint":      {object: named("join-token", external), want: "metadata.name is that of a built-in attestor"},
		"certificates by tokens":     {object: named("x509pop", tokens), want: "metadata.name is that of a built-in attestor"},
		"a TPM by an endpoint":       {object: named("tpm", external), want: "metadata.name is that of a built-in attestor"},
		"a cloud by an endpoint":     {object: named("cloud-iid", external), want: "metadata.name is that of a built-in attestor"},
		"the service itself":         {object: named("join", external), want: "metadata.name must not be join"},
		"renewals":                   {object: named("renew", external), want: "metadata.name must not be join, renew"},
		"none":                       {object: named("none", external), want: "metadata.name must not be"},
		"a name with dots":           {object: named("a.b", external), want: "metadata.name is what machines ask for"},
		"a digit first":              {object: named("7up", external), want: "metadata.name is what machines ask for"},
		"a long name":                {object: named(strings.Repeat("a", 41), external), want: "metadata.name is what machines ask for"},
	})
}

func TestWhatRulesMaySay(t *testing.T) {
	with := func(rules ...string) string {
		return "{spec: {" + external + ", rules: [" + strings.Join(rules, ", ") + "]}}"
	}
	var many []string
	for i := range 65 {
		many = append(many, fmt.Sprintf("{name: %s-%d, when: '%s', tenant: lab, pool: gpu}", strings.Repeat("r", 50), i, strings.Repeat("x", 100)))
	}
	configs(t, map[string]change{
		"one":                {object: with(rule)},
		"as many as may be":  {object: with(many[:64]...)},
		"too many":           {object: with(many...), want: "spec.rules: Too many"},
		"none":               {object: with(), want: "spec.rules"},
		"two of one name":    {object: with(rule, rule), want: "each of spec.rules has a name of its own"},
		"another tenant":     {object: with("{name: a, when: 'true', tenant: other, pool: gpu}"), want: "spec.rules may name only tenants of spec.external.allowedTenants"},
		"no tenant":          {object: with("{name: a, when: 'true', pool: gpu}"), want: "tenant: Required value"},
		"no pool":            {object: with("{name: a, when: 'true', tenant: lab}"), want: "pool: Required value"},
		"no expression":      {object: with("{name: a, when: '', tenant: lab, pool: gpu}"), want: "spec.rules[0].when"},
		"a long one":         {object: with("{name: a, when: '" + strings.Repeat("x", 2049) + "', tenant: lab, pool: gpu}"), want: "Too long"},
		"a pool by evidence": {object: with(`{name: a, when: "true", tenant: lab, pool: "${facts.pool}"}`), want: "spec.rules[0].pool"},
	})
}

func TestWhatAnEndpointMayBe(t *testing.T) {
	part := func(p string) string { return "{spec: {type: external, roles: [node], external: {" + p + "}}}" }
	configs(t, map[string]change{
		"certificates in place": {object: part("url: https://verify.example/v1, caBundle: PEM, allowedTenants: [lab], timeoutSeconds: 4, failurePolicy: Defer")},
		"two of them":           {object: part(externalPart + ", caBundle: PEM"), want: "give spec.external.caBundle or spec.external.caConfigMapRef, and not both"},
		"neither":               {object: part("url: https://verify.example, allowedTenants: [lab]"), want: "give spec.external.caBundle or spec.external.caConfigMapRef"},
		"in the clear":          {object: part("url: http://verify.example, caBundle: PEM, allowedTenants: [lab]"), want: "spec.external.url"},
		"any tenant":            {object: part("url: https://verify.example, caBundle: PEM"), want: "spec.external.allowedTenants: Required value"},
		"no tenant":             {object: part("url: https://verify.example, caBundle: PEM, allowedTenants: []"), want: "spec.external.allowedTenants"},
		"forever":               {object: part(externalPart + ", timeoutSeconds: 5"), want: "spec.external.timeoutSeconds"},
		"fails open":            {object: part(externalPart + ", failurePolicy: Ignore"), want: "Unsupported value"},
		"a Secret":              {object: part("url: https://verify.example, caSecretRef: {name: x}, allowedTenants: [lab]"), want: "give spec.external.caBundle or spec.external.caConfigMapRef"},
	})
}

func TestConfigurationsHaveTheirDefaults(t *testing.T) {
	c := cluster(t)
	for name, want := range map[string]map[string]string{
		"defaults-external": {"approval": "Never", "external.failurePolicy": "Refuse", "external.timeoutSeconds": "3", "external.caConfigMapRef.key": "ca.crt"},
		"defaults-x509pop":  {"x509pop.maxExpired": "2160h"},
	} {
		text := "{spec: {" + external + "}}"
		if name == "defaults-x509pop" {
			text = "{spec: {type: x509pop, x509pop: {}, roles: [node]}}"
		}
		u := parse(t, "", "AttestorConfig", text)
		u.SetName(name)
		if err := c.Client.Create(t.Context(), u); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Client.Delete(context.WithoutCancel(t.Context()), u) })
		for field, value := range want {
			got, _, _ := unstructured.NestedFieldNoCopy(u.Object, append([]string{"spec"}, strings.Split(field, ".")...)...)
			if fmt.Sprint(got) != value {
				t.Errorf("spec.%s is %v, want %s", field, got, value)
			}
		}
	}
	if err := c.Client.List(t.Context(), &v1alpha1.AttestorConfigList{}); err != nil {
		t.Error(err)
	}
}
