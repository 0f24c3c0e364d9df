// Package httpapi is the face of a join service replica: the protocol over HTTP
// (docs/protocol), behind mutual TLS that lets in the gateway alone.
//
// It reads, in the protocol's order and within its caps, asks the service to
// decide, signs what it answers, and makes sure that a refusal tells nothing: the
// same bytes for every reason, at a time that does not depend on it.
package httpapi
