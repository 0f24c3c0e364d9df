package v1alpha1

// Labels, annotations and finalizers of join-operator.
const (
	// TenantLabel on a namespace makes it a tenant. Only cluster administrators
	// may set or remove it.
	TenantLabel      = "join.better-compute.dev/tenant"
	TenantLabelValue = "true"

	// BrakeAnnotation on a namespace lets a held burst of deletions or
	// retirements go on ("confirm-<burst>") or drops it ("cancel-<burst>"); the
	// condition Held of each node says the burst's name.
	BrakeAnnotation = "join.better-compute.dev/held-deletions"

	// NodeFinalizer holds a FleetNode until its row is gone; TokenFinalizer a
	// JoinToken until its row is revoked.
	NodeFinalizer  = "join.better-compute.dev/node"
	TokenFinalizer = "join.better-compute.dev/token"
)

// VerbApprove is the verb that an approver holds on fleetpools, VerbManage the
// one on joinrequests of who may delete and relabel them.
const (
	VerbApprove = "approve"
	VerbManage  = "manage"
)

// Role of a machine.
//
// +kubebuilder:validation:Enum=node;site;ramdisk
type Role string
