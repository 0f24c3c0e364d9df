package configured

import (
	"encoding/json"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/attestors"
	"github.com/better-compute/join-operator/attestors/jointoken"
)

// BuiltIn is the types of this release. A new one is a line here, its part of
// [v1alpha1.AttestorConfigSpec], and a factory.
func BuiltIn() Types {
	return Types{
		v1alpha1.AttestorJoinToken: {Attestor: attestors.DefaultID, New: joinToken},
	}
}

// joinToken is the built-in under the configuration's name.
func joinToken(id string, _ json.RawMessage, _ attestors.Environment) (*attestors.Attestor, error) {
	s := jointoken.New().Spec()
	s.ID = id
	return attestors.Define(s)
}
