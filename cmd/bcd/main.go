// Command bcd runs on a machine: it joins the machine to a fleet, keeps its
// certificate fresh, and says how that stands. See docs/bcd.md.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/better-compute/join-operator/agent"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], streams{in: os.Stdin, out: os.Stdout, err: os.Stderr})
	stop()
	os.Exit(code)
}

// streams are where a command reads and writes: results on out, everything that
// is for a person or a log on err.
type streams struct {
	in       io.Reader
	out, err io.Writer
}

// run is the whole command; it returns the exit code.
func run(ctx context.Context, args []string, s streams) int {
	root := &cobra.Command{
		Use:           "bcd",
		Short:         "Join this machine to a fleet, keep its certificate fresh, and say how that stands",
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := cmd.Help(); err != nil {
				return err
			}
			return usageError("say what to do: bcd run, bcd join, bcd status or bcd reset")
		},
	}
	root.SetArgs(args)
	root.SetIn(s.in)
	root.SetOut(s.err)
	root.SetErr(s.err)
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError(err.Error()) })
	root.AddCommand(newRunCommand(s), newJoinCommand(s), newStatusCommand(s), newResetCommand(s))
	for _, c := range append(root.Commands(), root) {
		c.Args = noArguments
	}
	err := root.ExecuteContext(ctx)
	if err == nil {
		return exitOK
	}
	if _, shown := errors.AsType[shownError](err); !shown {
		printError(s.err, err)
	}
	return exitCode(err)
}

func printError(w io.Writer, err error) {
	if exitCode(err) == exitInterrupted {
		fmt.Fprintln(w, "bcd: interrupted; start it again to go on")
		return
	}
	fmt.Fprintln(w, "bcd:", agent.Summary(err))
}

// noArguments refuses positional arguments as a mistake in usage.
func noArguments(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usageError(fmt.Sprintf("%s takes no argument %q; see %s --help", cmd.CommandPath(), args[0], cmd.CommandPath()))
	}
	return nil
}
