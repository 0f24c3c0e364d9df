// Package kubetest gives tests a real Kubernetes API server: etcd and
// kube-apiserver with RBAC and production's admission and, where asked for,
// kube-controller-manager. One server is shared by the tests of a test binary
// (Shared), or a test has its own (Start). All end with the test binary.
//
// Users are real: As gives a client certificate, ServiceAccount a token that the
// server itself issued.
package kubetest
