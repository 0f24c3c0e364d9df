package attestors_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/join-operator/attestors"
)

func admits(context.Context, attestors.Evidence, *attestors.JoinContext) (attestors.Outcome, error) {
	return &attestors.Admit{}, nil
}

func spec() attestors.Spec {
	return attestors.Spec{ID: "example", Version: "1", Roles: []attestors.Role{attestors.RoleNode}, Verify: admits}
}

func define(t *testing.T, s attestors.Spec) *attestors.Attestor {
	t.Helper()
	a, err := attestors.Define(s)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func TestR05_AnAttestorIsCheckedAndFrozenOnceDefined(t *testing.T) {
	s := spec()
	s.Roles = []attestors.Role{attestors.RoleNode, attestors.RoleRamdisk}
	a := define(t, s)
	s.Roles[0] = attestors.RoleSite
	a.Roles()[0] = attestors.RoleSite
	a.Spec().Roles[0] = attestors.RoleSite
	if !slices.Equal(a.Roles(), []attestors.Role{attestors.RoleNode, attestors.RoleRamdisk}) || a.Admits(attestors.RoleSite) || !a.Admits(attestors.RoleRamdisk) {
		t.Errorf("its roles were changed from outside: %v", a.Roles())
	}
	if a.ID() != "example" || a.Type() != "example" || a.Version() != "1" || a.Prepares() {
		t.Errorf("%s %s %s", a.ID(), a.Type(), a.Version())
	}
	for name, spoil := range map[string]func(*attestors.Spec){
		"no id":           func(s *attestors.Spec) { s.ID = "" },
		"capitals":        func(s *attestors.Spec) { s.ID = "Example" },
		"a slash":         func(s *attestors.Spec) { s.ID = "a/b" },
		"an id too long":  func(s *attestors.Spec) { s.ID = strings.Repeat("a", 41) },
		"a dash at last":  func(s *attestors.Spec) { s.ID = "a-" },
		"a bad type":      func(s *attestors.Spec) { s.Type = "TPM" },
		"no version":      func(s *attestors.Spec) { s.Version = "" },
		"a long version":  func(s *attestors.Spec) { s.Version = strings.Repeat("1", 33) },
		"no roles":        func(s *attestors.Spec) { s.Roles = nil },
		"an unknown role": func(s *attestors.Spec) { s.Roles = []attestors.Role{"admin"} },
		"a doubled role":  func(s *attestors.Spec) { s.Roles = []attestors.Role{"node", "node"} },
		"no verifier":     func(s *attestors.Spec) { s.Verify = nil },
	} {
		s := spec()
		spoil(&s)
		if _, err := attestors.Define(s); err == nil {
			t.Errorf("an attestor with %s was defined", name)
		}
	}
}

func TestR21_ARegistryTakesListsAndSkipsWhatIsNoAttestor(t *testing.T) {
	builtin := define(t, attestors.Spec{ID: attestors.DefaultID, Version: "built in", Roles: spec().Roles, Verify: admits})
	own := define(t, attestors.Spec{ID: attestors.DefaultID, Version: "own", Roles: spec().Roles, Verify: admits})
	other := define(t, spec())
	var none *attestors.Attestor
	r, err := attestors.NewRegistry(builtin, "text", 1, nil, none, &attestors.Attestor{}, []any{[]*attestors.Attestor{other, nil}})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(r.IDs(), []string{"example", attestors.DefaultID}) {
		t.Errorf("registered: %v", r.IDs())
	}
	if a, ok := r.Find(""); !ok || a != builtin {
		t.Error("a join that names no attestor does not find the built-in")
	}
	if r, err = attestors.NewRegistry(builtin, own); err != nil {
		t.Fatal(err)
	}
	if a, _ := r.Find(attestors.DefaultID); a != own {
		t.Error("the list's attestor does not take the built-in's place")
	}
	if _, err := attestors.NewRegistry(builtin, other, other); err == nil {
		t.Error("two attestors with one id")
	}
}

// module brings attestors; a nil one is none.
type module struct{ list []*attestors.Attestor }

func (m *module) Attestors() []*attestors.Attestor { return m.list }

func TestR21_ModulesBringAttestors(t *testing.T) {
	builtin := define(t, attestors.Spec{ID: attestors.DefaultID, Version: "built in", Roles: spec().Roles, Verify: admits})
	own := define(t, attestors.Spec{ID: attestors.DefaultID, Version: "own", Roles: spec().Roles, Verify: admits})
	other := define(t, spec())
	var none *module
	r, err := attestors.NewRegistry(builtin, none, &module{}, &module{[]*attestors.Attestor{nil, other}}, []any{&module{[]*attestors.Attestor{own}}})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(r.IDs(), []string{"example", attestors.DefaultID}) {
		t.Errorf("registered: %v", r.IDs())
	}
	if a, _ := r.Find(""); a != own {
		t.Error("the module's attestor does not take the built-in's place")
	}
	if _, ok := r.Find("nobody"); ok {
		t.Error("an attestor that nobody registered was found")
	}
	if _, err := attestors.NewRegistry(builtin, other, &module{[]*attestors.Attestor{other}}); err == nil {
		t.Error("a list and a module with one id")
	}
}

func TestR13_AnAttestorsOwnHookIsToldEachRefusalOnce(t *testing.T) {
	var told []string
	var fails error
	s := spec()
	s.OnRefusal = func(reason string) { told = append(told, reason) }
	s.Prepare = func(context.Context, attestors.Evidence, *attestors.PrepareContext) (any, error) { return nil, fails }
	s.Verify = func(context.Context, attestors.Evidence, *attestors.JoinContext) (attestors.Outcome, error) {
		return &attestors.Admit{}, fails
	}
	plain := define(t, s)
	var m meter
	for name, a := range map[string]*attestors.Attestor{"plain": plain, "metered": attestors.Metered(plain, &m), "defined anew": define(t, plain.Spec())} {
		for _, c := range []struct {
			err  error
			want []string
		}{{attestors.Refuse("why"), []string{"why", "why"}}, {errors.New("a bug"), nil}, {nil, nil}} {
			told, fails = nil, c.err
			_, _ = a.Prepare(t.Context(), attestors.Evidence{}, nil)
			_, _ = a.Verify(t.Context(), attestors.Evidence{}, nil)
			if !slices.Equal(told, c.want) {
				t.Errorf("%s: told %v of %v, want %v", name, told, c.err, c.want)
			}
		}
	}
}

type meter struct {
	verified, refused []string
	took              time.Duration
}

func (m *meter) Verified(id string, v attestors.Verdict, took time.Duration) {
	m.verified, m.took = append(m.verified, id+" "+string(v)), took
}
func (m *meter) Refused(id, reason string) { m.refused = append(m.refused, id+" "+reason) }

func TestR22_AMeterCountsAndTimesVerificationsByOutcome(t *testing.T) {
	var out attestors.Outcome
	var fails error
	s := spec()
	s.Type = "kind"
	s.Verify = func(context.Context, attestors.Evidence, *attestors.JoinContext) (attestors.Outcome, error) {
		time.Sleep(time.Millisecond)
		return out, fails
	}
	var m meter
	a := attestors.Metered(define(t, s), &m)
	if a.ID() != "example" || a.Type() != "kind" || a.Version() != "1" || !a.Admits(attestors.RoleNode) {
		t.Error("the wrapper changes what it wraps")
	}
	boom := errors.New("boom")
	for _, c := range []struct {
		out     attestors.Outcome
		err     error
		verdict attestors.Verdict
	}{
		{&attestors.Admit{}, nil, attestors.VerdictAdmitted},
		{&attestors.Pending{}, nil, attestors.VerdictDeferredPending},
		{&attestors.Challenge{}, nil, attestors.VerdictDeferredChallenge},
		{nil, attestors.Refuse("reason-1").InTenant("t"), attestors.VerdictRefused},
		{nil, boom, attestors.VerdictFailed},
		{nil, nil, attestors.VerdictFailed},
	} {
		out, fails = c.out, c.err
		got, err := a.Verify(t.Context(), attestors.Evidence{}, nil)
		if got != c.out || !errors.Is(err, c.err) {
			t.Errorf("%s: the wrapper changed the outcome: %v, %v", c.verdict, got, err)
		}
		if last := m.verified[len(m.verified)-1]; last != "example "+string(c.verdict) {
			t.Errorf("counted %q, want %q", last, c.verdict)
		}
		if m.took < time.Millisecond {
			t.Errorf("it took %s", m.took)
		}
	}
	if !slices.Equal(m.refused, []string{"example reason-1"}) {
		t.Errorf("refusals: %v", m.refused)
	}
	s.Verify = func(context.Context, attestors.Evidence, *attestors.JoinContext) (attestors.Outcome, error) {
		panic("x")
	}
	panics := attestors.Metered(define(t, s), &m)
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the wrapper hid a panic")
			}
		}()
		_, _ = panics.Verify(t.Context(), attestors.Evidence{}, nil)
	}()
	if last := m.verified[len(m.verified)-1]; last != "example failed" {
		t.Errorf("a panic was counted as %q", last)
	}
}

func TestARefusalIsFoundThroughWrapping(t *testing.T) {
	r := attestors.Refuse("spent").InTenant("factory").Because("%d of %d", 1, 2)
	found, ok := attestors.AsRefusal(errors.Join(errors.New("x"), r))
	if !ok || found.Reason != "spent" || found.Tenant != "factory" || found.Detail != "1 of 2" {
		t.Errorf("%+v", found)
	}
	if _, ok := attestors.AsRefusal(errors.New("x")); ok {
		t.Error("any error is a refusal")
	}
	if strings.Contains(r.Error(), "factory") || strings.Contains(r.Error(), "1 of 2") {
		t.Errorf("the error's text says more than the reason: %s", r)
	}
	for _, reason := range []string{"", "Spent", "a b", strings.Repeat("a", 41), "a:b"} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("reason %q", reason)
				}
			}()
			attestors.Refuse(reason)
		}()
	}
}
