// Package pgtest gives tests a real Postgres: one server for a run and, for each
// test, a database of its own that is copied from a migrated template.
//
// The server is the one that JOIN_TEST_POSTGRES names (the URL of an
// administrator; "make test" starts one for all packages), else one that the test
// binary starts at its first use and that ends with it.
package pgtest
