package schema

import (
	"fmt"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/api/v1alpha1"
)

var digest = strings.Repeat("a", 64)

// least is a request with what every request has; full has every field.
var (
	least = "{spec: {attestor: join-token, role: node, csrSHA256: " + digest + ", publicKeySHA256: " + digest + ", subjectSHA256: " + digest + "}}"
	full  = "{spec: {attestor: tpm, attestorVersion: v1, role: node, pool: gpu, site: ams, nodeName: n-1, csrSHA256: " + digest + ", publicKeySHA256: " + digest +
		", subjectSHA256: " + digest + ", hardwareKeySHA256: " + digest + ", claims: {serialNumber: S1}, facts: {manufacturer: IFX}}}"
)

// with is the least request with more in its spec.
func with(more string) string { return strings.TrimSuffix(least, "}}") + ", " + more + "}}" }

func TestWhatWasAskedIsImmutable(t *testing.T) {
	other := strings.Repeat("b", 64)
	for field, value := range map[string]string{
		"attestor": `"other"`, "attestorVersion": `"v2"`, "role": `"site"`, "pool": `"cpu"`, "site": `"lhr"`, "nodeName": `"n-2"`,
		"csrSHA256": `"` + other + `"`, "publicKeySHA256": `"` + other + `"`, "subjectSHA256": `"` + other + `"`, "hardwareKeySHA256": `"` + other + `"`,
		"claims": `{"serialNumber": "S2"}`, "facts": `{"more": "x"}`,
	} {
		want := "spec." + field + " is immutable"
		t.Run(field, func(t *testing.T) {
			change{object: full, patch: fmt.Sprintf(`{"spec": {%q: %s}}`, field, value), want: want}.test(t, "JoinRequest")
		})
		switch field {
		case "attestor", "role", "csrSHA256", "publicKeySHA256", "subjectSHA256":
			t.Run(field+" goes", func(t *testing.T) {
				change{object: full, patch: fmt.Sprintf(`{"spec": {%q: null}}`, field), want: "Required value"}.test(t, "JoinRequest")
			})
		default:
			t.Run(field+" appears", func(t *testing.T) {
				change{object: least, patch: fmt.Sprintf(`{"spec": {%q: %s}}`, field, value), want: want}.test(t, "JoinRequest")
			})
			t.Run(field+" goes", func(t *testing.T) {
				change{object: full, patch: fmt.Sprintf(`{"spec": {%q: null}}`, field), want: want}.test(t, "JoinRequest")
			})
		}
	}
}

func TestWhatIsAskedIsBounded(t *testing.T) {
	many := func(n int) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, "k%d: %q, ", i, strings.Repeat("x", 256))
		}
		return "{" + b.String() + "}"
	}
	run(t, "JoinRequest", map[string]change{
		"least":                    {object: least},
		"full":                     {object: full},
		"32 facts and claims":      {object: with("facts: " + many(32) + ", claims: " + many(32))},
		"33 claims":                {object: with("claims: " + many(33)), want: "must have at most 32 items"},
		"33 facts":                 {object: with("facts: " + many(33)), want: "must have at most 32 items"},
		"a long claim":             {object: with(`claims: {k: "` + strings.Repeat("x", 257) + `"}`), want: "may not be more than 256"},
		"a terminal's escape":      {object: with(`claims: {k: "\x1b[2J"}`), want: "should match"},
		"a line's end":             {object: with(`facts: {k: "a\nb"}`), want: "should match"},
		"letters that look alike":  {object: with(`claims: {k: "аdmin"}`), want: "should match"},
		"a claim without name":     {object: with(`claims: {"": x}`), want: "names of claims are"},
		"a fact's name with space": {object: with(`facts: {"a b": x}`), want: "names of facts are"},
		"a long name":              {object: with("facts: {" + strings.Repeat("k", 65) + ": x}"), want: "names of facts are"},
		"a pool that is no name":   {object: with("pool: Gpu"), want: "spec.pool"},
		"an empty pool":            {object: with(`pool: ""`), want: "spec.pool"},
		"a role of no kind":        {object: strings.Replace(least, "role: node", "role: root", 1), want: "Unsupported value"},
		"a hash in capitals":       {object: strings.Replace(least, digest, strings.Repeat("A", 64), 1), want: "should match"},
		"a short hash":             {object: strings.Replace(least, digest, "aa", 1), want: "should match"},
		"no spec":                  {object: "{}", want: "spec: Required value"},
	})
}

const (
	approved = `{"spec": {"decision": {"verdict": "Approved", "decidedBy": {"username": "alice", "groups": ["a", "b"]}}}}`
	rejected = `{"spec": {"decision": {"verdict": "Rejected", "decidedBy": {"username": "alice"}}}}`
)

func TestADecisionCannotBeGivenAtCreation(t *testing.T) {
	u := with("decision: {verdict: Approved, decidedBy: {username: alice}}")
	change{object: u, want: "spec.decision cannot be given at creation"}.test(t, "JoinRequest")
	// The way of kubectl apply --server-side.
	c := cluster(t)
	o := parse(t, c.Namespace(t, nil), "JoinRequest", u)
	o.SetName("x")
	err := c.Client.Apply(t.Context(), client.ApplyConfigurationFromUnstructured(o), client.FieldOwner("test"), client.ForceOwnership)
	refused(t, err, "spec.decision cannot be given at creation")
}

func TestADecisionIsFinal(t *testing.T) {
	for name, again := range map[string]string{
		"flipped":                rejected,
		"another author":         `{"spec": {"decision": {"decidedBy": {"username": "bob"}}}}`,
		"another order":          `{"spec": {"decision": {"decidedBy": {"groups": ["b", "a"]}}}}`,
		"a uid appears":          `{"spec": {"decision": {"decidedBy": {"uid": "1"}}}}`,
		"a message appears":      `{"spec": {"decision": {"message": "afterwards"}}}`,
		"a pool appears":         `{"spec": {"decision": {"pool": "cpu"}}}`,
		"removed":                `{"spec": {"decision": null}}`,
		"its groups are removed": `{"spec": {"decision": {"decidedBy": {"groups": null}}}}`,
	} {
		t.Run(name, func(t *testing.T) {
			c := cluster(t)
			u := parse(t, c.Namespace(t, nil), "JoinRequest", least)
			u.SetName("x")
			if err := c.Client.Create(t.Context(), u); err != nil {
				t.Fatal(err)
			}
			if err := c.Client.Patch(t.Context(), u, client.RawPatch(types.MergePatchType, []byte(approved))); err != nil {
				t.Fatal(err)
			}
			refused(t, c.Client.Patch(t.Context(), u, client.RawPatch(types.MergePatchType, []byte(again))), "spec.decision is final")
			// The same once more changes nothing.
			before := u.GetResourceVersion()
			if err := c.Client.Patch(t.Context(), u, client.RawPatch(types.MergePatchType, []byte(approved))); err != nil || u.GetResourceVersion() != before {
				t.Errorf("the same decision again: %v, resource version %s then %s", err, before, u.GetResourceVersion())
			}
		})
	}
}

func TestADecisionBumpsTheGeneration(t *testing.T) {
	c := cluster(t)
	u := parse(t, c.Namespace(t, nil), "JoinRequest", least)
	u.SetName("x")
	if err := c.Client.Create(t.Context(), u); err != nil {
		t.Fatal(err)
	}
	if err := c.Client.Patch(t.Context(), u, client.RawPatch(types.MergePatchType, []byte(rejected))); err != nil {
		t.Fatal(err)
	}
	if u.GetGeneration() != 2 {
		t.Errorf("generation %d", u.GetGeneration())
	}
}

func TestWhatADecisionMaySay(t *testing.T) {
	decide := func(more string) string {
		return `{"spec": {"decision": {"verdict": "Approved", "decidedBy": {"username": "alice"}` + more + `}}}`
	}
	run(t, "JoinRequest", map[string]change{
		"into another pool":        {object: least, patch: decide(`, "pool": "cpu", "message": "gesehen im Gestell Nº 7"`)},
		"for a tenant":             {object: least, patch: decide(`, "pool": "cpu", "tenant": "factory"`)},
		"every group and extra":    {object: least, patch: `{"spec": {"decision": {"verdict": "Approved", "decidedBy": {"username": "system:x", "uid": "1", "groups": ["g:1"], "extra": {"example.org/k": ["v", ""]}}}}}`},
		"nobody":                   {object: least, patch: `{"spec": {"decision": {"verdict": "Approved"}}}`, want: "spec.decision.decidedBy: Required value"},
		"somebody without a name":  {object: least, patch: `{"spec": {"decision": {"verdict": "Approved", "decidedBy": {"username": ""}}}}`, want: "username"},
		"no verdict":               {object: least, patch: `{"spec": {"decision": {"decidedBy": {"username": "alice"}}}}`, want: "spec.decision.verdict: Required value"},
		"another verdict":          {object: least, patch: strings.Replace(approved, "Approved", "approved", 1), want: "Unsupported value"},
		"a rejection into a pool":  {object: least, patch: strings.Replace(rejected, `}}}`, `}, "pool": "cpu"}}`, 1) + "", want: "are for approvals"},
		"a message with an escape": {object: least, patch: decide(`, "message": "\u001b[2J"`), want: "should match"},
		"a long message":           {object: least, patch: decide(`, "message": "` + strings.Repeat("x", 1025) + `"`), want: "may not be more than 1024"},
		"a pool that is no name":   {object: least, patch: decide(`, "pool": "../gpu"`), want: "spec.decision.pool"},
	})
}

func TestRequestsAreSelectedByVerdictAttestorAndPool(t *testing.T) {
	c := cluster(t)
	ns := c.Namespace(t, nil)
	for name, object := range map[string]string{"least": least, "full": full} {
		u := parse(t, ns, "JoinRequest", object)
		u.SetName(name)
		if err := c.Client.Create(t.Context(), u); err != nil {
			t.Fatal(err)
		}
		if name == "full" {
			if err := c.Client.Patch(t.Context(), u, client.RawPatch(types.MergePatchType, []byte(approved))); err != nil {
				t.Fatal(err)
			}
		}
	}
	for selector, want := range map[string]string{
		"spec.decision.verdict=Approved": "full", "spec.decision.verdict=": "least", "spec.attestor=join-token": "least", "spec.pool=gpu": "full",
	} {
		s, err := fields.ParseSelector(selector)
		if err != nil {
			t.Fatal(err)
		}
		list := &unstructured.UnstructuredList{}
		list.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind("JoinRequestList"))
		if err := c.Client.List(t.Context(), list, client.InNamespace(ns), client.MatchingFieldsSelector{Selector: s}); err != nil {
			t.Errorf("%s: %v", selector, err)
			continue
		}
		if len(list.Items) != 1 || list.Items[0].GetName() != want {
			t.Errorf("%s selects %d objects, want %s alone", selector, len(list.Items), want)
		}
	}
}
