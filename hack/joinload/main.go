// Command joinload drives joins against a running system the way real agents
// do: a key and a CSR each, made beforehand; then a new TLS connection, a sealed
// request, and an answer whose signature is verified. It reports joins per
// second, latencies, and the CPU that each process of the system spent on a join.
//
// It is for systems on this machine: it reads the CPU times of their processes.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"time"

	"github.com/better-compute/join-operator/test/machine"
)

type options struct {
	endpoint, tlsCA, bundle string
	kubeconfig, databaseURL string
	runDir                  string
	namespace, pool         string
	joins, concurrency      int
	rate                    float64
	tokens                  int
	rounds                  int
	compare                 bool
	markdown                bool
}

func main() {
	var o options
	flag.StringVar(&o.endpoint, "endpoint", os.Getenv("JOIN_ENDPOINT"), "the gateway's `URL`")
	flag.StringVar(&o.tlsCA, "tls-ca", os.Getenv("JOIN_TLS_CA"), "PEM `file` of the CA of the gateway's certificate")
	flag.StringVar(&o.bundle, "bundle", os.Getenv("JOIN_BUNDLE"), "join bundle, a JSON `file`")
	flag.StringVar(&o.kubeconfig, "kubeconfig", os.Getenv("KUBECONFIG"), "an administrator's kubeconfig `file`, to make tokens with")
	flag.StringVar(&o.databaseURL, "database-url", os.Getenv("DATABASE_URL"), "an administrator's database `URL`, to see when they are in force")
	flag.StringVar(&o.runDir, "run-dir", ".dev/run", "`folder` of the dev system's pid files")
	flag.StringVar(&o.namespace, "namespace", "load", "tenant `namespace` to join into; it must be one already")
	flag.StringVar(&o.pool, "pool", "default", "`pool` to join into; it must exist")
	flag.IntVar(&o.joins, "joins", 5000, "joins in each round")
	flag.IntVar(&o.concurrency, "concurrency", 8, "machines that join at once (closed loop)")
	flag.Float64Var(&o.rate, "rate", 0, "joins a second to begin, whatever is still under way (open loop); 0 is a closed loop")
	flag.IntVar(&o.tokens, "tokens", 1, "tokens to spread a round's joins over")
	flag.IntVar(&o.rounds, "rounds", 1, "rounds")
	flag.BoolVar(&o.compare, "compare", false, "interleave rounds over one token with rounds over a token a join, and print the ratio")
	flag.BoolVar(&o.markdown, "markdown", false, "print the table as Markdown")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "joinload:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) error {
	if o.endpoint == "" || o.tlsCA == "" || o.bundle == "" {
		return errors.New("no endpoint, CA or bundle given: source .dev/env first (make dev-up writes it)")
	}
	target, err := machine.Open(o.endpoint, o.tlsCA, o.bundle)
	if err != nil {
		return err
	}
	minter, err := openMinter(ctx, o.kubeconfig, o.databaseURL)
	if err != nil {
		return err
	}
	defer minter.close()
	procs, err := findProcesses(o.runDir)
	if err != nil {
		return err
	}
	spreads := []int{o.tokens}
	if o.compare {
		spreads = []int{1, o.joins}
	}
	table := newTable(os.Stdout, o.markdown)
	rates := map[int][]float64{}
	for round := range o.rounds {
		for _, tokens := range spreads {
			texts, err := minter.mint(ctx, o.namespace, o.pool, tokens, o.joins)
			if err != nil {
				return err
			}
			fmt.Fprintf(os.Stderr, "round %d: making %d keys and requests\n", round+1, o.joins)
			machines, err := makeJoiners(o.joins, texts)
			if err != nil {
				return err
			}
			runtime.GC()
			before := procs.read()
			began := time.Now()
			var outcomes []outcome
			if o.rate > 0 {
				outcomes = openLoop(ctx, target, machines, o.rate)
			} else {
				outcomes = closedLoop(ctx, target, machines, o.concurrency)
			}
			r := summarise(outcomes, time.Since(began), procs.read().since(before))
			r.label = fmt.Sprintf("%d joins, %d tokens, %s", o.joins, tokens, loopName(o))
			table.add(r)
			rates[tokens] = append(rates[tokens], r.perSecond)
			if err := minter.drop(ctx, o.namespace); err != nil {
				return err
			}
			if r.failed > 0 {
				return fmt.Errorf("%d of %d joins failed; the first: %w", r.failed, len(outcomes), r.firstError)
			}
		}
	}
	if o.compare && o.joins > 1 {
		table.ratio(median(rates[1]) / median(rates[o.joins]))
	}
	return nil
}

func loopName(o options) string {
	if o.rate > 0 {
		return fmt.Sprintf("open loop at %g/s", o.rate)
	}
	return fmt.Sprintf("closed loop of %d", o.concurrency)
}
