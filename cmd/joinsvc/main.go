// Command joinsvc runs a replica of the join service: it decides joins, issues
// certificates and signs answers. Any number of replicas run beside each other;
// none keeps state of its own.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/better-compute/join-operator/joinsvc/httpapi"
)

func main() {
	o, err := parse(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "joinsvc:", err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// A join leaves a hundred kilobytes of garbage and next to nothing that lives, so
	// most of the collector's work is saved for some tens of megabytes.
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(400)
	}
	log := slog.New(httpapi.LogHandler(slog.NewJSONHandler(os.Stderr, nil)))
	if err := run(ctx, o, log); err != nil {
		log.Error("the join service ends", "error", err)
		os.Exit(1)
	}
}
