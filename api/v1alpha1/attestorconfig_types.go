package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// AttestorConfig configures an attestor. Its name is the id that machines ask for.
// Every replica of the join service decides by the version that its status says is
// in force; a change that is not sound leaves the version before it in force.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,shortName=ac,categories=join
// +kubebuilder:printcolumn:name="Type",type=string,JSONPath=`.spec.type`
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Version",type=integer,JSONPath=`.status.inForce.version`
// +kubebuilder:printcolumn:name="Replicas",type=integer,JSONPath=`.status.inForce.replicas`
// +kubebuilder:printcolumn:name="Of",type=integer,JSONPath=`.status.inForce.ofReplicas`,priority=1
// +kubebuilder:printcolumn:name="Approval",type=string,JSONPath=`.spec.approval`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="self.metadata.name.matches('^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$')",message="metadata.name is what machines ask for: at most 40 of a-z, 0-9 and -, a letter first, no - last"
// +kubebuilder:validation:XValidation:rule="!(self.metadata.name in ['join', 'renew', 'none'])",message="metadata.name must not be join, renew or none, which mean something else where an attestor's id stands"
// +kubebuilder:validation:XValidation:rule="(self.metadata.name != 'join-token' || self.spec.type == 'joinToken') && (self.metadata.name != 'x509pop' || self.spec.type == 'x509pop') && !(self.metadata.name in ['tpm', 'cloud-iid', 'discovery', 'image'])",message="metadata.name is that of a built-in attestor, which only a configuration of its own type may have"
type AttestorConfig struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is what the attestor does.
	// +required
	Spec AttestorConfigSpec `json:"spec"`
	// status is written by the controller alone.
	// +optional
	Status AttestorConfigStatus `json:"status,omitzero"`
}

// AttestorConfigSpec is what an attestor does: type picks the built-in code, the
// part of that name configures it; the rest is the same for all types.
//
// A new type adds its name to [AttestorType], a part, and a rule below.
//
// +kubebuilder:validation:XValidation:rule="(self.type == 'external') == has(self.external)",message="spec.external goes with spec.type external, and with no other",fieldPath=".external"
// +kubebuilder:validation:XValidation:rule="(self.type == 'x509pop') == has(self.x509pop)",message="spec.x509pop goes with spec.type x509pop, and with no other (it may be {})",fieldPath=".x509pop"
// +kubebuilder:validation:XValidation:rule="(self.type == 'joinToken') == has(self.joinToken)",message="spec.joinToken goes with spec.type joinToken, and with no other (it may be {})",fieldPath=".joinToken"
// +kubebuilder:validation:XValidation:rule="!has(self.rules) || self.type == 'external'",message="spec.rules do not go with this type: a token, and the node that a certificate is of, say themselves where a machine belongs",fieldPath=".rules"
// +kubebuilder:validation:XValidation:rule="!has(self.rules) || !has(self.external) || self.rules.all(r, r.tenant in self.external.allowedTenants)",message="spec.rules may name only tenants of spec.external.allowedTenants",fieldPath=".rules"
type AttestorConfigSpec struct {
	// type of the attestor. The part of that name configures it.
	// +required
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="spec.type is immutable: make another AttestorConfig"
	Type AttestorType `json:"type"`
	// external has the decision made by an HTTPS endpoint outside of the service.
	// +optional
	External *ExternalAttestor `json:"external,omitempty"`
	// x509pop lets machines in again by a certificate that this system issued.
	// +optional
	X509POP *X509POPAttestor `json:"x509pop,omitempty"`
	// joinToken lets machines in by a JoinToken.
	// +optional
	JoinToken *JoinTokenAttestor `json:"joinToken,omitempty"`

	// roles that machines may join as through this attestor.
	// +required
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=3
	Roles []Role `json:"roles"`
	// approval says when a person is asked before a machine joins: Always, or Never
	// on this attestor's account (a pool's requireApproval holds besides).
	// +optional
	// +kubebuilder:default=Never
	Approval ApprovalPolicy `json:"approval,omitempty"`
	// rules say where machines belong, in order: the first whose expression is true.
	// Where none is, and where one before it fails, the machine is refused. They go
	// with types whose evidence does not say it.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:XValidation:rule="self.all(r, self.exists_one(s, s.name == r.name))",message="each of spec.rules has a name of its own"
	Rules []AttestorRule `json:"rules,omitempty"`
}

// AttestorType is a type of attestor that can be configured.
//
// +kubebuilder:validation:Enum=external;x509pop;joinToken
type AttestorType string

// The types of attestors.
const (
	AttestorExternal  AttestorType = "external"
	AttestorX509POP   AttestorType = "x509pop"
	AttestorJoinToken AttestorType = "joinToken"
)

// ApprovalPolicy says when a person is asked.
//
// +kubebuilder:validation:Enum=Never;Always
type ApprovalPolicy string

// The approval policies.
const (
	ApprovalNever  ApprovalPolicy = "Never"
	ApprovalAlways ApprovalPolicy = "Always"
)

// AttestorRule sends machines of which something was verified to one place.
type AttestorRule struct {
	// name of the rule, by which refusals speak of it.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Name string `json:"name"`
	// when is a CEL expression over what was verified (facts, role,
	// hardwareKeySHA256, and what the type adds), for example:
	// 'site' in facts && facts.site == 'ams'. Nothing that a machine merely claims
	// is visible.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=2048
	When string `json:"when"`
	// tenant that the machine joins, as it is written here.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Tenant string `json:"tenant"`
	// pool of that tenant.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Pool string `json:"pool"`
	// site that the machine stands in.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Site string `json:"site,omitempty"`
}

// ExternalAttestor is an HTTPS endpoint that verifies evidence. The service shows it
// its client certificate.
//
// +kubebuilder:validation:XValidation:rule="has(self.caBundle) != has(self.caConfigMapRef)",message="give spec.external.caBundle or spec.external.caConfigMapRef, and not both"
type ExternalAttestor struct {
	// url that evidence is posted to, beginning with https://.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=2048
	// +kubebuilder:validation:Pattern=`^https://[!-~]+$`
	URL string `json:"url"`
	// caBundle is the certificates, as PEM, that the endpoint's is verified by.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=65536
	CABundle string `json:"caBundle,omitempty"`
	// caConfigMapRef is where those certificates stand instead.
	// +optional
	CAConfigMapRef *ConfigMapKeyReference `json:"caConfigMapRef,omitempty"`
	// timeoutSeconds is how long the endpoint may take.
	// +optional
	// +kubebuilder:default=3
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=4
	TimeoutSeconds int32 `json:"timeoutSeconds,omitempty"`
	// failurePolicy says what happens to a machine while the endpoint is down, slow
	// or makes no sense: Refuse it, or Defer it, so that it waits and asks again.
	// +optional
	// +kubebuilder:default=Refuse
	FailurePolicy ExternalFailurePolicy `json:"failurePolicy,omitempty"`
	// allowedTenants are those that machines may join through it, whatever it says.
	// +required
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=63
	// +kubebuilder:validation:items:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	AllowedTenants []string `json:"allowedTenants"`
}

// ExternalFailurePolicy says what happens while an endpoint does not answer.
//
// +kubebuilder:validation:Enum=Refuse;Defer
type ExternalFailurePolicy string

// The failure policies.
const (
	FailureRefuse ExternalFailurePolicy = "Refuse"
	FailureDefer  ExternalFailurePolicy = "Defer"
)

// ConfigMapKeyReference is one key of a ConfigMap in the operator's own namespace.
// What is public may stand there; nothing of ours reads a Secret.
type ConfigMapKeyReference struct {
	// name of the ConfigMap.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`
	// key of the ConfigMap's data.
	// +optional
	// +kubebuilder:default=ca.crt
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Key string `json:"key,omitempty"`
}

// X509POPAttestor lets machines in again by a certificate that this system issued.
type X509POPAttestor struct {
	// maxExpired is how long ago the certificate may have run out, from 0s to 8760h.
	// +optional
	// +kubebuilder:default="2160h"
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('0s') && duration(self) <= duration('8760h')",message="spec.x509pop.maxExpired must be from 0s to 8760h"
	MaxExpired *metav1.Duration `json:"maxExpired,omitempty"`
}

// JoinTokenAttestor lets machines in by a JoinToken. It has no configuration of its
// own: roles and approval are what can be said.
type JoinTokenAttestor struct{}

// AttestorConfigStatus is what became of a configuration.
type AttestorConfigStatus struct {
	// observedGeneration is the generation that the conditions speak of.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// conditions: Ready, Valid.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// inForce is what replicas of the join service decide by; absent where none
	// was ever sound.
	// +optional
	InForce *AttestorConfigInForce `json:"inForce,omitempty"`
}

// AttestorConfigInForce is the version that was published last.
type AttestorConfigInForce struct {
	// version grows with every change of what is published, for all
	// AttestorConfigs together.
	Version int64 `json:"version"`
	// generation of this object that it was made of.
	Generation int64 `json:"generation"`
	// replicas of the join service that decide by it.
	Replicas int32 `json:"replicas"`
	// ofReplicas is how many replicas there are.
	OfReplicas int32 `json:"ofReplicas"`
}

// AttestorConfigList is a list of AttestorConfigs.
//
// +kubebuilder:object:root=true
type AttestorConfigList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []AttestorConfig `json:"items"`
}
