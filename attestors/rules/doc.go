// Package rules says where machines belong, by expressions in CEL over what an
// attestor verified.
//
// A [Set] is an ordered list of rules, compiled once. The first whose expression is
// true says tenant, pool and site, which are literals. Where none is, the machine
// is refused; and where one errs or costs too much it is refused too: a machine
// must not reach a wider rule by breaking a narrower one.
//
// Expressions see what was proved and the role, never what a machine claims of
// itself. Of CEL they have the standard functions and macros; a pattern of
// matches() is a literal, comprehensions nest twice at most.
package rules
