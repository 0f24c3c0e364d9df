// Command kubectl-reject is the kubectl plugin with which a person rejects machines
// that wait to join.
package main

import (
	"os"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/cmd/internal/decide"
)

func main() { os.Exit(decide.Main(v1alpha1.VerdictRejected)) }
