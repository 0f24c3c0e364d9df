package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
)

// options are the command line.
type options struct {
	kubeconfig      string
	databaseURL     string
	databaseURLFile string
	maxConnections  int
	systemNamespace string
	keysNamespace   string
	trustDomain     string
	listen          string
	tlsDir          string
	clientCA        string
	gatewayURI      string
	metricsListen   string
	replicaID       string
	profiling       bool
}

// parse reads the command line; what it answers to -h goes to standard output.
func parse(args []string) (options, error) {
	var o options
	f := flag.NewFlagSet("joinsvc", flag.ContinueOnError)
	f.SetOutput(io.Discard)
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig `file`; the pod's service account where empty")
	f.StringVar(&o.databaseURL, "database-url", "", "`URL` of the database, as the role join_service")
	f.StringVar(&o.databaseURLFile, "database-url-file", "", "`file` that holds the URL of the database")
	f.IntVar(&o.maxConnections, "database-max-connections", 16, "connections to the database at most: as many joins are decided at once")
	f.StringVar(&o.systemNamespace, "system-namespace", "join-system", "the operator's own `namespace`, which is the root tenant")
	f.StringVar(&o.keysNamespace, "keys-namespace", "join-keys", "`namespace` of the node CAs and of the service's keys")
	f.StringVar(&o.trustDomain, "trust-domain", "", "SPIFFE trust domain of the nodes' certificates")
	f.StringVar(&o.listen, "listen", ":8443", "`address` that gateways connect to")
	f.StringVar(&o.tlsDir, "tls-dir", "", "`folder` of tls.crt, tls.key and ca.crt, as a mounted Secret")
	f.StringVar(&o.clientCA, "client-ca", "", "PEM `file` of the CA of the gateway's certificate; ca.crt in --tls-dir where empty")
	f.StringVar(&o.gatewayURI, "gateway-uri", "", "URI in the gateway's certificate; spiffe://<trust domain>/system/gateway where empty")
	f.StringVar(&o.metricsListen, "metrics-listen", ":8080", "`address` of /metrics, /healthz and /readyz")
	f.StringVar(&o.replicaID, "replica-id", "", "`name` of this replica, unlike all others; the host's name where empty")
	f.BoolVar(&o.profiling, "profiling", false, "serve CPU and heap profiles at /debug/pprof beside the metrics")
	if err := f.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			f.SetOutput(os.Stdout)
			f.Usage()
		}
		return options{}, err
	}
	if f.NArg() > 0 {
		return options{}, fmt.Errorf("unexpected argument %q", f.Arg(0))
	}
	switch {
	case (o.databaseURL == "") == (o.databaseURLFile == ""):
		return options{}, errors.New("give either --database-url or --database-url-file")
	case o.trustDomain == "":
		return options{}, errors.New("--trust-domain is required")
	case o.tlsDir == "":
		return options{}, errors.New("--tls-dir is required")
	case o.maxConnections < 2:
		return options{}, errors.New("--database-max-connections must be 2 or more")
	}
	if o.gatewayURI == "" {
		o.gatewayURI = "spiffe://" + o.trustDomain + "/system/gateway"
	}
	if o.replicaID == "" {
		host, err := os.Hostname()
		if err != nil {
			return options{}, fmt.Errorf("give --replica-id: %w", err)
		}
		o.replicaID = host
	}
	if o.databaseURLFile != "" {
		b, err := os.ReadFile(o.databaseURLFile)
		if err != nil {
			return options{}, fmt.Errorf("read the database's URL: %w", err)
		}
		o.databaseURL = strings.TrimSpace(string(b))
	}
	return o, nil
}
