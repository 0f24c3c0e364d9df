// Package attestorset is the attestors of one replica: those that are built in, and
// those that AttestorConfigs configure, as their published rows have them now. A
// change is in force within a second or two, for joins that begin after it.
package attestorset
