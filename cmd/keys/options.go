package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/better-compute/join-operator/joinsvc/keys"
)

// options are the command line.
type options struct {
	kubeconfig      string
	databaseURL     string
	databaseURLFile string
	keysNamespace   string
	trustNamespace  string
	systemNamespace string
	trustDomain     string
	tlsCAFile       string
	endpoints       []string
	overlap         time.Duration
	maxAge          time.Duration
	bundleMaxAge    time.Duration
	wait            time.Duration
	force           []keys.Kind
	keysOnly        bool
}

// parse reads the command line; what it answers to -h goes to standard output.
func parse(args []string) (options, error) {
	var o options
	f := flag.NewFlagSet("keys rotate", flag.ContinueOnError)
	f.SetOutput(io.Discard)
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig `file`; the pod's service account where empty")
	f.StringVar(&o.databaseURL, "database-url", "", "`URL` of the database, as the role join_keys")
	f.StringVar(&o.databaseURLFile, "database-url-file", "", "`file` that holds the URL of the database")
	f.StringVar(&o.keysNamespace, "keys-namespace", "join-keys", "`namespace` of the join service's keys")
	f.StringVar(&o.trustNamespace, "trust-namespace", "join-trust", "`namespace` of the bundle keys")
	f.StringVar(&o.systemNamespace, "system-namespace", "join-system", "the operator's own `namespace`, in whose stream events land")
	f.StringVar(&o.trustDomain, "trust-domain", "", "SPIFFE trust domain of this installation; it can never be changed")
	f.StringVar(&o.tlsCAFile, "tls-ca-file", "", "PEM `file` of the CAs that vouch for the endpoints' certificates")
	f.Func("endpoint", "https `URL` that machines reach a gateway at; repeat for several", func(s string) error {
		o.endpoints = append(o.endpoints, s)
		return nil
	})
	f.DurationVar(&o.overlap, "overlap", 24*time.Hour, "time between a new key's publication and its use, and again until the old one is dropped")
	f.DurationVar(&o.maxAge, "max-age", 90*24*time.Hour, "age at which a signing, sealing or challenge key is followed by the next")
	f.DurationVar(&o.bundleMaxAge, "bundle-max-age", 365*24*time.Hour, "age at which a bundle key is followed by the next")
	f.DurationVar(&o.wait, "wait", 2*time.Minute, "how long to wait for replicas to load new keys and the first CA")
	f.Func("force", "rotate the keys of this `kind` (signing, sealing, challenge, bundle) whatever their age; repeat for several", func(s string) error {
		o.force = append(o.force, keys.Kind(s))
		return nil
	})
	f.BoolVar(&o.keysOnly, "keys-only", false, "make keys, and leave the bundle to a later run: before the first join service runs")
	if err := f.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			fmt.Print(usage)
			f.SetOutput(os.Stdout)
			f.PrintDefaults()
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
	case !o.keysOnly && (o.tlsCAFile == "" || len(o.endpoints) == 0):
		return options{}, errors.New("--tls-ca-file and --endpoint are required")
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
