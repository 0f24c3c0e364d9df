package joinsvc_test

import (
	"context"
	"testing"

	"github.com/better-compute/join-operator/attestors"
)

// scripted is an attestor that does what a test says.
func scripted(tb testing.TB, id string, verify attestors.VerifyFunc) *attestors.Attestor {
	tb.Helper()
	a, err := attestors.Define(attestors.Spec{
		ID: id, Version: "1", Roles: []attestors.Role{attestors.RoleNode, attestors.RoleSite, attestors.RoleRamdisk}, Verify: verify,
	})
	if err != nil {
		tb.Fatal(err)
	}
	return a
}

// admitting admits whoever the payload names, as a proved subject.
func admitting(ctx context.Context, ev attestors.Evidence, jc *attestors.JoinContext) (*attestors.Admit, error) {
	if len(ev.Payload) == 0 {
		return nil, attestors.Refuse("no-payload")
	}
	return &attestors.Admit{Subject: ev.Payload, SubjectProved: true, Tenant: tenant, Pool: "general", Role: jc.Role}, nil
}
