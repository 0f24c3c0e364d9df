package main

import (
	"context"
	_ "embed" // for the manifests below
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/hack/controlplane"
)

//go:embed certmanager.yaml
var certManagerManifests []byte

//go:embed kubelet.yaml
var kubeletManifests []byte

// up starts what does not run, installs, and returns when the system takes joins.
func (s *system) up(ctx context.Context) error {
	s.say("dev system in %s", s.dir)
	l := s.layout()
	if err := l.MakeKeys(); err != nil {
		return err
	}
	kcm, err := l.As("system:kube-controller-manager")
	if err != nil {
		return err
	}
	if err := controlplane.WriteKubeconfig(l.ControllerManagerKubeconfig(), kcm); err != nil {
		return err
	}
	list, err := s.processes()
	if err != nil {
		return err
	}
	// before is what must be done when all processes listed earlier are ready.
	before := map[string]func(context.Context) error{
		"kubelet": s.install,
		"manager": s.prepareDatabase,
		// Replicas want keys, and the bundle wants the CAs that replicas loaded.
		"joinsvc-1": func(ctx context.Context) error { return s.rotateKeys(ctx, "--keys-only") },
		"gateway": func(ctx context.Context) error {
			if err := s.rotateKeys(ctx); err != nil {
				return err
			}
			s.say("the gateway's limits per address are raised here, for load tools: %s", strings.Join(raisedLimits, " "))
			return nil
		},
	}
	for _, p := range list {
		if p.name == "postgres" {
			if err := s.initializeDatabase(p); err != nil {
				return err
			}
		}
		if step := before[p.name]; step != nil {
			if err := step(ctx); err != nil {
				return err
			}
		}
		if p.name == "manager" {
			if err := s.awaitFiles(ctx); err != nil {
				return err
			}
		}
		if err := s.start(ctx, p); err != nil {
			return err
		}
	}
	if err := s.writeEnv(ctx); err != nil {
		return err
	}
	s.say("ready: source %s, then try \"kubectl get fleetpools -A\"", s.path("env"))
	return nil
}

// install does what an administrator does: cert-manager's definitions and identity,
// then this product's configuration.
func (s *system) install(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	cfg, err := s.administrator()
	if err != nil {
		return err
	}
	c, err := client.New(cfg, client.Options{})
	if err != nil {
		return err
	}
	definitions, err := s.certManagerDefinitions(ctx)
	if err != nil {
		return err
	}
	product, err := s.kustomize(ctx)
	if err != nil {
		return err
	}
	for _, part := range []struct {
		name      string
		manifests []byte
	}{
		{"cert-manager's definitions and identity", append(definitions, certManagerManifests...)},
		{"this product's configuration", product},
		{"the rights of what stands in for the kubelet", kubeletManifests},
	} {
		objects, err := controlplane.Decode(part.manifests)
		if err != nil {
			return fmt.Errorf("%s: %w", part.name, err)
		}
		if err := controlplane.Apply(ctx, c, objects); err != nil {
			return err
		}
		s.say("applied %s (%d objects)", part.name, len(objects))
	}
	return s.writeIdentities(ctx)
}

// certManagerDefinitions are those of the release that hack/devcluster pins.
func (s *system) certManagerDefinitions(ctx context.Context) ([]byte, error) {
	cmd := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", "github.com/cert-manager/cert-manager")
	cmd.Dir = filepath.Join(s.root, "hack", "devcluster")
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("find cert-manager's module: %w", err)
	}
	files, err := filepath.Glob(filepath.Join(strings.TrimSpace(string(out)), "deploy", "crds", "*.yaml"))
	if err != nil {
		return nil, err
	}
	if len(files) == 0 {
		return nil, errors.New("cert-manager's module holds no definitions")
	}
	var all []byte
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		all = append(append(all, b...), "\n---\n"...)
	}
	return all, nil
}

// kustomize renders config/dev.
func (s *system) kustomize(ctx context.Context) ([]byte, error) {
	kubectl, err := controlplane.Binary("kubectl")
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, kubectl, "kustomize", filepath.Join(s.root, "config", "dev"))
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("render config/dev: %w", err)
	}
	return out, nil
}

// awaitFiles waits until cert-manager has issued what the processes serve with, and
// its files are in their folders.
func (s *system) awaitFiles(ctx context.Context) error {
	begun := time.Now()
	ctx, cancel := context.WithTimeout(ctx, 90*time.Second)
	defer cancel()
	for {
		err := s.filesWritten()
		if err == nil {
			s.say("cert-manager has issued the certificates (%.1f s)", time.Since(begun).Seconds())
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("certificates: %w\n%s", err, s.tail("cert-manager"))
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func (s *system) filesWritten() error {
	for _, m := range mounts {
		for _, item := range m.items {
			if _, err := os.Stat(s.path("mounts", m.folder, item)); err != nil {
				return err
			}
		}
	}
	return nil
}

// rotateKeys runs the keys job once, as its CronJob does.
func (s *system) rotateKeys(ctx context.Context, flags ...string) error {
	begun := time.Now()
	args := append([]string{"rotate",
		"--kubeconfig", s.kubeconfig("join-keys"), "--database-url-file", s.databaseFile("join_keys"),
		"--keys-namespace", keysNamespace, "--trust-namespace", trustNamespace,
		"--tls-ca-file", s.path("mounts", "tls-ca", "ca.crt"), "--endpoint", s.endpoint(), "--trust-domain", trustDomain}, flags...)
	cmd := exec.CommandContext(ctx, filepath.Join(s.root, ".bin", "keys"), args...)
	log, err := os.OpenFile(s.path("log", "keys.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("keys rotate: %w\n%s", err, s.tail("keys"))
	}
	s.say("the keys job has run (%.1f s)", time.Since(begun).Seconds())
	return nil
}

// bundle is the join bundle as the gateway serves it, once the replicas behind it
// have noticed the one that the keys job made.
func (s *system) bundle(ctx context.Context) ([]byte, error) {
	hc, err := s.machine()
	if err != nil {
		return nil, err
	}
	defer hc.CloseIdleConnections()
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for {
		b, err := fetch(ctx, hc, s.endpoint()+"/v1/bundle")
		if err == nil {
			return b, nil
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func fetch(ctx context.Context, hc *http.Client, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := hc.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s answers %s", url, resp.Status)
	}
	return b, nil
}

// writeEnv writes what people and tools source.
func (s *system) writeEnv(ctx context.Context) error {
	bundle, err := s.bundle(ctx)
	if err != nil {
		return err
	}
	ca, err := os.ReadFile(s.path("mounts", "join-gateway-serving", "ca.crt"))
	if err != nil {
		return err
	}
	if err := errors.Join(
		writeFile(s.path("bundle.json"), bundle, 0o644),
		writeFile(s.path("tls-ca.pem"), ca, 0o644),
	); err != nil {
		return err
	}
	var env strings.Builder
	fmt.Fprintln(&env, "# Written by the dev system; source it.")
	for _, v := range [][2]string{
		{"KUBECONFIG", s.path("kubeconfig")},
		{"JOIN_ENDPOINT", s.endpoint()},
		{"JOIN_TLS_CA", s.path("tls-ca.pem")},
		{"JOIN_BUNDLE", s.path("bundle.json")},
		{"DATABASE_URL", s.adminURL("join")},
	} {
		fmt.Fprintf(&env, "export %s=%s\n", v[0], quote(v[1]))
	}
	fmt.Fprintf(&env, "export PATH=%s:\"$PATH\"\n", quote(filepath.Join(s.root, ".bin")))
	return writeFile(s.path("env"), []byte(env.String()), 0o600)
}

// quote is a word for the shell.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }
