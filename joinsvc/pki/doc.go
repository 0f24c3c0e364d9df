// Package pki is the certificate authority of nodes: which certificate requests
// it reads, the leaves that it issues, the CAs that it issues them with, and
// their revocation lists.
//
// The CAs are cert-manager's Certificates. Their Secrets, node-ca-1, node-ca-2
// and so on, reach an [Authority] live; the newest that is valid signs, and all
// that are loaded have their revocation list kept.
package pki
