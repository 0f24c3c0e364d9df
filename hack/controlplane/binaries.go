package controlplane

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
)

// Binary finds one of the built programs: in KUBEBUILDER_ASSETS where that is set
// and has it, else in the repository's .bin.
func Binary(name string) (string, error) {
	if dir := os.Getenv("KUBEBUILDER_ASSETS"); dir != "" {
		if path := filepath.Join(dir, name); executable(path) {
			return path, nil
		}
	}
	root, err := RepositoryRoot()
	if err != nil {
		return "", err
	}
	path := filepath.Join(root, ".bin", name)
	if !executable(path) {
		return "", fmt.Errorf("%s is not built: run \"make tools\"", path)
	}
	return path, nil
}

func executable(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0
}

// RepositoryRoot is the folder with the product's go.mod, at or above the working
// folder (tests run in their package's).
func RepositoryRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for ; ; dir = filepath.Dir(dir) {
		b, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && bytes.HasPrefix(b, []byte("module github.com/better-compute/join-operator\n")) {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("not inside the join-operator repository")
		}
	}
}
