package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// FleetNode is a machine of the fleet as its row in the database has it. Its
// name is the node's id. Setting spec.retired retires it; deleting it revokes
// its certificates and forgets the node.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=fn,categories=join
// +kubebuilder:selectablefield:JSONPath=`.spec.pool`
// +kubebuilder:printcolumn:name="State",type=string,JSONPath=`.status.state`
// +kubebuilder:printcolumn:name="Role",type=string,JSONPath=`.status.role`
// +kubebuilder:printcolumn:name="Pool",type=string,JSONPath=`.status.pool`
// +kubebuilder:printcolumn:name="Site",type=string,JSONPath=`.status.site`
// +kubebuilder:printcolumn:name="Attestor",type=string,JSONPath=`.status.attestor`
// +kubebuilder:printcolumn:name="Cert Expires",type=string,JSONPath=`.status.certificate.notAfter`
// +kubebuilder:printcolumn:name="Last Seen",type=date,JSONPath=`.status.lastSeenAt`
// +kubebuilder:printcolumn:name="Node Key",type=string,JSONPath=`.status.nodeKey`,priority=1
// +kubebuilder:printcolumn:name="Serial",type=string,JSONPath=`.status.certificate.serialNumber`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type FleetNode struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is what an administrator wants of the node. Its default keeps it there,
	// so that its rules cannot be walked around by leaving it out.
	// +optional
	// +kubebuilder:default={}
	Spec FleetNodeSpec `json:"spec,omitzero"`
	// status is the node's row.
	// +optional
	Status FleetNodeStatus `json:"status,omitzero"`
}

// FleetNodeSpec is what an administrator may change.
//
// +kubebuilder:validation:XValidation:rule="!(has(oldSelf.retired) && oldSelf.retired) || (has(self.retired) && self.retired)",message="spec.retired is final: delete the node and let the machine join anew",fieldPath=".retired"
type FleetNodeSpec struct {
	// retired takes the node out of the fleet: its certificates are revoked and
	// the same machine's next join waits for a person.
	// +optional
	Retired bool `json:"retired,omitempty"`
	// pool moves the node to another pool of the tenant.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Pool string `json:"pool,omitempty"`
	// site says where the node stands now.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Site string `json:"site,omitempty"`
}

// NodeState is the state of a node's row.
//
// +kubebuilder:validation:Enum=Adopting;Active;Retired
type NodeState string

// The states of a node: it has a certificate and has not been heard of; it has
// said that it is there; it was taken out.
const (
	NodeAdopting NodeState = "Adopting"
	NodeActive   NodeState = "Active"
	NodeRetired  NodeState = "Retired"
)

// FleetNodeStatus is the node's row.
type FleetNodeStatus struct {
	// observedGeneration is the generation that the conditions speak of.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// conditions: Ready, Conflicted, ReclaimRefused, Held.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// state of the node.
	// +optional
	State NodeState `json:"state,omitempty"`
	// role of the node.
	// +optional
	Role Role `json:"role,omitempty"`
	// pool the node is in.
	// +optional
	Pool string `json:"pool,omitempty"`
	// site the node stands in.
	// +optional
	Site string `json:"site,omitempty"`
	// attestor that admitted it last.
	// +optional
	Attestor string `json:"attestor,omitempty"`
	// nodeKey is the statement about its key, or "unattested".
	// +optional
	NodeKey string `json:"nodeKey,omitempty"`
	// certificate is its newest one.
	// +optional
	Certificate *NodeCertificate `json:"certificate,omitempty"`
	// facts is what was proved when it joined.
	// +optional
	Facts map[string]PrintableValue `json:"facts,omitempty"`
	// joinedAt is when it entered the fleet.
	// +optional
	JoinedAt *metav1.Time `json:"joinedAt,omitempty"`
	// lastSeenAt is when it was last heard of, to within six hours.
	// +optional
	LastSeenAt *metav1.Time `json:"lastSeenAt,omitempty"`
}

// NodeCertificate is a certificate of a node.
type NodeCertificate struct {
	// serialNumber in hexadecimal.
	// +required
	SerialNumber string `json:"serialNumber"`
	// notAfter is when it runs out.
	// +required
	NotAfter metav1.Time `json:"notAfter"`
	// role that it names.
	// +optional
	Role Role `json:"role,omitempty"`
}

// FleetNodeList is a list of FleetNodes.
//
// +kubebuilder:object:root=true
type FleetNodeList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []FleetNode `json:"items"`
}
