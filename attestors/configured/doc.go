// Package configured makes attestors of AttestorConfigs.
//
// A [Type] builds the attestor of its own part of the spec; what is the same for all
// types (roles, rules, approval, the configuration's version) is wrapped around it
// here. The manager does so to find out what is wrong with a configuration, and the
// join service to decide by it, so that what the one found sound the other can build.
package configured
