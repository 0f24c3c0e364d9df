package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"time"
)

// options of the gateway's process.
type options struct {
	listen, tlsDir, upstreamDir, upstreamCA string
	opsListen                               string
	pprof                                   bool
	upstreams                               texts
	proxies                                 prefixes
	refusalBurst, refusalRate               float64
	pollBurst, pollRate                     float64
	trustedHops                             int
	maxInFlight, maxLargeBodies             int
	maxConnections, maxConnectionsPerSource int
	shutdownDelay                           time.Duration
}

// texts is a flag that may be given several times.
type texts []string

// String implements flag.Value.
func (t *texts) String() string { return strings.Join(*t, " ") }

// Set implements flag.Value.
func (t *texts) Set(s string) error {
	*t = append(*t, s)
	return nil
}

// prefixes is a flag of networks that may be given several times.
type prefixes []netip.Prefix

// String implements flag.Value.
func (p *prefixes) String() string { return fmt.Sprint([]netip.Prefix(*p)) }

// Set implements flag.Value.
func (p *prefixes) Set(s string) error {
	prefix, err := netip.ParsePrefix(s)
	if err != nil {
		return err
	}
	*p = append(*p, prefix.Masked())
	return nil
}

func parseOptions(args []string, out io.Writer) (*options, error) {
	o := &options{}
	f := flag.NewFlagSet("gateway", flag.ContinueOnError)
	f.SetOutput(out)
	f.StringVar(&o.listen, "listen", ":8443", "`address` that machines reach")
	f.StringVar(&o.tlsDir, "tls-dir", "/tls", "`folder` with tls.crt and tls.key, read again when they change")
	f.Var(&o.upstreams, "upstream", "https `URL` of the join service; repeat it for each replica, or give a name that has all their addresses")
	f.StringVar(&o.upstreamDir, "upstream-tls-dir", "/upstream-tls", "`folder` with the client certificate for the join service, read again when it changes")
	f.StringVar(&o.upstreamCA, "upstream-ca", "/upstream-tls/ca.crt", "PEM `file` of the join service's CA, read again when it changes")
	f.StringVar(&o.opsListen, "metrics-listen", "", "`address` of /metrics, /healthz and /readyz over plain HTTP, which machines do not reach; empty serves none")
	f.BoolVar(&o.pprof, "pprof", false, "profiles under /debug/pprof/ of the metrics' address")
	f.Float64Var(&o.refusalBurst, "refusal-burst", 600, "refusals that a source (IPv4 address, IPv6 /64) may collect")
	f.Float64Var(&o.refusalRate, "refusal-rate", 5, "refusals a second that are forgiven")
	f.Float64Var(&o.pollBurst, "poll-burst", 3000, "renewals, polls and downloads that a source may do at once")
	f.Float64Var(&o.pollRate, "poll-rate", 100, "the same, a second")
	f.IntVar(&o.trustedHops, "trusted-hops", 0, "`number` of proxies in front that add to X-Forwarded-For; nobody else may reach the gateway then")
	f.Var(&o.proxies, "proxy-protocol-from", "`CIDR` of proxies that speak the PROXY protocol; repeat it")
	f.IntVar(&o.maxInFlight, "max-in-flight", 4096, "requests that are relayed at once")
	f.IntVar(&o.maxLargeBodies, "max-large-bodies", 512, "of those, how many may hold a body above 16 KiB")
	f.IntVar(&o.maxConnections, "max-connections", 16384, "open connections; further ones wait")
	f.IntVar(&o.maxConnectionsPerSource, "max-connections-per-source", 4096, "open connections of a source, where no proxy stands in front; 0 is no bound")
	f.DurationVar(&o.shutdownDelay, "shutdown-delay", 0, "how long to serve on after /readyz began to say no")
	if err := f.Parse(args); err != nil {
		return nil, err
	}
	switch {
	case f.NArg() > 0:
		return nil, fmt.Errorf("unknown argument %q", f.Arg(0))
	case o.trustedHops < 0 || o.maxConnectionsPerSource < 0 || o.shutdownDelay < 0:
		return nil, errors.New("numbers are not negative")
	case o.pprof && o.opsListen == "":
		return nil, errors.New("--pprof needs --metrics-listen")
	}
	return o, nil
}
