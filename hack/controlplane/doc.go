// Package controlplane knows how a small but real Kubernetes control plane is
// started on this machine: its keys and certificates, and the command lines of
// etcd, kube-apiserver and kube-controller-manager. It starts nothing itself:
// tests (test/kubetest) and the dev system (hack/dev) own their processes.
package controlplane
