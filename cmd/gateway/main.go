// Command gateway faces the internet and relays joins to the join service.
package main

import (
	"context"
	"errors"
	"flag"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"syscall"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/better-compute/join-operator/joinsvc/gateway"
)

func main() {
	log := slog.New(slog.NewJSONHandler(os.Stderr, nil))
	o, err := parseOptions(os.Args[1:], os.Stderr)
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		log.Error("the gateway's options", "error", err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o, log); err != nil {
		log.Error("the gateway stops", "error", err)
		os.Exit(1)
	}
}

// run relays until ctx ends.
func run(ctx context.Context, o *options, log *slog.Logger) error {
	serving, err := gateway.OpenIdentity(o.tlsDir, "", log)
	if err != nil {
		return err
	}
	client, err := gateway.OpenIdentity(o.upstreamDir, o.upstreamCA, log)
	if err != nil {
		return err
	}
	upstreams, err := gateway.NewUpstreams(o.upstreams, client, log)
	if err != nil {
		return err
	}
	refusals, err := gateway.NewLimiter(o.refusalBurst, o.refusalRate)
	if err != nil {
		return err
	}
	requests, err := gateway.NewLimiter(o.pollBurst, o.pollRate)
	if err != nil {
		return err
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	handler, err := gateway.New(gateway.Config{
		Upstreams: upstreams, Refusals: refusals, Requests: requests, TrustedHops: o.trustedHops,
		MaxInFlight: o.maxInFlight, MaxLargeBodies: o.maxLargeBodies, Metrics: registry, Logger: log,
	})
	if err != nil {
		return err
	}
	stop, err := serveOps(o, registry, handler, log)
	if err != nil {
		return err
	}
	defer stop()
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", o.listen)
	if err != nil {
		return err
	}
	// What serves outlives ctx by what is under way.
	background, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	go serving.Run(background)
	go client.Run(background)
	go upstreams.Run(background)
	log.Info("the gateway serves", "address", l.Addr().String(), "upstreams", []string(o.upstreams))
	server := &gateway.Server{
		Handler: handler, Identity: serving, ProxyProtocol: o.proxies,
		MaxConnections: o.maxConnections, MaxConnectionsPerSource: o.maxConnectionsPerSource,
		ShutdownDelay: o.shutdownDelay, Logger: log,
	}
	return server.Serve(ctx, l)
}
