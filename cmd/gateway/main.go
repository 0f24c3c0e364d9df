// Command gateway faces the internet and relays joins to the join service.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/signal"
	"syscall"
	"time"

	proxyproto "github.com/pires/go-proxyproto"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/better-compute/join-operator/joinsvc/gateway"
)

type list []string

func (l *list) String() string     { return fmt.Sprint([]string(*l)) }
func (l *list) Set(v string) error { *l = append(*l, v); return nil }

func main() {
	log := slog.New(slog.NewJSONHandler(os.Stderr, nil))
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, log); err != nil {
		log.Error("the gateway stops", "error", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, log *slog.Logger) error {
	var upstreams, proxies list
	listen := flag.String("listen", ":8443", "`address` that machines reach")
	tlsDir := flag.String("tls-dir", "/tls", "`folder` with tls.crt and tls.key")
	upstreamDir := flag.String("upstream-tls-dir", "/upstream-tls", "`folder` with the client certificate for the join service")
	upstreamCA := flag.String("upstream-ca", "/upstream-tls/ca.crt", "PEM `file` of the join service's CA")
	metrics := flag.String("metrics-listen", "", "`address` of the metrics; empty serves none")
	burst := flag.Float64("refusal-burst", 600, "refusals that a source may collect")
	rate := flag.Float64("refusal-rate", 5, "refusals a second that are forgiven")
	pollBurst := flag.Float64("poll-burst", 600, "renewals, polls and downloads that a source may do at once")
	pollRate := flag.Float64("poll-rate", 50, "the same, a second")
	hops := flag.Int("trusted-hops", 0, "proxies in front that write X-Forwarded-For and are trusted")
	inFlight := flag.Int("max-in-flight", 4096, "requests under way at once")
	flag.Var(&upstreams, "upstream", "https `URL` of a replica of the join service; repeat it")
	flag.Var(&proxies, "proxy-protocol-from", "`CIDR` from which the PROXY protocol is spoken; repeat it")
	flag.Parse()

	serving, err := gateway.OpenKeyPair(*tlsDir)
	if err != nil {
		return err
	}
	client, err := gateway.OpenKeyPair(*upstreamDir)
	if err != nil {
		return err
	}
	clientTLS, err := client.Client(*upstreamCA)
	if err != nil {
		return err
	}
	ups, err := gateway.NewUpstreams(upstreams, clientTLS)
	if err != nil {
		return err
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	handler, err := gateway.New(gateway.Config{
		Upstreams: ups, Refusals: gateway.NewLimiter(*burst, *rate), Requests: gateway.NewLimiter(*pollBurst, *pollRate),
		TrustedHops: *hops, MaxInFlight: *inFlight, Metrics: registry, Logger: log,
	})
	if err != nil {
		return err
	}
	if *metrics != "" {
		stop, err := serveMetrics(ctx, *metrics, registry, log)
		if err != nil {
			return err
		}
		defer stop()
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", *listen)
	if err != nil {
		return err
	}
	if len(proxies) > 0 {
		if l, err = proxyListener(l, proxies); err != nil {
			return err
		}
	}
	server := &http.Server{
		Handler: handler, TLSConfig: serving.Server(), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second,
		WriteTimeout: 30 * time.Second, IdleTimeout: 60 * time.Second, MaxHeaderBytes: 8 << 10,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	go func() {
		<-ctx.Done()
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
		defer cancel()
		_ = server.Shutdown(stop)
	}()
	if err := server.ServeTLS(l, "", ""); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// serveMetrics serves /metrics on an address of its own, which machines do not reach.
func serveMetrics(ctx context.Context, address string, registry *prometheus.Registry, log *slog.Logger) (stop func(), err error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug)}
	go func() {
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			log.Error("metrics are not served any more", "error", err)
		}
	}()
	return func() { _ = server.Close() }, nil
}

func proxyListener(l net.Listener, cidrs []string) (net.Listener, error) {
	var from []netip.Prefix
	for _, c := range cidrs {
		p, err := netip.ParsePrefix(c)
		if err != nil {
			return nil, fmt.Errorf("proxy-protocol-from: %w", err)
		}
		from = append(from, p)
	}
	return &proxyproto.Listener{Listener: l, ReadHeaderTimeout: 5 * time.Second,
		ConnPolicy: func(o proxyproto.ConnPolicyOptions) (proxyproto.Policy, error) {
			if ap, err := netip.ParseAddrPort(o.Upstream.String()); err == nil {
				for _, p := range from {
					if p.Contains(ap.Addr().Unmap()) {
						return proxyproto.REQUIRE, nil
					}
				}
			}
			return proxyproto.SKIP, nil
		}}, nil
}
