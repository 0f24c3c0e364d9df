// Package e2e holds the tests that need the whole system: they bring the dev
// system up once, in a folder of its own, and talk to it as machines, approvers
// and administrators do. Each test has a tenant of its own.
package e2e
