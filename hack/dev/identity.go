package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/better-compute/join-operator/hack/controlplane"
)

// account is a service account that a process here acts as.
type account struct{ namespace, name string }

// accounts are all of them. The gateway has none.
var accounts = []account{
	{"join-system", "dev-kubelet"},
	{"cert-manager", "cert-manager"},
	{systemNamespace, "join-manager"},
	{systemNamespace, "join-service"},
	{systemNamespace, "join-keys"},
}

const (
	tokenLifetime = time.Hour
	tokenRenewal  = tokenLifetime / 2
)

func (s *system) kubeconfig(account string) string {
	return s.path("identities", account, "kubeconfig")
}
func (s *system) tokenFile(account string) string { return s.path("identities", account, "token") }

// administrator is the person who installs; its kubeconfig is what .dev/env names.
func (s *system) administrator() (*rest.Config, error) {
	file := s.path("kubeconfig")
	if _, err := os.Stat(file); errors.Is(err, os.ErrNotExist) {
		cfg, err := s.layout().Administrator()
		if err != nil {
			return nil, err
		}
		if err := controlplane.WriteKubeconfig(file, cfg); err != nil {
			return nil, err
		}
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", file)
	if err != nil {
		return nil, err
	}
	cfg.QPS = -1
	return cfg, nil
}

// writeIdentities gives each process a kubeconfig that names its token's file, and
// the kubelet's stand-in its first token; that one writes the others'.
func (s *system) writeIdentities(ctx context.Context) error {
	anonymous, err := s.layout().Anonymous()
	if err != nil {
		return err
	}
	for _, a := range accounts {
		cfg := rest.CopyConfig(anonymous)
		cfg.BearerTokenFile = s.tokenFile(a.name)
		if err := os.MkdirAll(s.path("identities", a.name), 0o700); err != nil {
			return err
		}
		if err := controlplane.WriteKubeconfig(s.kubeconfig(a.name), cfg); err != nil {
			return err
		}
	}
	admin, err := s.administrator()
	if err != nil {
		return err
	}
	return s.renewToken(ctx, admin, accounts[0])
}

// renewToken asks the API server for a token and puts it where the account's
// kubeconfig finds it.
func (s *system) renewToken(ctx context.Context, by *rest.Config, a account) error {
	k, err := kubernetes.NewForConfig(by)
	if err != nil {
		return err
	}
	seconds := int64(tokenLifetime / time.Second)
	token, err := k.CoreV1().ServiceAccounts(a.namespace).CreateToken(ctx, a.name,
		&authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: &seconds}}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("token of %s/%s: %w", a.namespace, a.name, err)
	}
	return writeFile(s.tokenFile(a.name), []byte(token.Status.Token), 0o600)
}

// tokenFresh tells whether an account's token is there and young.
func (s *system) tokenFresh(account string) func(context.Context) error {
	return func(context.Context) error {
		st, err := os.Stat(s.tokenFile(account))
		if err != nil {
			return err
		}
		if time.Since(st.ModTime()) > tokenRenewal+time.Minute {
			return fmt.Errorf("the token of %s is old", account)
		}
		return nil
	}
}

// tokensWritten tells whether the kubelet's stand-in has done its first round.
func (s *system) tokensWritten(ctx context.Context) error {
	for _, a := range accounts {
		if err := s.tokenFresh(a.name)(ctx); err != nil {
			return err
		}
	}
	return nil
}
