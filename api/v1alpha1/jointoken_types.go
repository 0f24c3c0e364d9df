package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// JoinToken admits machines of its namespace's tenant that bring the token. The
// controller makes the token once and keeps it in a Secret that the JoinToken
// owns; deleting the JoinToken revokes it at once.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=jt,categories=join
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Role",type=string,JSONPath=`.spec.role`
// +kubebuilder:printcolumn:name="Pool",type=string,JSONPath=`.spec.pool`
// +kubebuilder:printcolumn:name="Uses Left",type=integer,JSONPath=`.status.usesLeft`
// +kubebuilder:printcolumn:name="Expires",type=string,JSONPath=`.status.expiresAt`
// +kubebuilder:printcolumn:name="Last Used",type=date,JSONPath=`.status.lastUsedAt`,priority=1
// +kubebuilder:printcolumn:name="Secret",type=string,JSONPath=`.status.secretRef.name`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type JoinToken struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is what the token admits.
	// +required
	Spec JoinTokenSpec `json:"spec"`
	// status is written by the controller alone.
	// +optional
	Status JoinTokenStatus `json:"status,omitzero"`
}

// JoinTokenSpec is what a token admits. Only uses may grow and the expiry move.
//
// The rules of single fields do not run where a field appears or disappears, so
// the rules here say that none does.
//
// +kubebuilder:validation:XValidation:rule="!(has(self.expiresAt) && has(self.ttl))",message="give spec.expiresAt or spec.ttl, not both"
// +kubebuilder:validation:XValidation:rule="has(self.tokenID) == has(self.secretSHA256)",message="spec.tokenID and spec.secretSHA256 come together"
// +kubebuilder:validation:XValidation:rule="has(self.tokenID) == has(oldSelf.tokenID)",message="spec.tokenID and spec.secretSHA256 are immutable, also where they were left out: make another JoinToken",fieldPath=".tokenID"
// +kubebuilder:validation:XValidation:rule="has(self.site) == has(oldSelf.site)",message="spec.site is immutable, also where it was left out: make another JoinToken",fieldPath=".site"
// +kubebuilder:validation:XValidation:rule="has(self.expect) == has(oldSelf.expect)",message="spec.expect is immutable, also where it was left out: make another JoinToken",fieldPath=".expect"
// +kubebuilder:validation:XValidation:rule="(has(self.allowReclaim) && self.allowReclaim) == (has(oldSelf.allowReclaim) && oldSelf.allowReclaim)",message="spec.allowReclaim is immutable: make another JoinToken",fieldPath=".allowReclaim"
type JoinTokenSpec struct {
	// role of the machines that the token admits.
	// +optional
	// +kubebuilder:default=node
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="spec.role is immutable: make another JoinToken"
	Role Role `json:"role,omitempty"`
	// pool is the FleetPool that the machines enter.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="spec.pool is immutable: make another JoinToken"
	Pool string `json:"pool"`
	// site that the machines stand in.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="spec.site is immutable: make another JoinToken"
	Site string `json:"site,omitempty"`
	// uses is how many machines the token admits. It may grow.
	// +optional
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000000
	// +kubebuilder:validation:XValidation:rule="self >= oldSelf",message="spec.uses may grow, not shrink: delete the JoinToken to revoke it"
	Uses int32 `json:"uses,omitempty"`
	// expiresAt is when the token stops admitting machines, as RFC 3339 has it:
	// 2030-01-31T12:00:00Z. It may move.
	// +optional
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:Format=date-time
	// +kubebuilder:validation:MaxLength=35
	// +kubebuilder:validation:Pattern=`^[0-9]{4}-[0-9]{2}-[0-9]{2}T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])$`
	ExpiresAt *metav1.Time `json:"expiresAt,omitempty"`
	// ttl is the same, counted from the object's creation: 24h, or 1h30m.
	// +optional
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="duration(self) > duration('0s')",message="spec.ttl must be positive, for instance 24h"
	TTL *metav1.Duration `json:"ttl,omitempty"`
	// expect binds the token to one machine.
	// +optional
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="spec.expect is immutable: make another JoinToken"
	Expect *TokenExpectation `json:"expect,omitempty"`
	// allowReclaim lets the token admit a machine whose hardware key is enrolled
	// already, as the node that it was.
	// +optional
	AllowReclaim bool `json:"allowReclaim,omitempty"`
	// tokenID and secretSHA256 bring a token whose secret lives elsewhere; no
	// Secret is made then. tokenID is 12 characters of a-z and 2-7.
	// +optional
	// +kubebuilder:validation:MaxLength=12
	// +kubebuilder:validation:Pattern=`^[a-z2-7]{12}$`
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="spec.tokenID is immutable: make another JoinToken"
	TokenID string `json:"tokenID,omitempty"`
	// secretSHA256 is SHA-256 over "bcjt/v1" NUL namespace NUL tokenID NUL
	// secret, in hexadecimal: a hash copied into another tenant opens nothing.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{64}$`
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="spec.secretSHA256 is immutable: make another JoinToken"
	SecretSHA256 string `json:"secretSHA256,omitempty"`
}

// TokenExpectation is what a machine must be. UUID, serial number and MAC
// address are what it claims of itself: they guard against mistakes, not thieves.
//
// +kubebuilder:validation:MinProperties=1
type TokenExpectation struct {
	// productUUID in any spelling that firmware uses.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^[ -~]*$`
	ProductUUID string `json:"productUUID,omitempty"`
	// serialNumber of the machine.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=128
	// +kubebuilder:validation:Pattern=`^[ -~]*$`
	SerialNumber string `json:"serialNumber,omitempty"`
	// macAddress that one of its interfaces has.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^[ -~]*$`
	MACAddress string `json:"macAddress,omitempty"`
	// hardwareKeySHA256 is satisfied by proof only: by an attestor, or by the
	// certificate request's own key.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{64}$`
	HardwareKeySHA256 string `json:"hardwareKeySHA256,omitempty"`
}

// JoinTokenStatus is what became of a token.
type JoinTokenStatus struct {
	// observedGeneration is the generation that the conditions speak of.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// conditions: Ready, SecretLost.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// tokenID is the public part of the token.
	// +optional
	TokenID string `json:"tokenID,omitempty"`
	// secretRef is the Secret that holds the token under the key token.
	// +optional
	SecretRef *SecretReference `json:"secretRef,omitempty"`
	// usesLeft is how many machines the token still admits.
	// +optional
	UsesLeft *int32 `json:"usesLeft,omitempty"`
	// expiresAt is when it stops.
	// +optional
	ExpiresAt *metav1.Time `json:"expiresAt,omitempty"`
	// lastUsedAt is when it last admitted a machine.
	// +optional
	LastUsedAt *metav1.Time `json:"lastUsedAt,omitempty"`
}

// SecretReference names a Secret of the same namespace.
type SecretReference struct {
	// name of the Secret.
	// +required
	Name string `json:"name"`
}

// JoinTokenList is a list of JoinTokens.
//
// +kubebuilder:object:root=true
type JoinTokenList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []JoinToken `json:"items"`
}
