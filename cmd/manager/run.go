package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/joinsvc/rows"
)

// databaseWait is the pause before the database is asked again at the start.
const databaseWait = 2 * time.Second

func run(ctx context.Context, o options, log *slog.Logger) error {
	config, err := restConfig(o.kubeconfig)
	if err != nil {
		return fmt.Errorf("kubeconfig: %w", err)
	}
	db, err := openDatabase(ctx, o.databaseURL, log)
	if err != nil {
		return err
	}
	defer db.Close()
	mgr, err := newManager(config, o)
	if err != nil {
		return err
	}
	if err := addControllers(mgr, db, o, log); err != nil {
		return err
	}
	if err := addHealth(mgr, db); err != nil {
		return err
	}
	log.InfoContext(ctx, "the manager starts", "systemNamespace", o.systemNamespace, "trustDomain", o.trustDomain)
	return mgr.Start(ctx)
}

func restConfig(kubeconfig string) (*rest.Config, error) {
	config, err := rest.InClusterConfig()
	if kubeconfig != "" {
		config, err = clientcmd.BuildConfigFromFlags("", kubeconfig)
	}
	if err != nil {
		return nil, err
	}
	// The API server's own fairness is what limits the manager.
	config.QPS = -1
	config.UserAgent = "join-manager"
	return config, nil
}

// openDatabase migrates the database and opens it. Several managers may do so at
// once: an advisory lock lets one migrate, and migrations only expand, so that
// the leader of the release before goes on meanwhile.
func openDatabase(ctx context.Context, url string, log *slog.Logger) (*pgxpool.Pool, error) {
	for {
		err := rows.Migrate(ctx, url)
		if err == nil {
			break
		}
		log.WarnContext(ctx, "the database is not ready; trying again", "error", err)
		select {
		case <-time.After(databaseWait):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	db, err := rows.Open(ctx, url, rows.Options{})
	if err != nil {
		return nil, err
	}
	if err := rows.Compatible(ctx, db); err != nil {
		db.Close()
		return nil, err
	}
	return db, nil
}

func newManager(config *rest.Config, o options) (ctrl.Manager, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, v1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	return ctrl.NewManager(config, ctrl.Options{
		Scheme:                        scheme,
		Metrics:                       metricsserver.Options{BindAddress: o.metricsAddress},
		HealthProbeBindAddress:        o.probeAddress,
		LeaderElection:                o.leaderElect,
		LeaderElectionID:              o.leaderElectionID,
		LeaderElectionNamespace:       o.systemNamespace,
		LeaderElectionReleaseOnCancel: true, // main returns when the manager does
		// The manager may list neither Secrets nor ConfigMaps.
		Client: client.Options{Cache: &client.CacheOptions{DisableFor: []client.Object{&corev1.Secret{}, &corev1.ConfigMap{}}}},
	})
}

// addHealth: alive is who answers, ready is who reaches the database.
func addHealth(mgr ctrl.Manager, db *pgxpool.Pool) error {
	if err := mgr.AddHealthzCheck("ping", healthz.Ping); err != nil {
		return err
	}
	return mgr.AddReadyzCheck("database", func(r *http.Request) error {
		ctx, cancel := context.WithTimeout(r.Context(), time.Second)
		defer cancel()
		return db.Ping(ctx)
	})
}
