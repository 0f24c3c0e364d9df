// Command keys makes and rotates the keys of the join service and publishes the
// join bundle. It is run by a CronJob, and by hand with --force.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/better-compute/join-operator/joinsvc/keys"
	"github.com/better-compute/join-operator/joinsvc/rows"
)

const usage = `keys rotate makes and rotates the keys of the join service, and publishes the
join bundle where something changed. It may be run at any time, again and again.

Usage:
  keys rotate [flags]
`

// timeout bounds a run beside the time that replicas are waited for.
const timeout = 2 * time.Minute

func main() {
	if len(os.Args) < 2 || os.Args[1] != "rotate" {
		fmt.Fprint(os.Stderr, usage)
		os.Exit(2)
	}
	o, err := parse(os.Args[2:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "keys rotate:", err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	log := slog.New(slog.NewJSONHandler(os.Stderr, nil))
	if err := rotate(ctx, o, log); err != nil {
		log.Error("keys rotate failed", "error", err)
		os.Exit(1)
	}
}

func rotate(ctx context.Context, o options, log *slog.Logger) error {
	ctx, cancel := context.WithTimeout(ctx, timeout+o.wait)
	defer cancel()
	cfg, err := restConfig(o.kubeconfig)
	if err != nil {
		return fmt.Errorf("kubeconfig: %w", err)
	}
	client, err := corev1client.NewForConfig(cfg)
	if err != nil {
		return fmt.Errorf("client for secrets: %w", err)
	}
	var ca []byte
	if !o.keysOnly {
		if ca, err = os.ReadFile(o.tlsCAFile); err != nil {
			return fmt.Errorf("read the TLS CA: %w", err)
		}
	}
	db, err := rows.Open(ctx, o.databaseURL, rows.Options{MaxConns: 3})
	if err != nil {
		return err
	}
	defer db.Close()
	if err := rows.Compatible(ctx, db); err != nil {
		return err
	}
	result, err := keys.Rotate(ctx, keys.Config{
		DB: db, Secrets: client, KeysNamespace: o.keysNamespace, TrustNamespace: o.trustNamespace, SystemNamespace: o.systemNamespace,
		TrustDomain: o.trustDomain, Endpoints: o.endpoints, TLSCA: ca, Overlap: o.overlap, MaxAge: o.maxAge, BundleMaxAge: o.bundleMaxAge,
		Force: o.force, KeysOnly: o.keysOnly, Wait: o.wait, Logger: log,
	})
	if err != nil {
		return err
	}
	log.Info("done", "generation", result.Generation, "published", result.Published,
		"added", result.Added, "activated", result.Activated, "dropped", result.Dropped, "waiting", result.Waiting)
	return nil
}

func restConfig(kubeconfig string) (*rest.Config, error) {
	if kubeconfig == "" {
		return rest.InClusterConfig()
	}
	return clientcmd.BuildConfigFromFlags("", kubeconfig)
}
