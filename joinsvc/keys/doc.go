// Package keys is the keys job: it makes and rotates the keys of the join service,
// and composes and signs the join bundle that machines trust. It alone holds the
// bundle keys.
//
// A run brings everything one step on, may be repeated, and may be killed at any
// line. A new key goes this way:
//
//  1. it is written into its Secret without a time of use: replicas load it, and
//     open what is sealed to it;
//  2. once every replica that runs has it, a generation of the bundle publishes it;
//  3. one overlap after that it begins to sign or seal;
//  4. one overlap later the keys before it are dropped.
//
// The first key of a Secret, which no machine can miss, is used at once.
package keys
