package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"k8s.io/client-go/rest"

	"github.com/better-compute/join-operator/hack/controlplane"
)

// processes are all parts of the system, in the order in which they start.
func (s *system) processes() ([]process, error) {
	l := s.layout()
	postgres, err := s.postgres()
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	list := []process{
		s.controlPlane(l.Etcd(), s.portOpen(s.ports.Etcd)),
		s.controlPlane(l.APIServer(), s.apiServerReady),
		s.controlPlane(l.ControllerManager(), s.portOpen(s.ports.ControllerManager)),
		postgres,
		{name: "kubelet", path: self, args: []string{"kubelet", "--dir", s.dir}, ready: s.tokensWritten},
		s.product("cert-manager", s.tokenFresh("cert-manager"), "--kubeconfig", s.kubeconfig("cert-manager")),
		s.product("manager", s.httpReady(s.ports.Manager),
			"--kubeconfig", s.kubeconfig("join-manager"), "--database-url-file", s.databaseFile("join_manager"),
			"--system-namespace", systemNamespace, "--keys-namespace", keysNamespace, "--trust-domain", trustDomain,
			"--metrics-bind-address", local(s.ports.ManagerMetrics), "--health-probe-bind-address", local(s.ports.Manager),
			"--leader-elect"),
	}
	gateway := []string{
		"--listen", local(s.ports.Gateway), "--tls-dir", s.path("mounts", "join-gateway-serving"),
		"--upstream-tls-dir", s.path("mounts", "join-gateway-client"), "--upstream-ca", s.path("mounts", "join-gateway-client", "ca.crt"),
		"--metrics-listen", local(s.ports.GatewayMetrics),
	}
	gateway = append(gateway, raisedLimits...)
	for i, port := range s.ports.JoinService {
		name := fmt.Sprintf("joinsvc-%d", i+1)
		p := s.product("joinsvc", s.portOpen(port),
			"--kubeconfig", s.kubeconfig("join-service"), "--database-url-file", s.databaseFile("join_service"),
			"--system-namespace", systemNamespace, "--keys-namespace", keysNamespace, "--trust-domain", trustDomain,
			"--listen", local(port), "--tls-dir", s.path("mounts", "join-service-serving"),
			"--gateway-uri", "spiffe://"+trustDomain+"/system/gateway", "--replica-id", name,
			"--metrics-listen", local(s.ports.JoinServiceMetrics[i]))
		p.name = name
		list = append(list, p)
		gateway = append(gateway, "--upstream", "https://"+local(port))
	}
	return append(list, s.product("gateway", s.gatewayReady, gateway...)), nil
}

// raisedLimits let a load tool on this machine, which is one address, measure the
// service and not its limiter.
var raisedLimits = []string{"--refusal-burst", "1000000", "--refusal-rate", "100000", "--poll-burst", "1000000", "--poll-rate", "100000"}

func (s *system) find(name string) (process, error) {
	list, err := s.processes()
	if err != nil {
		return process{}, err
	}
	var names []string
	for _, p := range list {
		if p.name == name {
			return p, nil
		}
		names = append(names, p.name)
	}
	return process{}, fmt.Errorf("no process %q; there are %q", name, names)
}

func (s *system) controlPlane(p controlplane.Program, ready func(context.Context) error) process {
	path, err := controlplane.Binary(p.Name)
	if err != nil {
		ready = func(context.Context) error { return err }
	}
	return process{name: p.Name, path: path, args: p.Args, stop: syscall.SIGTERM, ready: ready}
}

func (s *system) product(name string, ready func(context.Context) error, args ...string) process {
	return process{name: name, path: filepath.Join(s.root, ".bin", name), args: args, stop: syscall.SIGTERM, ready: ready}
}

func local(port int) string { return fmt.Sprintf("127.0.0.1:%d", port) }

func (s *system) portOpen(port int) func(context.Context) error {
	return func(ctx context.Context) error {
		c, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "tcp", local(port))
		if err != nil {
			return err
		}
		return c.Close()
	}
}

func (s *system) httpReady(port int) func(context.Context) error {
	return func(ctx context.Context) error {
		return get(ctx, http.DefaultClient, "http://"+local(port)+"/readyz")
	}
}

func (s *system) apiServerReady(ctx context.Context) error {
	cfg, err := s.administrator()
	if err != nil {
		return err
	}
	hc, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return err
	}
	return get(ctx, hc, cfg.Host+"/readyz")
}

func (s *system) gatewayReady(ctx context.Context) error {
	hc, err := s.machine()
	if err != nil {
		return err
	}
	defer hc.CloseIdleConnections()
	return get(ctx, hc, s.endpoint()+"/readyz")
}

// machine is a client that trusts the gateway's CA, as machines do.
func (s *system) machine() (*http.Client, error) {
	ca, err := os.ReadFile(s.path("mounts", "join-gateway-serving", "ca.crt"))
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return nil, errors.New("ca.crt of the gateway's Secret holds no certificate")
	}
	return &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS13}}}, nil
}

// endpoint is the gateway's URL.
func (s *system) endpoint() string { return "https://" + local(s.ports.Gateway) }

func get(ctx context.Context, hc *http.Client, url string) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := hc.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s", url, resp.Status)
	}
	return nil
}

// down stops everything, last started first, and throws away what it wrote but for
// its logs and its ports.
func (s *system) down() error {
	list, err := s.processes()
	if err != nil {
		return err
	}
	for _, p := range slices.Backward(list) {
		sig := p.stop
		if p.name == "kube-apiserver" || p.name == "etcd" || p.name == "kubelet" {
			sig = syscall.SIGKILL // its data goes
		}
		if err := s.end(p, sig); err != nil {
			return fmt.Errorf("stop %s: %w", p.name, err)
		}
	}
	for _, name := range []string{"etcd", "pki", "pgdata", "mounts", "identities", "database", "kubeconfig", "env", "bundle.json", "tls-ca.pem"} {
		if err := os.RemoveAll(s.path(name)); err != nil {
			return err
		}
	}
	s.say("the system is down; its logs stay in %s", s.path("log"))
	return nil
}
