// Package attestors is the contract between the join service and the code that
// verifies what a machine proves.
//
// An attestor answers one question at join time: may this machine join, and as
// which node? It has two halves that live side by side in one folder: a
// verifier, which the service calls inside the join's transaction, and a
// producer, which the agent calls on the machine.
//
// # A verifier
//
// A verifier imports no Kubernetes client and no connection pool: what it needs
// reaches it through [JoinContext]. It returns one of three outcomes: [Admit] says
// which machine it is and where it belongs, [Pending] that a person has to say so,
// [Challenge] that the machine must prove something in a second round. A refusal
// is an error made by [Refuse]: the machine learns nothing of its reason. Any other
// error is taken for a bug or an outage: it fails the join, rolls it back, and is
// not recorded as a refusal. Whatever waits for a network belongs in
// [Spec].Prepare, before any transaction.
//
// An outcome only declares. Uses, bindings, tokens, approvals, reclaims and
// certificates are the service's to check and to write, in one transaction.
//
// # Defining and registering
//
// [Define] checks a [Spec] and freezes a copy of it. [NewRegistry] collects
// attestors and modules that bring some. [Metered] wraps an attestor so that a
// [Meter] sees what became of each verification.
//
// Attestors that a cluster's administrators configure are built by a [Factory] of
// their type; see package configured.
package attestors
