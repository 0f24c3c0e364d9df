// Package v1alpha1 holds the custom resources of join-operator: what people
// configure, what they decide, and what they see of their fleet.
//
// +kubebuilder:object:generate=true
// +groupName=join.better-compute.dev
package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupVersion is the group and version of every kind of this package.
var GroupVersion = schema.GroupVersion{Group: "join.better-compute.dev", Version: "v1alpha1"}

// AddToScheme adds the kinds of this package to a scheme.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion,
		&JoinRequest{}, &JoinRequestList{},
		&JoinToken{}, &JoinTokenList{},
		&FleetNode{}, &FleetNodeList{},
		&FleetPool{}, &FleetPoolList{},
		&AttestorConfig{}, &AttestorConfigList{},
	)
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}
