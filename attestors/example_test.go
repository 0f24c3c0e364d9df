package attestors_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/better-compute/join-operator/attestors"
)

// An attestor that admits machines by a list. It names its machines (Subject), and
// where they belong; whether each may join only once is said by Use or Bind.
func ExampleDefine() {
	known := map[string]string{"rack-7-slot-3": "general"}
	a, err := attestors.Define(attestors.Spec{
		ID: "by-list", Version: "1", Roles: []attestors.Role{attestors.RoleNode},
		Verify: func(_ context.Context, ev attestors.Evidence, jc *attestors.JoinContext) (attestors.Outcome, error) {
			pool, ok := known[string(ev.Payload)]
			if !ok {
				return nil, attestors.Refuse("unknown").Because("the list has no such machine")
			}
			return &attestors.Admit{Subject: ev.Payload, Tenant: "factory", Pool: pool, Role: jc.Role}, nil
		},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, machine := range []string{"rack-7-slot-3", "rack-9-slot-1"} {
		out, err := a.Verify(context.Background(), attestors.Evidence{Payload: []byte(machine)}, &attestors.JoinContext{Role: attestors.RoleNode})
		if err != nil {
			fmt.Println(err)
			continue
		}
		admit := out.(*attestors.Admit)
		fmt.Println("admitted into", admit.Tenant, admit.Pool)
	}
	fmt.Println("ramdisks:", a.Admits(attestors.RoleRamdisk))
	// Output:
	// admitted into factory general
	// refused: unknown
	// ramdisks: false
}

// In a first round the verifier asks, in the second the machine brings the state
// back, which the service sealed and bound to the CSR, the role and the attestor.
func ExampleChallenge() {
	verify := func(_ context.Context, ev attestors.Evidence, jc *attestors.JoinContext) (attestors.Outcome, error) {
		if ev.State == nil {
			return &attestors.Challenge{Data: []byte("what is 6 x 7?"), State: []byte("42")}, nil
		}
		if string(ev.Payload) != string(ev.State) {
			return nil, attestors.Refuse("wrong-answer")
		}
		return &attestors.Admit{Subject: jc.CSRSHA256[:], Tenant: "factory", Pool: "general", Role: jc.Role}, nil
	}
	jc := &attestors.JoinContext{Role: attestors.RoleNode}
	out, _ := verify(context.Background(), attestors.Evidence{}, jc)
	challenge := out.(*attestors.Challenge)
	fmt.Println(string(challenge.Data))
	_, err := verify(context.Background(), attestors.Evidence{Payload: []byte("41"), State: challenge.State}, jc)
	fmt.Println(err)
	out, _ = verify(context.Background(), attestors.Evidence{Payload: []byte("42"), State: challenge.State}, jc)
	fmt.Printf("%T\n", out)
	// Output:
	// what is 6 x 7?
	// refused: wrong-answer
	// *attestors.Admit
}

// A refusal says why to operators alone; InTenant only once the evidence proved
// the tenant.
func ExampleRefuse() {
	r := attestors.Refuse("spent").InTenant("factory").Because("JoinToken %s has no uses left: raise its spec.uses", "factory/rack-7")
	fmt.Println(r)
	fmt.Println(r.Reason, "/", r.Tenant, "/", r.Detail)
	// Output:
	// refused: spent
	// spent / factory / JoinToken factory/rack-7 has no uses left: raise its spec.uses
}

// assetTags is a module of a program: it brings attestors of its own.
type assetTags struct{ vendors []string }

func (m assetTags) Attestors() []*attestors.Attestor {
	var out []*attestors.Attestor
	for _, v := range m.vendors {
		a, err := attestors.Define(attestors.Spec{
			ID: "asset-tag-" + v, Version: "1", Roles: []attestors.Role{attestors.RoleNode},
			Verify: func(context.Context, attestors.Evidence, *attestors.JoinContext) (attestors.Outcome, error) {
				return nil, attestors.Refuse("not-here")
			},
		})
		if err != nil {
			panic(err) // constant specs
		}
		out = append(out, a)
	}
	return out
}

// What is no attestor in the list is skipped.
func ExampleNewRegistry() {
	r, err := attestors.NewRegistry(nil, assetTags{[]string{"acme", "globex"}}, "something else", nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(r.IDs())
	_, known := r.Find("asset-tag-initech")
	fmt.Println(known)
	// Output:
	// [asset-tag-acme asset-tag-globex]
	// false
}

// counts is a meter that counts in memory.
type counts map[string]int

func (c counts) Verified(attestor string, v attestors.Verdict, _ time.Duration) {
	c[attestor+" "+string(v)]++
}
func (c counts) Refused(attestor, reason string) { c[attestor+":"+reason]++ }

func ExampleMetered() {
	seen := counts{}
	for _, a := range (assetTags{[]string{"acme"}}).Attestors() {
		_, _ = attestors.Metered(a, seen).Verify(context.Background(), attestors.Evidence{}, &attestors.JoinContext{})
	}
	for _, what := range slices.Sorted(maps.Keys(seen)) {
		fmt.Println(what, seen[what])
	}
	// Output:
	// asset-tag-acme refused 1
	// asset-tag-acme:not-here 1
}
