package rules_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/join-operator/attestors"
	"github.com/better-compute/join-operator/attestors/rules"
)

// variables are those of a type that has one of each.
var variables = rules.Variables{
	"vendor": rules.String, "slots": rules.Int, "secure": rules.Bool, "made": rules.Time,
	"digest": rules.Bytes, "groups": rules.StringList, "tpm.labels": rules.StringMap,
}

func values() map[string]any {
	return map[string]any{
		"vendor": "acme", "slots": int64(4), "secure": true, "made": time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC),
		"digest": []byte{1, 2}, "groups": []string{"a", "b"}, "tpm.labels": map[string]string{"k": "v"},
		"facts": map[string]string{"site": "ams"}, "role": "node", "hardwareKeySHA256": "",
	}
}

// when is a list of rules with these expressions; each has a pool of its own.
func when(expressions ...string) []rules.Rule {
	var list []rules.Rule
	for i, e := range expressions {
		list = append(list, rules.Rule{Name: fmt.Sprintf("rule-%d", i), When: e, Tenant: "factory", Pool: fmt.Sprintf("pool-%d", i), Site: "ams"})
	}
	return list
}

func compile(t *testing.T, expressions ...string) *rules.Set {
	t.Helper()
	s, err := rules.Compile(variables, when(expressions...))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// refused fails the test unless err is a refusal for that reason, and returns its detail.
func refused(t *testing.T, err error, reason string) string {
	t.Helper()
	r, ok := attestors.AsRefusal(err)
	if !ok || r.Reason != reason {
		t.Fatalf("got %v, want a refusal for %s", err, reason)
	}
	if r.Tenant != "" {
		t.Errorf("the refusal speaks for tenant %q, which nothing authenticated", r.Tenant)
	}
	return r.Detail
}

func TestTheFirstRuleThatIsTrueSaysWhere(t *testing.T) {
	s := compile(t, "facts.site == 'lhr'", "facts['site'] == 'ams' && role == 'node'", "true")
	r, err := s.Match(t.Context(), values())
	if err != nil || r.Name != "rule-1" || r.Tenant != "factory" || r.Pool != "pool-1" || r.Site != "ams" {
		t.Errorf("%+v, %v", r, err)
	}
	v := values()
	v["role"] = "site"
	if r, err = s.Match(t.Context(), v); err != nil || r.Name != "rule-2" {
		t.Errorf("%+v, %v", r, err)
	}
	detail := refused(t, match(compile(t, "facts.site == 'lhr'", "slots > 4"), values()), "no-rule")
	if !strings.Contains(detail, "2 rules") {
		t.Errorf("detail %q", detail)
	}
	refused(t, match(compile(t), values()), "no-rule")
}

func match(s *rules.Set, v map[string]any) error {
	_, err := s.Match(context.Background(), v)
	return err
}

func TestRulesSpeakOfEachTypeOfVariable(t *testing.T) {
	for _, e := range []string{
		"vendor.startsWith('ac')", "vendor.matches('^a[a-z]{3}$')", "slots * 2 == 8", "secure", "made < timestamp('2031-01-01T00:00:00Z')",
		"made.getFullYear() == 2030", "digest == b'\\x01\\x02'", "'a' in groups", "groups.exists(g, g == 'b')", "groups.size() == 2",
		"tpm.labels.k == 'v'", "'site' in facts", "has(facts.site)", "!has(facts.rack)", "facts.all(k, k == 'site')", "hardwareKeySHA256 == ''",
		"facts.exists(k, k.startsWith('s') && facts[k].matches('^[a-z]{3}$'))", "slots in [1, 4]", "facts.?site.orValue('') == 'ams' || true",
	} {
		s, err := rules.Compile(variables, when(e))
		if strings.Contains(e, ".?") {
			if err == nil {
				t.Errorf("%s: optional values are not of the language", e)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", e, err)
			continue
		}
		if err := match(s, values()); err != nil {
			t.Errorf("%s: %v", e, err)
		}
	}
}

// A machine must not reach a wider rule by breaking a narrower one.
func TestARuleThatErrsRefusesAndNeverFallsThrough(t *testing.T) {
	secret := "ek-serial-0451"
	for name, c := range map[string]struct {
		expression string
		spoil      func(map[string]any)
	}{
		"a missing key":             {"facts.rack == 'r1'", nil},
		"a key that a machine made": {"facts[vendor] == 'r1'", nil},
		"a missing variable":        {"slots > 1", func(v map[string]any) { delete(v, "slots") }},
		"no facts at all":           {"facts.site == 'ams'", func(v map[string]any) { v["facts"] = map[string]string(nil) }},
		"a text that is no number":  {"int(vendor) > 1", nil},
		"a text that is no time":    {"timestamp(vendor) > timestamp('2030-01-01T00:00:00Z')", nil},
		"a division by zero":        {"1 / (slots - 4) > 0", nil},
		"an overflow":               {"slots * 9223372036854775807 > 0", nil},
		"an index beyond":           {"groups[7] == 'x'", nil},
		"a type by conversion":      {"dyn(vendor) > dyn(slots)", nil},
		"a time beyond":             {"made + duration(vendor) > made", nil},
	} {
		t.Run(name, func(t *testing.T) {
			v := values()
			v["vendor"] = secret
			if c.spoil != nil {
				c.spoil(v)
			}
			detail := refused(t, match(compile(t, "false", c.expression, "true"), v), "rule-error")
			if !strings.Contains(detail, `"rule-1"`) || !strings.Contains(detail, "spec.rules[1].when") {
				t.Errorf("the detail does not name the rule: %s", detail)
			}
			if strings.Contains(detail, secret) {
				t.Errorf("the detail quotes what a machine sent: %s", detail)
			}
		})
	}
	// A rule before it that is true is taken: it was never asked.
	if err := match(compile(t, "true", "facts.rack == 'r1'"), values()); err != nil {
		t.Error(err)
	}
}

func TestWhatDoesNotCompileSaysWhichRuleAndWhere(t *testing.T) {
	deep := strings.Repeat("(", 200) + "true" + strings.Repeat(")", 200)
	for name, c := range map[string]struct{ expression, want string }{
		"a syntax error":           {"facts.site ==", "line 1, column"},
		"on the second line":       {"true &&\n  vendr == 'x'", "line 2, column 3: undeclared reference to 'vendr'"},
		"nothing":                  {"  ", "there is no expression"},
		"a text":                   {"vendor", "of type string where bool is wanted"},
		"something dynamic":        {"dyn(secure)", "where bool is wanted"},
		"types that do not agree":  {"vendor == 4", "no matching overload"},
		"a claim":                  {"claims.serialNumber == 'S1'", "undeclared reference to 'claims'"},
		"a token":                  {"token != ''", "undeclared reference to 'token'"},
		"evidence":                 {"evidence == b''", "undeclared reference to 'evidence'"},
		"a pattern of variables":   {"vendor.matches(facts.site)", "the pattern of matches() must be a literal"},
		"the same as a function":   {"matches(vendor, 'a' + facts.site)", "the pattern of matches() must be a literal"},
		"a pattern that is none":   {"vendor.matches('(')", "invalid matches argument"},
		"a pattern of repetitions": {"vendor.matches('(a{1,100}){1,10}')", "once its repetitions are written out"},
		"a pattern that explodes":  {"vendor.matches('((a{1,100}){1,10}){1,10}')", "invalid matches argument"},
		"a long expression":        {strings.Repeat("true && ", 300) + "true", "more than 2048"},
		"a deep expression":        {deep, ""},
		"loops in loops":           {"facts.all(a, facts.all(b, facts.all(c, a == b)))", "nesting"},
		"loops over long texts":    {"facts.all(a, facts.all(b, facts[a].contains(facts[b])))", "it may cost more than"},
		"a list out of nothing":    {"[1, 'a'] == []", "expected type"},
		"a time that is none":      {"made > timestamp('yesterday')", "invalid timestamp"},
	} {
		t.Run(name, func(t *testing.T) {
			start := time.Now()
			_, err := rules.Compile(variables, when("true", c.expression))
			var ce *rules.CompileError
			if !errors.As(err, &ce) || ce.Index != 1 || !strings.Contains(ce.Reason, c.want) {
				t.Errorf("got %v, want rule 1: …%s…", err, c.want)
			}
			if len(fmt.Sprint(err)) > 2000 {
				t.Errorf("%d bytes to say so", len(err.Error()))
			}
			if took := time.Since(start); took > 5*time.Second {
				t.Errorf("it took %s", took)
			}
		})
	}
	var many []string
	for range rules.MaxRules + 1 {
		many = append(many, "true")
	}
	if _, err := rules.Compile(variables, when(many...)); err == nil {
		t.Error("too many rules compiled")
	}
	if _, err := rules.Compile(rules.Variables{"facts": rules.String}, nil); err == nil {
		t.Error("a type declared what is every attestor's")
	}
	// Each is cheap enough, all together are not.
	many = many[:rules.MaxRules]
	for i := range many {
		many[i] = "facts.exists(k, facts[k].matches('^[a-z]{3}x*$'))"
	}
	var ce *rules.CompileError
	if _, err := rules.Compile(variables, when(many...)); !errors.As(err, &ce) || !strings.Contains(ce.Reason, "in all") {
		t.Errorf("got %v, want that all together cost too much", err)
	}
}

// However large the evidence is, rules cost little: all rules of the most expensive
// set that compiles, over the largest values that are looked at.
func TestTheLargestEvidenceCostsLittle(t *testing.T) {
	e := "facts.exists(k, facts[k].matches('^(a|b)*c$'))"
	n := 1
	for {
		list := make([]string, n+1)
		for i := range list {
			list[i] = e
		}
		if _, err := rules.Compile(variables, when(list...)); err != nil {
			break
		}
		n++
	}
	list := make([]string, n)
	for i := range list {
		list[i] = e
	}
	s := compile(t, list...)
	v := values()
	facts := map[string]string{}
	for i := range 64 {
		facts[fmt.Sprintf("k%d", i)] = strings.Repeat("ab", 512)
	}
	v["facts"] = facts
	start := time.Now()
	refused(t, match(s, v), "no-rule")
	took := time.Since(start)
	t.Logf("%d rules over 64 facts of 1,024 characters: %s", n, took)
	if took > 10*time.Second {
		t.Errorf("%d rules took %s", n, took)
	}
}

func TestEvidenceThatIsTooLargeIsNotLookedAt(t *testing.T) {
	huge := make([]string, 1_000_000)
	wide := map[string]string{}
	for i := range 65 {
		wide[fmt.Sprint(i)] = ""
	}
	s := compile(t, "true")
	for name, c := range map[string]struct {
		variable string
		value    any
	}{
		"a huge list":       {"groups", huge},
		"a wide map":        {"facts", wide},
		"a long text":       {"vendor", strings.Repeat("a", 1025)},
		"a long value":      {"facts", map[string]string{"k": strings.Repeat("a", 1025)}},
		"a long key":        {"facts", map[string]string{strings.Repeat("a", 257): ""}},
		"a long entry":      {"groups", []string{strings.Repeat("a", 1025)}},
		"many bytes":        {"digest", make([]byte, 1025)},
		"a text of no text": {"vendor", "\xff"},
	} {
		v := values()
		v[c.variable] = c.value
		if detail := refused(t, match(s, v), "rule-error"); !strings.Contains(detail, c.variable) {
			t.Errorf("%s: %s", name, detail)
		}
	}
	v := values()
	v["vendor"] = strings.Repeat("ü", 1024)
	if err := match(s, v); err != nil {
		t.Errorf("the longest text: %v", err)
	}
}

// What an attestor declares and gives otherwise is a bug, which no machine is
// refused for.
func TestValuesOfAnotherTypeAreABug(t *testing.T) {
	s := compile(t, "true")
	for name, value := range map[string]any{
		"slots": 4, "vendor": []byte("acme"), "secure": "true", "made": "2030-01-01T00:00:00Z", "digest": "12", "groups": []any{"a"},
		"tpm.labels": map[string]any{}, "undeclared": "x",
	} {
		v := values()
		v[name] = value
		err := match(s, v)
		if _, refused := attestors.AsRefusal(err); err == nil || refused {
			t.Errorf("%s of type %T: %v", name, value, err)
		}
	}
}

func TestADeadlineEndsARule(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := compile(t, "facts.exists(k, facts[k] == 'x')").Match(ctx, values())
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestRulesAssignWhatAnAttestorAdmits(t *testing.T) {
	var out attestors.Outcome
	var fails error
	inner, err := attestors.Define(attestors.Spec{
		ID: "example", Version: "1", Roles: []attestors.Role{attestors.RoleNode},
		Verify: func(context.Context, attestors.Evidence, *attestors.JoinContext) (attestors.Outcome, error) {
			return out, fails
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	a, err := rules.Apply(inner, compile(t, "facts.site == 'ams' && vendor == 'acme' && hardwareKeySHA256 == '0102' && role == 'node'"))
	if err != nil {
		t.Fatal(err)
	}
	admit := func() *attestors.Admit {
		return &attestors.Admit{
			Subject: []byte("s"), Role: attestors.RoleNode, Tenant: "says-the-attestor", Pool: "p", Site: "s", NodeID: "n-1", HardwareKey: []byte{1, 2},
			Facts: map[string]string{"site": "ams"}, Verified: map[string]any{"vendor": "acme"},
		}
	}
	verify := func() (attestors.Outcome, error) {
		return a.Verify(t.Context(), attestors.Evidence{}, &attestors.JoinContext{})
	}
	check := func(got *attestors.Admit) {
		t.Helper()
		if got.Tenant != "factory" || got.Pool != "pool-0" || got.Site != "ams" || got.NodeID != "n-1" || string(got.Subject) != "s" {
			t.Errorf("%+v", got)
		}
	}
	given := admit()
	out = given
	got, err := verify()
	if err != nil {
		t.Fatal(err)
	}
	check(got.(*attestors.Admit))
	if given.Tenant != "says-the-attestor" {
		t.Error("what the attestor returned was changed")
	}
	out = &attestors.Pending{Would: admit()}
	if got, err = verify(); err != nil {
		t.Fatal(err)
	}
	check(got.(*attestors.Pending).Would)

	other := admit()
	other.Verified["vendor"] = "globex"
	for _, out = range []attestors.Outcome{other, &attestors.Pending{Would: other}} {
		got, err = verify()
		if got != nil {
			t.Errorf("an outcome beside a refusal: %v", got)
		}
		refused(t, err, "no-rule")
	}
	posing := admit()
	posing.Verified["role"] = "site"
	out = posing
	if _, err = verify(); err == nil {
		t.Error("an attestor set what is every attestor's")
	}
	out = &attestors.Challenge{Data: []byte("x")}
	if got, err = verify(); err != nil || got != out {
		t.Errorf("a challenge became %v, %v", got, err)
	}
	out = &attestors.Pending{}
	if got, err = verify(); err != nil || got != out {
		t.Errorf("a Pending without an Admit became %v, %v", got, err)
	}
	out, fails = nil, attestors.Refuse("bad")
	_, err = verify()
	refused(t, err, "bad")
	if a.ID() != "example" || a.Version() != "1" || !a.Admits(attestors.RoleNode) {
		t.Error("the wrapper changes what it wraps")
	}
}

func BenchmarkMatchTheLastOfTenRules(b *testing.B) {
	list := make([]string, 0, 10)
	for i := range 9 {
		list = append(list, fmt.Sprintf("facts.site == 'site-%d' && vendor.startsWith('x')", i))
	}
	s, err := rules.Compile(variables, when(append(list, "facts.site == 'ams'")...))
	if err != nil {
		b.Fatal(err)
	}
	v := values()
	b.ReportAllocs()
	for b.Loop() {
		if _, err := s.Match(b.Context(), v); err != nil {
			b.Fatal(err)
		}
	}
}

func FuzzCompileAndMatch(f *testing.F) {
	for _, e := range []string{"true", "facts.site == 'ams'", "groups.exists(g, g.matches('a+'))", "made - made == duration('0s')", "[1,2].map(x, x * slots) == [4, 8]"} {
		f.Add(e, "acme")
	}
	f.Fuzz(func(t *testing.T, expression, vendor string) {
		s, err := rules.Compile(variables, when(expression))
		if err != nil {
			return
		}
		v := values()
		v["vendor"] = vendor
		start := time.Now()
		if _, err := s.Match(t.Context(), v); err != nil {
			if _, ok := attestors.AsRefusal(err); !ok {
				t.Fatalf("%q: %v", expression, err)
			}
		}
		if took := time.Since(start); took > time.Second {
			t.Fatalf("%q took %s", expression, took)
		}
	})
}
