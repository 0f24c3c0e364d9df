// Command manager runs the controllers: it brings the custom resources and the
// database together. It holds no key and issues nothing; while it is away,
// machines join as before, and what people decided meanwhile is recorded when it
// is back.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"

	"github.com/go-logr/logr"
	ctrl "sigs.k8s.io/controller-runtime"
)

func main() {
	o, err := parse(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "manager:", err)
		os.Exit(2)
	}
	log := slog.New(slog.NewJSONHandler(os.Stderr, nil))
	ctrl.SetLogger(logr.FromSlogHandler(log.Handler()))
	if err := run(ctrl.SetupSignalHandler(), o, log); err != nil && !errors.Is(err, context.Canceled) {
		log.Error("the manager ends", "error", err)
		os.Exit(1)
	}
}
