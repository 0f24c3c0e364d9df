// Package joinsvc decides joins: it opens what a machine sealed, has it judged
// by an attestor, and enters the machine as a node in one transaction.
//
// A [Service] keeps no state of its own: any number of replicas may run against
// one database, and any of them may finish any round of any join. All that two
// joins could quarrel about is settled by locks of rows, always taken in this
// order: an advisory lock on the CSR's hash (then: was it answered before?), the
// row of join_requests, the token's slot, the node, node_bindings,
// attestation_uses, and last certificates, events and audit.
package joinsvc
