package kubetest

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/better-compute/join-operator/hack/controlplane"
)

// Kustomize renders a folder of the repository, for instance "config/default".
func Kustomize(tb testing.TB, folder string) []*unstructured.Unstructured {
	tb.Helper()
	root, err := controlplane.RepositoryRoot()
	if err != nil {
		tb.Fatal(err)
	}
	kubectl, err := controlplane.Binary("kubectl")
	if err != nil {
		tb.Fatal(err)
	}
	// What kubectl reads, go test must know of, or it keeps an old result.
	if err := filepath.WalkDir(filepath.Join(root, "config"), func(path string, _ fs.DirEntry, err error) error {
		if err == nil {
			_, err = os.Stat(path)
		}
		return err
	}); err != nil {
		tb.Fatal(err)
	}
	out, err := exec.CommandContext(tb.Context(), kubectl, "kustomize", filepath.Join(root, folder)).Output()
	if err != nil {
		tb.Fatalf("kustomize %s: %v\n%s", folder, err, stderr(err))
	}
	objects, err := controlplane.Decode(out)
	if err != nil {
		tb.Fatalf("kustomize %s: %v", folder, err)
	}
	return objects
}

func stderr(err error) []byte {
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return exit.Stderr
	}
	return nil
}

// Apply applies objects as an administrator, server-side, and returns when all are
// accepted and definitions are served.
func (c *Cluster) Apply(tb testing.TB, objects []*unstructured.Unstructured) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), time.Minute)
	defer cancel()
	if err := controlplane.Apply(ctx, c.Client, objects); err != nil {
		tb.Fatal(err)
	}
}

// ApplyFolder renders a folder and applies it.
func (c *Cluster) ApplyFolder(tb testing.TB, folder string) {
	tb.Helper()
	c.Apply(tb, Kustomize(tb, folder))
}

// Eventually polls until check returns nil, and fails the test with its last error
// after a minute. A policy, for instance, takes a second or so to be in force after
// it was made: probe for it with a dry run that it must refuse.
func Eventually(tb testing.TB, what string, check func(context.Context) error) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), time.Minute)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		err := check(ctx)
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			tb.Fatalf("%s: gave up: %v", what, err)
		case <-tick.C:
		}
	}
}
