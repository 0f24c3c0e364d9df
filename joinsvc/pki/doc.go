// Package pki is the node CA: which requests it takes, what its leaves say, which
// CA signs, and the revocation lists. The CAs come from Secrets that cert-manager
// keeps, and change while the process runs.
package pki
