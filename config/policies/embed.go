// Package policies is the admission policies of this release, as the manifests
// beside it install them: the manager compares the cluster with them.
package policies

import (
	"embed"
	"fmt"
	"io/fs"
	"strings"
)

//go:embed *.yaml
var files embed.FS

// Namespaces are the names of the operator's own namespaces, which the policies
// speak of.
type Namespaces struct {
	// System is the operator's own, Keys holds the join service's keys, Trust
	// those that sign bundles.
	System, Keys, Trust string
}

// written is what the manifests say.
var written = Namespaces{System: "join-system", Keys: "join-keys", Trust: "join-trust"}

// Manifests returns the manifests, each any number of YAML documents, as they are
// installed where the operator's namespaces have the given names. Empty names are
// those of the manifests.
func Manifests(n Namespaces) ([][]byte, error) {
	names, err := fs.Glob(files, "*.yaml")
	if err != nil {
		return nil, fmt.Errorf("embedded policies: %w", err)
	}
	renamed := strings.NewReplacer(
		written.System, or(n.System, written.System),
		written.Keys, or(n.Keys, written.Keys),
		written.Trust, or(n.Trust, written.Trust),
	)
	var out [][]byte
	for _, name := range names {
		if name == "kustomization.yaml" {
			continue
		}
		b, err := files.ReadFile(name)
		if err != nil {
			return nil, fmt.Errorf("embedded policies: %w", err)
		}
		out = append(out, []byte(renamed.Replace(string(b))))
	}
	return out, nil
}

func or(name, otherwise string) string {
	if name == "" {
		return otherwise
	}
	return name
}
