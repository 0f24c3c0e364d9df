package main

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

// mounts are the Secrets that pods mount in production, by name. The folder of the
// keys job gets the CA's certificate alone, as items of a volume say it.
var mounts = []struct {
	secret, folder string
	items          []string
}{
	{"join-gateway-serving", "join-gateway-serving", []string{"tls.crt", "tls.key", "ca.crt"}},
	{"join-gateway-client", "join-gateway-client", []string{"tls.crt", "tls.key", "ca.crt"}},
	{"join-service-serving", "join-service-serving", []string{"tls.crt", "tls.key", "ca.crt"}},
	{"join-gateway-serving", "tls-ca", []string{"ca.crt"}},
}

// kubelet does for the processes here what the kubelet does for pods, until ctx
// ends: it keeps the files of their Secrets and their tokens fresh.
func (s *system) kubelet(ctx context.Context) error {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	cfg, err := clientcmd.BuildConfigFromFlags("", s.kubeconfig("dev-kubelet"))
	if err != nil {
		return err
	}
	k, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return err
	}
	renewed := map[account]time.Time{}
	seen := map[string]string{}
	for {
		for _, a := range accounts {
			if time.Since(renewed[a]) < tokenRenewal {
				continue
			}
			if err := s.renewToken(ctx, cfg, a); err != nil {
				log.Warn("renew a token", "account", a.name, "error", err)
				continue
			}
			renewed[a] = time.Now()
		}
		for _, m := range mounts {
			secret, err := k.CoreV1().Secrets(systemNamespace).Get(ctx, m.secret, metav1.GetOptions{})
			if err != nil {
				log.Warn("read a Secret", "secret", m.secret, "error", err)
				continue
			}
			if seen[m.folder] == secret.ResourceVersion {
				continue
			}
			files := map[string][]byte{}
			for _, item := range m.items {
				if b, ok := secret.Data[item]; ok {
					files[item] = b
				}
			}
			if err := project(s.path("mounts", m.folder), files); err != nil {
				log.Error("write a Secret's files", "secret", m.secret, "error", err)
				continue
			}
			seen[m.folder] = secret.ResourceVersion
			log.Info("wrote a Secret's files", "secret", m.secret, "folder", m.folder)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(time.Second):
		}
	}
}

// project shows files in a folder as the kubelet does: all of them change at once,
// by one link that is renamed.
func project(folder string, files map[string][]byte) error {
	version := "..v" + strconv.FormatInt(time.Now().UnixNano(), 10)
	if err := os.MkdirAll(filepath.Join(folder, version), 0o700); err != nil {
		return err
	}
	for name, b := range files {
		if err := os.WriteFile(filepath.Join(folder, version, name), b, 0o600); err != nil {
			return err
		}
	}
	old, _ := os.Readlink(filepath.Join(folder, "..data"))
	next := filepath.Join(folder, "..data_next")
	if err := os.Remove(next); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := os.Symlink(version, next); err != nil {
		return err
	}
	if err := os.Rename(next, filepath.Join(folder, "..data")); err != nil {
		return err
	}
	for name := range files {
		err := os.Symlink(filepath.Join("..data", name), filepath.Join(folder, name))
		if err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	if old != "" {
		return os.RemoveAll(filepath.Join(folder, old))
	}
	return nil
}
