// Package policies is the admission policies of this release, as the manifests
// beside it install them: the manager compares the cluster with them.
package policies

import (
	"embed"
	"fmt"
	"io/fs"
	"path"
	"strings"
)

// systemNamespace is the operator's namespace as it is written in the manifests.
const systemNamespace = "join-system"

//go:embed *
var files embed.FS

// Manifests returns the manifests as they are installed where the operator's
// namespace has the given name.
func Manifests(namespace string) ([][]byte, error) {
	names, err := fs.Glob(files, "*.yaml")
	if err != nil {
		return nil, fmt.Errorf("embedded policies: %w", err)
	}
	var out [][]byte
	for _, name := range names {
		if path.Base(name) == "kustomization.yaml" {
			continue
		}
		b, err := files.ReadFile(name)
		if err != nil {
			return nil, fmt.Errorf("embedded policies: %w", err)
		}
		out = append(out, []byte(strings.ReplaceAll(string(b), systemNamespace, namespace)))
	}
	return out, nil
}
