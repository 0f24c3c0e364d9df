package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// JoinRequest is a machine that asks to join and waits for a person. What it
// asked cannot be changed; `kubectl approve joinrequest NAME` or
// `kubectl reject joinrequest NAME` decides, once.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=jr,categories=join
// +kubebuilder:selectablefield:JSONPath=`.spec.decision.verdict`
// +kubebuilder:selectablefield:JSONPath=`.spec.attestor`
// +kubebuilder:selectablefield:JSONPath=`.spec.pool`
// +kubebuilder:printcolumn:name="Verdict",type=string,JSONPath=`.spec.decision.verdict`
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Attestor",type=string,JSONPath=`.spec.attestor`
// +kubebuilder:printcolumn:name="Role",type=string,JSONPath=`.spec.role`
// +kubebuilder:printcolumn:name="Pool",type=string,JSONPath=`.spec.pool`
// +kubebuilder:printcolumn:name="Serial",type=string,JSONPath=`.spec.claims.serialNumber`,priority=1
// +kubebuilder:printcolumn:name="Decided By",type=string,JSONPath=`.spec.decision.decidedBy.username`,priority=1
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.status.nodeRef.name`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type JoinRequest struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is what was asked, and what was decided about it.
	// +required
	Spec JoinRequestSpec `json:"spec"`
	// status is written by the controllers alone.
	// +optional
	Status JoinRequestStatus `json:"status,omitzero"`
}

// JoinRequestSpec is what was asked and, in decision, what a person decided.
//
// The rules of single fields do not run where a field appears or disappears, so
// the rules here say that none does.
//
// +kubebuilder:validation:XValidation:rule="oldSelf.hasValue() || !has(self.decision)",optionalOldSelf=true,message="spec.decision cannot be given at creation: create the request undecided, then run kubectl approve or kubectl reject",fieldPath=".decision"
// +kubebuilder:validation:XValidation:rule="!oldSelf.hasValue() || !has(oldSelf.value().decision) || (has(self.decision) && self.decision == oldSelf.value().decision)",optionalOldSelf=true,message="spec.decision is final: it can be neither changed nor removed",fieldPath=".decision"
// +kubebuilder:validation:XValidation:rule="has(self.attestorVersion) == has(oldSelf.attestorVersion)",message="spec.attestorVersion is immutable: it can be neither added nor removed",fieldPath=".attestorVersion"
// +kubebuilder:validation:XValidation:rule="has(self.pool) == has(oldSelf.pool)",message="spec.pool is immutable: it can be neither added nor removed",fieldPath=".pool"
// +kubebuilder:validation:XValidation:rule="has(self.site) == has(oldSelf.site)",message="spec.site is immutable: it can be neither added nor removed",fieldPath=".site"
// +kubebuilder:validation:XValidation:rule="has(self.nodeName) == has(oldSelf.nodeName)",message="spec.nodeName is immutable: it can be neither added nor removed",fieldPath=".nodeName"
// +kubebuilder:validation:XValidation:rule="has(self.hardwareKeySHA256) == has(oldSelf.hardwareKeySHA256)",message="spec.hardwareKeySHA256 is immutable: it can be neither added nor removed",fieldPath=".hardwareKeySHA256"
// +kubebuilder:validation:XValidation:rule="has(self.claims) == has(oldSelf.claims)",message="spec.claims is immutable: it can be neither added nor removed",fieldPath=".claims"
// +kubebuilder:validation:XValidation:rule="has(self.facts) == has(oldSelf.facts)",message="spec.facts is immutable: it can be neither added nor removed",fieldPath=".facts"
type JoinRequestSpec struct {
	JoinRequestAsk `json:",inline"`

	// decision is what a person decided: absent until then, final from then on.
	// +optional
	Decision *Decision `json:"decision,omitempty"`
}

// JoinRequestAsk is what a machine asked for: immutable, and hashed into the
// database's row, so that what is approved is what joins.
type JoinRequestAsk struct {
	// attestor is the id that the machine named.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=40
	// +kubebuilder:validation:Pattern=`^[a-z0-9-]+$`
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="spec.attestor is immutable: a machine that asks for something else makes a request of its own"
	Attestor string `json:"attestor"`
	// attestorVersion is the verifier's version.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="spec.attestorVersion is immutable: a machine that asks for something else makes a request of its own"
	AttestorVersion string `json:"attestorVersion,omitempty"`
	// role is what the machine asks to be.
	// +required
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="spec.role is immutable: a machine that asks for something else makes a request of its own"
	Role Role `json:"role"`
	// pool is where the machine would go. Whoever may approve it holds the verb
	// approve on the fleetpool of this name.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="spec.pool is immutable: a machine that asks for something else makes a request of its own"
	Pool string `json:"pool,omitempty"`
	// site is where the machine stands.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="spec.site is immutable: a machine that asks for something else makes a request of its own"
	Site string `json:"site,omitempty"`
	// nodeName is the node that would be reclaimed.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="spec.nodeName is immutable: a machine that asks for something else makes a request of its own"
	NodeName string `json:"nodeName,omitempty"`
	// csrSHA256 is the hash of the machine's certificate request, in hexadecimal.
	// +required
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{64}$`
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="spec.csrSHA256 is immutable: a machine that asks for something else makes a request of its own"
	CSRSHA256 string `json:"csrSHA256"`
	// publicKeySHA256 is the hash of the key in it (SubjectPublicKeyInfo); the
	// machine prints it in `bcd status`, so that a person can compare.
	// +required
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{64}$`
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="spec.publicKeySHA256 is immutable: a machine that asks for something else makes a request of its own"
	PublicKeySHA256 string `json:"publicKeySHA256"`
	// subjectSHA256 is the hash of what the attestor says is joining.
	// +required
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{64}$`
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="spec.subjectSHA256 is immutable: a machine that asks for something else makes a request of its own"
	SubjectSHA256 string `json:"subjectSHA256"`
	// hardwareKeySHA256 is the hash of a hardware key that was proved.
	// +optional
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{64}$`
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="spec.hardwareKeySHA256 is immutable: a machine that asks for something else makes a request of its own"
	HardwareKeySHA256 string `json:"hardwareKeySHA256,omitempty"`
	// claims is what the machine says of itself. Nobody proved any of it.
	// +optional
	// +kubebuilder:validation:MaxProperties=32
	// +kubebuilder:validation:XValidation:rule="self.all(k, k.matches('^[!-~]{1,64}$'))",message="names of claims are 1 to 64 printable ASCII characters without spaces"
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="spec.claims is immutable: a machine that asks for something else makes a request of its own"
	Claims map[string]PrintableValue `json:"claims,omitempty"`
	// facts is what the attestor proved, in digests and labels.
	// +optional
	// +kubebuilder:validation:MaxProperties=32
	// +kubebuilder:validation:XValidation:rule="self.all(k, k.matches('^[!-~]{1,64}$'))",message="names of facts are 1 to 64 printable ASCII characters without spaces"
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="spec.facts is immutable: a machine that asks for something else makes a request of its own"
	Facts map[string]PrintableValue `json:"facts,omitempty"`
}

// PrintableValue is a short text that is safe to show in a terminal.
//
// +kubebuilder:validation:MaxLength=256
// +kubebuilder:validation:Pattern=`^[ -~]*$`
type PrintableValue string

// Verdict is what a person decided.
//
// +kubebuilder:validation:Enum=Approved;Rejected
type Verdict string

// The verdicts.
const (
	VerdictApproved Verdict = "Approved"
	VerdictRejected Verdict = "Rejected"
)

// Decision is who decided what.
//
// +kubebuilder:validation:XValidation:rule="self.verdict == 'Approved' || (!has(self.pool) && !has(self.tenant))",message="spec.decision.pool and spec.decision.tenant are for approvals: a rejection is about what was asked"
type Decision struct {
	// verdict is Approved or Rejected.
	// +required
	Verdict Verdict `json:"verdict"`
	// decidedBy is the user who decided, exactly as the API server knew them; an
	// admission policy refuses anything else.
	// +required
	DecidedBy UserInfo `json:"decidedBy"`
	// message is for people: at most 1024 characters, in one line.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	// +kubebuilder:validation:Pattern=`^[^\p{Cc}]*$`
	Message string `json:"message,omitempty"`
	// pool approves into another pool of the tenant.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Pool string `json:"pool,omitempty"`
	// tenant claims an unassigned machine, one that waits in the operator's own
	// namespace, for a tenant.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Tenant string `json:"tenant,omitempty"`
}

// UserInfo is a user as the API server authenticated them.
type UserInfo struct {
	// username of the user.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	Username string `json:"username"`
	// uid of the user, where the authenticator gives one.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	UID string `json:"uid,omitempty"`
	// groups of the user.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=512
	// +kubebuilder:validation:items:MaxLength=512
	Groups []string `json:"groups,omitempty"`
	// extra is what else the authenticator says.
	// +optional
	// +kubebuilder:validation:MaxProperties=64
	Extra map[string]ExtraValue `json:"extra,omitempty"`
}

// ExtraValue is the values of one extra attribute of a user.
//
// +kubebuilder:validation:MaxItems=64
// +kubebuilder:validation:items:MaxLength=4096
type ExtraValue []string

// JoinRequestStatus is what became of a request.
type JoinRequestStatus struct {
	// observedGeneration is the generation that the conditions speak of.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// conditions: Recorded, Joined, Expired, Superseded, Ready.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// nodeRef is the node that the machine joined as.
	// +optional
	NodeRef *NodeReference `json:"nodeRef,omitempty"`
	// othersWaiting counts the undecided requests that name the same unproved
	// subject (for join-token: the same token).
	// +optional
	OthersWaiting int32 `json:"othersWaiting,omitempty"`
}

// NodeReference names a FleetNode.
type NodeReference struct {
	// name of the node.
	// +required
	// +kubebuilder:validation:MaxLength=63
	Name string `json:"name"`
	// namespace of the node, where it is not the request's own.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace,omitempty"`
}

// JoinRequestList is a list of JoinRequests.
//
// +kubebuilder:object:root=true
type JoinRequestList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []JoinRequest `json:"items"`
}
