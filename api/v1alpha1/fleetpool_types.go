package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// FleetPool is a group of nodes with one policy. Its name is what approvers hold
// their right on.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=fp,categories=join
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Approval",type=boolean,JSONPath=`.spec.requireApproval`
// +kubebuilder:printcolumn:name="Active",type=integer,JSONPath=`.status.nodes.active`
// +kubebuilder:printcolumn:name="Adopting",type=integer,JSONPath=`.status.nodes.adopting`
// +kubebuilder:printcolumn:name="Retired",type=integer,JSONPath=`.status.nodes.retired`
// +kubebuilder:printcolumn:name="Lifetime",type=string,JSONPath=`.spec.certificateLifetime`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="self.metadata.name.matches('^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$')",message="metadata.name must be a DNS label of at most 63 characters"
type FleetPool struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the pool's policy.
	// +optional
	// +kubebuilder:default={}
	Spec FleetPoolSpec `json:"spec,omitzero"`
	// status is written by the controller alone.
	// +optional
	Status FleetPoolStatus `json:"status,omitzero"`
}

// FleetPoolSpec is the policy of a pool.
type FleetPoolSpec struct {
	// certificateLifetime of its nodes, from 1h to 720h.
	// +optional
	// +kubebuilder:default="168h"
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1h') && duration(self) <= duration('720h')",message="spec.certificateLifetime must be from 1h to 720h"
	CertificateLifetime *metav1.Duration `json:"certificateLifetime,omitempty"`
	// ramdiskLifetime is that of a ramdisk's certificate, at most 168h.
	// +optional
	// +kubebuilder:default="24h"
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('5m') && duration(self) <= duration('168h')",message="spec.ramdiskLifetime must be from 5m to 168h"
	RamdiskLifetime *metav1.Duration `json:"ramdiskLifetime,omitempty"`
	// onConflict says what happens when two machines hold one identity: Hold lets
	// the newest certificate stay valid while nobody renews; RevokeAll revokes all.
	// +optional
	// +kubebuilder:default=Hold
	OnConflict ConflictPolicy `json:"onConflict,omitempty"`
	// requireApproval makes every join into this pool wait for a person.
	// +optional
	RequireApproval bool `json:"requireApproval,omitempty"`
	// allowedKinds of commands, a registered kind or "prefix.*"; absent allows
	// all, an empty list none.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=64
	// +kubebuilder:validation:items:Pattern=`^[a-z0-9]+([.-][a-z0-9]+)*(\.\*)?$`
	AllowedKinds *[]string `json:"allowedKinds,omitempty"`
	// nodeObjects says whether nodes of this pool are shown as FleetNodes.
	// +optional
	// +kubebuilder:default=All
	NodeObjects NodeObjectPolicy `json:"nodeObjects,omitempty"`
}

// ConflictPolicy says what happens when two machines hold one identity.
//
// +kubebuilder:validation:Enum=Hold;RevokeAll
type ConflictPolicy string

// The conflict policies.
const (
	ConflictHold      ConflictPolicy = "Hold"
	ConflictRevokeAll ConflictPolicy = "RevokeAll"
)

// NodeObjectPolicy says which nodes are shown as objects.
//
// +kubebuilder:validation:Enum=All;None
type NodeObjectPolicy string

// The node object policies.
const (
	NodeObjectsAll  NodeObjectPolicy = "All"
	NodeObjectsNone NodeObjectPolicy = "None"
)

// FleetPoolStatus is what a pool holds.
type FleetPoolStatus struct {
	// observedGeneration is the generation that the conditions speak of, which
	// every replica of the join service decides by when Ready is true.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// conditions: Ready, ObjectsCapped.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// nodes counts the pool's nodes by state.
	// +optional
	Nodes *NodeCounts `json:"nodes,omitempty"`
}

// NodeCounts counts nodes by state.
type NodeCounts struct {
	// adopting counts nodes that have not been heard of since they joined.
	Adopting int64 `json:"adopting"`
	// active counts nodes that are there.
	Active int64 `json:"active"`
	// retired counts nodes that were taken out.
	Retired int64 `json:"retired"`
}

// FleetPoolList is a list of FleetPools.
//
// +kubebuilder:object:root=true
type FleetPoolList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []FleetPool `json:"items"`
}
