// Package gateway faces the internet: it caps, limits and relays requests to the
// replicas of the join service, byte for byte. It holds no secret of a join, and
// what it sees and can do never suffices for a certificate, a token or a forged
// answer: so it links no database, no Kubernetes client and no key of the service.
//
// Limits weigh refusals, not success. A thousand honest machines behind one address
// get in at full speed; who is refused again and again is told to wait before
// anything of theirs is read.
package gateway
