package main

import (
	"fmt"
	"log/slog"

	"github.com/jackc/pgx/v5/pgxpool"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/better-compute/join-operator/config/policies"
	"github.com/better-compute/join-operator/controllers/bundle"
	"github.com/better-compute/join-operator/controllers/fleetnode"
	"github.com/better-compute/join-operator/controllers/fleetpool"
	"github.com/better-compute/join-operator/controllers/guard"
	"github.com/better-compute/join-operator/controllers/joinrequest"
	"github.com/better-compute/join-operator/controllers/jointoken"
	"github.com/better-compute/join-operator/controllers/outbox"
	"github.com/better-compute/join-operator/controllers/prune"
	"github.com/better-compute/join-operator/controllers/tenant"
)

// addControllers adds every controller to the manager.
func addControllers(mgr ctrl.Manager, db *pgxpool.Pool, o options, log *slog.Logger) error {
	live, err := client.New(mgr.GetConfig(), client.Options{Scheme: mgr.GetScheme(), Mapper: mgr.GetRESTMapper(), HTTPClient: mgr.GetHTTPClient()})
	if err != nil {
		return fmt.Errorf("client without a cache: %w", err)
	}
	expected, err := expectedPolicies(policies.Namespaces{System: o.systemNamespace, Keys: o.keysNamespace, Trust: o.trustNamespace})
	if err != nil {
		return err
	}
	recorder := mgr.GetEventRecorder("join-manager")
	feed := outbox.NewFeed(db, outbox.Options{Logger: log})
	feed.Observe((&outbox.Announcer{DB: db, Recorder: recorder, Logger: log}).Observe)
	budget := fleetnode.NewBudget(0)
	guarding := &guard.Guard{
		Client: mgr.GetClient(), Expected: expected, Recorder: recorder, Logger: log,
		SystemNamespace: o.systemNamespace, Metrics: metrics.Registry,
	}
	for _, c := range []interface{ SetupWithManager(ctrl.Manager) error }{
		&tenant.Reconciler{
			Client: mgr.GetClient(), DB: db, Feed: feed, Recorder: recorder,
			SystemNamespace: o.systemNamespace, ServiceAccount: o.serviceAccount, Never: []string{o.keysNamespace, o.trustNamespace},
		},
		guarding,
		&joinrequest.Reconciler{
			Client: mgr.GetClient(), Live: live, DB: db, Feed: feed, Guard: guarding, Recorder: recorder, Logger: log,
			SystemNamespace: o.systemNamespace, Metrics: metrics.Registry,
		},
		&fleetpool.Reconciler{Client: mgr.GetClient(), DB: db, Feed: feed, Objects: budget},
		&jointoken.Reconciler{Client: mgr.GetClient(), Live: live, DB: db, Feed: feed, Recorder: recorder},
		&fleetnode.Reconciler{Client: mgr.GetClient(), Live: live, DB: db, Feed: feed, Recorder: recorder, Budget: budget},
		&bundle.Reconciler{Client: mgr.GetClient(), DB: db, Feed: feed, SystemNamespace: o.systemNamespace},
	} {
		if err := c.SetupWithManager(mgr); err != nil {
			return fmt.Errorf("set up %T: %w", c, err)
		}
	}
	pruner, err := prune.New(db, prune.Options{}, log, metrics.Registry)
	if err != nil {
		return err
	}
	if err := mgr.Add(pruner); err != nil {
		return err
	}
	// Last: the feed waits for those that subscribed.
	return mgr.Add(feed)
}

// expectedPolicies are the policies as they are installed with this release,
// where the operator's namespaces have the given names.
func expectedPolicies(n policies.Namespaces) (guard.Expected, error) {
	manifests, err := policies.Manifests(n)
	if err != nil {
		return guard.Expected{}, err
	}
	return guard.Parse(manifests...)
}
