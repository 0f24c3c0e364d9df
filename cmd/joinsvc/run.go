package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/better-compute/join-operator/attestors"
	"github.com/better-compute/join-operator/attestors/configured"
	"github.com/better-compute/join-operator/attestors/jointoken"
	"github.com/better-compute/join-operator/joinsvc"
	"github.com/better-compute/join-operator/joinsvc/attestorset"
	"github.com/better-compute/join-operator/joinsvc/httpapi"
	"github.com/better-compute/join-operator/joinsvc/keyring"
	"github.com/better-compute/join-operator/joinsvc/pki"
	"github.com/better-compute/join-operator/joinsvc/record"
	"github.com/better-compute/join-operator/joinsvc/rows"
	"github.com/better-compute/join-operator/joinsvc/secrets"
)

// databaseWait is the pause before the database is asked again at the start.
const databaseWait = time.Second

// replica is the parts of a running replica.
type replica struct {
	options
	log        *slog.Logger
	db         *pgxpool.Pool
	kube       *rest.Config
	authority  *pki.Authority
	keys       *keyring.Keyring
	keeper     *pki.Keeper
	bundles    *httpapi.Bundles
	attestors  *attestorset.Set
	recorder   *record.Recorder
	service    *joinsvc.Service
	handler    *httpapi.Handler
	files      *httpapi.TLSFiles
	metrics    *prometheus.Registry
	compatible atomic.Bool
	// ending is set while the last joins are finished.
	ending atomic.Bool
}

func build(ctx context.Context, o options, log *slog.Logger) (*replica, error) {
	r := &replica{options: o, log: log, metrics: prometheus.NewRegistry(), authority: pki.NewAuthority(log), keys: keyring.New(log, nil)}
	r.metrics.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	var err error
	if r.kube, err = restConfig(o.kubeconfig); err != nil {
		return nil, fmt.Errorf("kubeconfig: %w", err)
	}
	if r.files, err = httpapi.OpenTLS(o.tlsDir, o.clientCA, o.gatewayURI, log); err != nil {
		return nil, err
	}
	if r.recorder, err = record.New(r.kube, log, r.metrics); err != nil {
		return nil, err
	}
	registry, err := attestors.NewRegistry(jointoken.New())
	if err != nil {
		return nil, err
	}
	if r.db, err = rows.Open(ctx, o.databaseURL, rows.Options{MaxConns: int32(o.maxConnections)}); err != nil {
		return nil, err
	}
	if r.attestors, err = attestorset.New(attestorset.Config{
		DB: r.db, BuiltIn: registry, Types: configured.BuiltIn(), Replica: o.replicaID, Logger: log, Metrics: r.metrics,
	}); err != nil {
		return nil, err
	}
	r.bundles = httpapi.NewBundles(r.db, log)
	if r.keeper, err = pki.NewKeeper(r.authority, r.db, log, r.metrics); err != nil {
		return nil, err
	}
	if r.service, err = joinsvc.New(joinsvc.Config{
		DB: r.db, Attestors: r.attestors, Issuer: r.authority, Keys: r.keys, TrustDomain: o.trustDomain, RootTenant: o.systemNamespace,
		Logger: log, Metrics: r.metrics, OnPending: r.recorder.Record,
	}); err != nil {
		return nil, err
	}
	r.handler, err = httpapi.New(httpapi.Config{
		Service: r.service, Signer: r.keys, Bundles: r.bundles, Lists: httpapi.NewRevocations(r.authority, r.keeper),
		Ready: r.ready, Logger: log, Metrics: r.metrics,
	})
	return r, err
}

func restConfig(kubeconfig string) (*rest.Config, error) {
	cfg, err := rest.InClusterConfig()
	if kubeconfig != "" {
		cfg, err = clientcmd.BuildConfigFromFlags("", kubeconfig)
	}
	if err != nil {
		return nil, err
	}
	cfg.QPS = -1 // the API server's own fairness is the limit
	cfg.UserAgent = "join-service"
	return cfg, nil
}

// ready says why joins cannot be served, or nil. It is asked before each join.
func (r *replica) ready() error {
	switch {
	case !r.compatible.Load():
		return errors.New("the database has not been reached yet, or is not migrated")
	case !r.keys.Ready():
		return errors.New("no keys are loaded: has the keys job run?")
	case !r.authority.Ready(time.Now()):
		return errors.New("no node CA that is valid is loaded: is the Secret node-ca-1 there?")
	}
	if err := r.attestors.Ready(); err != nil {
		return err
	}
	return r.service.Ready()
}

// run serves until ctx ends, then finishes the joins under way and what they left.
func run(ctx context.Context, o options, log *slog.Logger) error {
	// What works behind joins ends after the last of them.
	behind, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	r, err := build(behind, o, log)
	if err != nil {
		return err
	}
	defer r.db.Close()
	api, err := new(net.ListenConfig).Listen(ctx, "tcp", o.listen)
	if err != nil {
		return fmt.Errorf("listen for gateways: %w", err)
	}
	defer api.Close()
	ops, err := new(net.ListenConfig).Listen(ctx, "tcp", o.metricsListen)
	if err != nil {
		return fmt.Errorf("listen for metrics: %w", err)
	}
	defer context.AfterFunc(ctx, func() { r.ending.Store(true) })()
	var wg sync.WaitGroup
	defer wg.Wait()
	defer end()
	serving, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	wg.Go(func() { serveOps(behind, ops, r) })
	wg.Go(func() { r.files.Run(behind) })
	wg.Go(func() { r.recorder.Run(behind) })
	wg.Go(func() {
		if err := secrets.Follow(behind, r.kube, o.keysNamespace, log, func(s secrets.Snapshot) {
			r.authority.Load(s)
			r.keys.Load(s)
		}); err != nil {
			fail(err)
		}
	})
	wg.Go(func() {
		if err := r.awaitDatabase(behind); err != nil {
			fail(err)
			return
		}
		r.work(behind, fail)
	})
	log.Info("the join service starts", "listen", api.Addr().String(), "replica", o.replicaID, "trustDomain", o.trustDomain)
	err = (&httpapi.Server{Handler: r.handler, Files: r.files, Logger: log}).Serve(serving, api)
	if cause := context.Cause(serving); ctx.Err() == nil && cause != nil {
		err = errors.Join(err, cause)
	}
	return err
}

// work runs what needs the database, until ctx ends.
func (r *replica) work(ctx context.Context, fail context.CancelCauseFunc) {
	r.compatible.Store(true)
	var wg sync.WaitGroup
	wg.Go(func() { r.keys.Report(ctx, r.db, r.replicaID) })
	wg.Go(func() { r.keeper.Run(ctx) })
	wg.Go(func() { r.bundles.Run(ctx) })
	wg.Go(func() { r.attestors.Run(ctx) })
	wg.Go(func() {
		if err := r.service.Run(ctx); err != nil && ctx.Err() == nil {
			fail(err)
		}
	})
	wg.Wait()
}

// awaitDatabase returns when the schema is one that this release knows. A schema
// that is too new, and a database that forgets, end the replica.
func (r *replica) awaitDatabase(ctx context.Context) error {
	said := ""
	for {
		err := r.checkDatabase(ctx)
		if err == nil || errors.Is(err, rows.ErrTooOld) || errors.Is(err, rows.ErrForgetful) {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err.Error() != said {
			said = err.Error()
			r.log.Warn("the database is not ready; trying again", "error", err)
		}
		select {
		case <-time.After(databaseWait):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (r *replica) checkDatabase(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	return rows.Compatible(ctx, r.db)
}
