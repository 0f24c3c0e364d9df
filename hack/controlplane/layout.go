package controlplane

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// Layout is where one control plane keeps its files and which loopback ports it
// listens on.
type Layout struct {
	// Dir holds the folder pki, and etcd's data unless EtcdDir says otherwise.
	Dir string
	// The ports, all on 127.0.0.1.
	APIPort, EtcdPort, EtcdPeerPort, ControllerManagerPort int
	// Durable keeps etcd's fsync on.
	Durable bool
}

// Program is a program to run: the name of its binary and its arguments.
type Program struct {
	Name string
	Args []string
}

func (l Layout) pki(name string) string { return filepath.Join(l.Dir, "pki", name) }

// MakeKeys makes whatever is missing of the control plane's keys and
// certificates. The ports of the layout are not needed yet.
func (l Layout) MakeKeys() error {
	if err := os.MkdirAll(l.pki(""), 0o700); err != nil {
		return err
	}
	server, err := openAuthority(l.pki("server-ca"), "kubernetes-server")
	if err != nil {
		return err
	}
	if _, err := openAuthority(l.pki("client-ca"), "kubernetes-clients"); err != nil {
		return err
	}
	etcd, err := openAuthority(l.pki("etcd-ca"), "etcd")
	if err != nil {
		return err
	}
	// etcd is the cluster: whoever may write to it is root, so it wants a
	// certificate that the API server alone has.
	for _, c := range []struct {
		ca    *authority
		name  string
		hosts []string
	}{
		{server, "kube-apiserver", []string{"127.0.0.1", "localhost", "kubernetes", "kubernetes.default.svc", "10.96.0.1"}},
		{etcd, "etcd", []string{"127.0.0.1", "localhost"}},
		{etcd, "kube-apiserver-etcd-client", nil},
		{server, "kube-controller-manager-serving", []string{"127.0.0.1", "localhost"}},
	} {
		if err := l.makePair(c.ca, c.name, c.hosts); err != nil {
			return err
		}
	}
	return l.makeServiceAccountKey()
}

func (l Layout) makePair(ca *authority, name string, hosts []string) error {
	if _, err := os.Stat(l.pki(name + ".crt")); err == nil {
		return nil
	}
	cert, key, err := ca.issue(pkix.Name{CommonName: name}, hosts...)
	if err != nil {
		return err
	}
	if err := os.WriteFile(l.pki(name+".key"), key, 0o600); err != nil {
		return err
	}
	return os.WriteFile(l.pki(name+".crt"), cert, 0o644)
}

func (l Layout) makeServiceAccountKey() error {
	path := l.pki("service-accounts.key")
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	b, err := encodeKey(key)
	if err != nil {
		return err
	}
	return os.WriteFile(path, b, 0o600)
}

// Etcd is the command of etcd.
func (l Layout) Etcd() Program {
	args := []string{
		"--data-dir=" + filepath.Join(l.Dir, "etcd"),
		"--listen-client-urls=" + l.etcdURL(), "--advertise-client-urls=" + l.etcdURL(),
		fmt.Sprintf("--listen-peer-urls=http://127.0.0.1:%d", l.EtcdPeerPort),
		"--client-cert-auth", "--trusted-ca-file=" + l.pki("etcd-ca.crt"),
		"--cert-file=" + l.pki("etcd.crt"), "--key-file=" + l.pki("etcd.key"),
		"--log-level=warn",
	}
	if !l.Durable {
		args = append(args, "--unsafe-no-fsync")
	}
	return Program{Name: "etcd", Args: args}
}

func (l Layout) etcdURL() string { return fmt.Sprintf("https://127.0.0.1:%d", l.EtcdPort) }

// APIServer is the command of kube-apiserver: RBAC, and the admission that a
// production cluster has (the default set, with service accounts).
func (l Layout) APIServer() Program {
	return Program{Name: "kube-apiserver", Args: []string{
		"--etcd-servers=" + l.etcdURL(), "--etcd-cafile=" + l.pki("etcd-ca.crt"),
		"--etcd-certfile=" + l.pki("kube-apiserver-etcd-client.crt"), "--etcd-keyfile=" + l.pki("kube-apiserver-etcd-client.key"),
		"--bind-address=127.0.0.1", fmt.Sprintf("--secure-port=%d", l.APIPort),
		"--tls-cert-file=" + l.pki("kube-apiserver.crt"), "--tls-private-key-file=" + l.pki("kube-apiserver.key"),
		"--client-ca-file=" + l.pki("client-ca.crt"),
		"--anonymous-auth=false",
		"--authorization-mode=RBAC",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + l.pki("service-accounts.key"),
		"--service-account-signing-key-file=" + l.pki("service-accounts.key"),
		"--service-cluster-ip-range=10.96.0.0/16",
		// Loopback addresses may not stand in the endpoints of the service "kubernetes".
		"--endpoint-reconciler-type=none",
		"--shutdown-delay-duration=0s",
	}}
}

// ControllerManager is the command of kube-controller-manager with the controllers
// that this product needs: those that delete namespaces and owned objects, make
// service accounts, and sum up aggregated roles. Each of them acts as a service
// account of its own. WriteKubeconfigs must have run.
func (l Layout) ControllerManager() Program {
	return Program{Name: "kube-controller-manager", Args: []string{
		"--kubeconfig=" + l.ControllerManagerKubeconfig(),
		"--use-service-account-credentials",
		"--controllers=namespace-controller,garbage-collector-controller,serviceaccount-controller,root-ca-certificate-publisher-controller,clusterrole-aggregation-controller",
		"--service-account-private-key-file=" + l.pki("service-accounts.key"),
		"--root-ca-file=" + l.pki("server-ca.crt"),
		"--leader-elect=false", "--authentication-skip-lookup",
		"--bind-address=127.0.0.1", fmt.Sprintf("--secure-port=%d", l.ControllerManagerPort),
		"--tls-cert-file=" + l.pki("kube-controller-manager-serving.crt"), "--tls-private-key-file=" + l.pki("kube-controller-manager-serving.key"),
	}}
}

// ControllerManagerKubeconfig is the file of kube-controller-manager's identity.
func (l Layout) ControllerManagerKubeconfig() string {
	return filepath.Join(l.Dir, "pki", "kube-controller-manager.kubeconfig")
}

// URL is the API server's.
func (l Layout) URL() string { return fmt.Sprintf("https://127.0.0.1:%d", l.APIPort) }

// Anonymous is how to reach the API server without saying who one is.
func (l Layout) Anonymous() (*rest.Config, error) {
	ca, err := os.ReadFile(l.pki("server-ca.crt"))
	if err != nil {
		return nil, err
	}
	return &rest.Config{Host: l.URL(), TLSClientConfig: rest.TLSClientConfig{CAData: ca}}, nil
}

// As is a user who has a client certificate.
func (l Layout) As(user string, groups ...string) (*rest.Config, error) {
	ca, err := openAuthority(l.pki("client-ca"), "kubernetes-clients")
	if err != nil {
		return nil, err
	}
	cert, key, err := ca.issue(pkix.Name{CommonName: user, Organization: groups})
	if err != nil {
		return nil, err
	}
	cfg, err := l.Anonymous()
	if err != nil {
		return nil, err
	}
	cfg.CertData, cfg.KeyData = cert, key
	return cfg, nil
}

// Administrator is a user who may do everything.
func (l Layout) Administrator() (*rest.Config, error) { return l.As("admin", "system:masters") }

// WriteKubeconfig writes a user's kubeconfig, readable by its owner alone.
// BearerTokenFile stays a reference, so that a token which is renewed is read
// again.
func WriteKubeconfig(path string, cfg *rest.Config) error {
	c := clientcmdapi.NewConfig()
	c.Clusters["join"] = &clientcmdapi.Cluster{Server: cfg.Host, CertificateAuthorityData: cfg.CAData}
	c.AuthInfos["user"] = &clientcmdapi.AuthInfo{
		ClientCertificateData: cfg.CertData, ClientKeyData: cfg.KeyData, Token: cfg.BearerToken, TokenFile: cfg.BearerTokenFile,
	}
	c.Contexts["join"] = &clientcmdapi.Context{Cluster: "join", AuthInfo: "user"}
	c.CurrentContext = "join"
	return clientcmd.WriteToFile(*c, path)
}
