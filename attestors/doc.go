// Package attestors is the contract between the join service and the code that
// verifies what a machine proves.
//
// An attestor answers one question at join time: may this machine join, and as
// which node? It has two halves that live side by side in one folder: a
// verifier, which the service calls inside the join's transaction, and a
// producer, which the agent calls on the machine.
//
// A verifier imports no Kubernetes client and no connection pool: what it needs
// reaches it through [JoinContext]. It returns one of three outcomes, [Admit],
// [Pending] or [Challenge]; or a refusal made by [Refuse]. Any other error is
// taken for a bug or an outage: it fails the join without being recorded as a
// refusal.
package attestors
