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
	kubeconfig       string
	databaseURL      string
	databaseURLFile  string
	systemNamespace  string
	keysNamespace    string
	trustNamespace   string
	serviceAccount   string
	trustDomain      string
	metricsAddress   string
	probeAddress     string
	leaderElect      bool
	leaderElectionID string
}

// parse reads the command line; what it answers to -h goes to standard output.
func parse(args []string) (options, error) {
	var o options
	f := flag.NewFlagSet("manager", flag.ContinueOnError)
	f.SetOutput(io.Discard)
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig `file`; the pod's service account where empty")
	f.StringVar(&o.databaseURL, "database-url", "", "`URL` of the database, as the role join_manager")
	f.StringVar(&o.databaseURLFile, "database-url-file", "", "`file` that holds the URL of the database")
	f.StringVar(&o.systemNamespace, "system-namespace", "join-system", "the operator's own `namespace`, which is the root tenant")
	f.StringVar(&o.keysNamespace, "keys-namespace", "join-keys", "`namespace` of the keys, which is never a tenant")
	f.StringVar(&o.trustNamespace, "trust-namespace", "join-trust", "`namespace` of the bundle keys, which is never a tenant")
	f.StringVar(&o.serviceAccount, "service-account", "join-manager", "`name` of the manager's service account in the operator's namespace")
	f.StringVar(&o.trustDomain, "trust-domain", "", "SPIFFE trust domain of this installation, for its log")
	f.StringVar(&o.metricsAddress, "metrics-bind-address", ":8080", "`address` of the metrics; 0 for none")
	f.StringVar(&o.probeAddress, "health-probe-bind-address", ":8081", "`address` of /healthz and /readyz; 0 for none")
	f.BoolVar(&o.leaderElect, "leader-elect", true, "of several managers, let one work at a time")
	f.StringVar(&o.leaderElectionID, "leader-election-id", "join-manager", "`name` of the lease of the leader")
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
	return o, o.readDatabaseURL()
}

func (o *options) readDatabaseURL() error {
	switch {
	case (o.databaseURL == "") == (o.databaseURLFile == ""):
		return errors.New("give either --database-url or --database-url-file")
	case o.databaseURLFile != "":
		b, err := os.ReadFile(o.databaseURLFile)
		if err != nil {
			return fmt.Errorf("read the database's URL: %w", err)
		}
		o.databaseURL = strings.TrimSpace(string(b))
	}
	return nil
}
