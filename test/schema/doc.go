// Package schema tests the definitions of the custom resources on a real API
// server: what it takes, what it refuses and what it says then. All of it holds
// for cluster administrators too, and without any process of ours.
package schema
