package v1alpha1

// Condition types. Ready sums an object up, as kstatus reads it; the others say
// one thing each.
const (
	ConditionReady = "Ready"

	// JoinRequest: the decision stands in the database; the machine joined; it
	// ran out undecided or unused; a newer request of the same machine replaced it.
	ConditionRecorded   = "Recorded"
	ConditionJoined     = "Joined"
	ConditionExpired    = "Expired"
	ConditionSuperseded = "Superseded"

	// AdmissionGuarded is false while a policy that guards decisions is missing
	// or altered; no decision is recorded meanwhile.
	ConditionAdmissionGuarded = "AdmissionGuarded"

	// JoinToken: the Secret that holds the token is gone.
	ConditionSecretLost = "SecretLost"

	// FleetNode: two machines hold its identity; a reclaim would have changed
	// what may not change; its deletion or retirement is held.
	ConditionConflicted     = "Conflicted"
	ConditionReclaimRefused = "ReclaimRefused"
	ConditionHeld           = "Held"

	// FleetPool: there are more nodes than objects are made for.
	ConditionObjectsCapped = "ObjectsCapped"

	// AttestorConfig: the configuration as it is now is sound, and was published.
	ConditionValid = "Valid"

	// Any kind: the namespace is no tenant, or is one made again under an old name.
	ConditionTenantBlocked = "TenantBlocked"
)

// Reasons of conditions and of Events.
const (
	ReasonAwaitingDecision  = "AwaitingDecision"
	ReasonApproved          = "Approved"
	ReasonRejected          = "Rejected"
	ReasonRecording         = "Recording"
	ReasonRecorded          = "Recorded"
	ReasonUnguarded         = "AdmissionUnguarded"
	ReasonGuarded           = "AdmissionGuarded"
	ReasonDecisionDiscarded = "DecisionDiscarded"
	ReasonNotWhatWasAsked   = "NotWhatWasAsked"
	ReasonJoined            = "Joined"
	ReasonExpired           = "Expired"
	ReasonSuperseded        = "Superseded"
	ReasonInForce           = "InForce"
	ReasonPoolMissing       = "PoolMissing"
	ReasonSecretLost        = "SecretLost"
	ReasonSecretConflict    = "SecretConflict"
	ReasonSpent             = "Spent"
	ReasonTokenExpired      = "TokenExpired"
	ReasonRevoked           = "Revoked"
	ReasonNotATenant        = "NotATenant"
	ReasonTenantBlocked     = "TenantBlocked"
	ReasonDatabase          = "DatabaseUnavailable"
	ReasonPublished         = "Published"
	ReasonActive            = "Active"
	ReasonAdopting          = "Adopting"
	ReasonRetired           = "Retired"
	ReasonRowMissing        = "NoSuchNode"
	ReasonHeld              = "HeldByBrake"
	ReasonRefused           = "JoinRefused"
	ReasonConflict          = "TwoMachinesOneIdentity"
	ReasonObjectsCapped     = "ObjectsCapped"
	ReasonRequestsCapped    = "RequestsCapped"
	ReasonInvalid           = "Invalid"
	ReasonConfigMapMissing  = "ConfigMapMissing"
	ReasonRollingOut        = "RollingOut"
	ReasonNoReplica         = "NoReplica"
	ReasonReplicaFailed     = "ReplicaFailed"
)
