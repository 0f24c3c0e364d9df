// Package outbox follows the events that transactions leave in the database and
// brings them to the controllers: each subscriber turns events into the keys of
// objects to reconcile. What was refused or admitted becomes Kubernetes Events on
// the object that a person would look at.
//
// An event is only ever a hint to look at the rows: a controller that missed one
// finds the same work at its next full pass.
package outbox
