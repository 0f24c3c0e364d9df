// Package hardware compares what a machine says of its hardware with what a
// token expects: each identifier is normalised first, since firmware, people and
// tools spell the same one differently, and placeholders that vendors ship in
// thousands of machines are no identifiers at all.
package hardware
