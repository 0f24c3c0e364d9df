// Package manifests tests what is installed: config/default and the Helm chart are
// taken by a real API server without a warning, say the same, and start programs
// that know the flags they are given.
package manifests
