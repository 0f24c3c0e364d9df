// Command kubectl_complete-approve completes the words after `kubectl approve` in a shell:
// kubectl looks for a program of this name on PATH.
package main

import (
	"os"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/cmd/internal/decide"
)

func main() { os.Exit(decide.Complete(v1alpha1.VerdictApproved)) }
