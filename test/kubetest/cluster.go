package kubetest

import (
	"context"
	"fmt"
	"net/http"
	"path/filepath"
	"sync"
	"testing"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/hack/controlplane"
	"github.com/better-compute/join-operator/test/child"
)

// startTimeout is how long each process may take to be ready; it takes seconds.
const startTimeout = 60 * time.Second

// Cluster is a running API server.
type Cluster struct {
	layout controlplane.Layout
	admin  *rest.Config
	// Client is an administrator's, with the types of Kubernetes, of definitions
	// and of this product; it does not cache.
	Client client.Client

	processes map[string]*child.Process
}

// Option changes what Start starts.
type Option func(*options)

type options struct{ controllerManager bool }

// WithControllerManager starts kube-controller-manager as well, so that namespaces
// are deleted, owned objects collected and roles aggregated.
func WithControllerManager() Option { return func(o *options) { o.controllerManager = true } }

var shared = sync.OnceValues(func() (*Cluster, error) { return start(options{controllerManager: true}) })

// Shared is the test binary's own cluster, with kube-controller-manager. Tests
// that stop servers, or change what is cluster-wide in ways that others see, take
// Start instead.
func Shared(tb testing.TB) *Cluster {
	tb.Helper()
	c, err := shared()
	if err != nil {
		tb.Fatal(err)
	}
	return c
}

// Start starts a cluster that lives as long as the test.
func Start(tb testing.TB, opts ...Option) *Cluster {
	tb.Helper()
	var o options
	for _, opt := range opts {
		opt(&o)
	}
	c, err := start(o)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		for _, p := range c.processes {
			p.Kill()
		}
		if err := child.RemoveDir(c.layout.Dir); err != nil {
			tb.Error(err)
		}
	})
	return c
}

func start(o options) (*Cluster, error) {
	dir, err := child.TempDir("join-kubetest-", nil)
	if err != nil {
		return nil, err
	}
	c := &Cluster{layout: controlplane.Layout{Dir: dir}, processes: map[string]*child.Process{}}
	if err := c.layout.MakeKeys(); err != nil {
		return nil, err
	}
	// A port that looked free may be taken before it is used.
	for range 3 {
		if err = c.startOn(o); err == nil {
			return c, nil
		}
		for _, p := range c.processes {
			p.Kill()
		}
	}
	return nil, err
}

func (c *Cluster) startOn(o options) error {
	ports, err := controlplane.FreePorts(4)
	if err != nil {
		return err
	}
	l := &c.layout
	l.APIPort, l.EtcdPort, l.EtcdPeerPort, l.ControllerManagerPort = ports[0], ports[1], ports[2], ports[3]
	if c.admin, err = l.Administrator(); err != nil {
		return err
	}
	c.admin.QPS = -1
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	if err := c.run(l.Etcd()); err != nil {
		return err
	}
	if err := c.StartAPIServer(ctx); err != nil {
		return err
	}
	if c.Client, err = NewClient(c.admin); err != nil {
		return err
	}
	if !o.controllerManager {
		return nil
	}
	kcm, err := l.As("system:kube-controller-manager")
	if err != nil {
		return err
	}
	if err := controlplane.WriteKubeconfig(l.ControllerManagerKubeconfig(), kcm); err != nil {
		return err
	}
	return c.run(l.ControllerManager())
}

func (c *Cluster) run(p controlplane.Program) error {
	path, err := controlplane.Binary(p.Name)
	if err != nil {
		return err
	}
	process, err := child.Start(child.Command{
		Path: path, Args: p.Args, Log: filepath.Join(c.layout.Dir, p.Name+".log"),
		Stop: "KILL", // nobody wants the data, and an API server takes its time to leave
	})
	if err != nil {
		return err
	}
	c.processes[p.Name] = process
	return nil
}

// StopAPIServer ends the API server and leaves its data, as in an outage.
func (c *Cluster) StopAPIServer() { c.processes["kube-apiserver"].Kill() }

// StartAPIServer starts the API server again, at the same address, and returns
// when it is ready.
func (c *Cluster) StartAPIServer(ctx context.Context) error {
	if err := c.run(c.layout.APIServer()); err != nil {
		return err
	}
	hc, err := rest.HTTPClientFor(c.admin)
	if err != nil {
		return err
	}
	return c.processes["kube-apiserver"].Await(ctx, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.admin.Host+"/readyz", nil)
		if err != nil {
			return err
		}
		resp, err := hc.Do(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("/readyz answers %s", resp.Status)
		}
		return nil
	})
}

// NewClient is a client for cfg that knows all types that tests use.
func NewClient(cfg *rest.Config) (client.Client, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, apiextensionsv1.AddToScheme, v1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	return client.New(cfg, client.Options{Scheme: scheme})
}
