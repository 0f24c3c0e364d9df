package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/better-compute/join-operator/agent/state"
)

type reloadFlags struct {
	text    string
	shell   bool
	timeout time.Duration
}

func (f *reloadFlags) register(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.StringVar(&f.text, "reload-command", "", "program with arguments, separated by spaces, to run after a new certificate was written; no shell reads it")
	fl.BoolVar(&f.shell, "reload-shell", false, "have /bin/sh -c run the reload command")
	fl.DurationVar(&f.timeout, "reload-timeout", time.Minute, "end the reload command after so long")
}

// forShells are characters that a shell would read as more than text. Without one,
// a command that has them does not do what was meant.
const forShells = "\"'`$\\|&;<>()*?[]{}~#"

// killedAfter is how long a command that was told to end has for it.
const killedAfter = 5 * time.Second

// command makes the function that runs the reload command, or nil where there is
// none. hidden is an environment variable that it must not see.
func (f *reloadFlags) command(s streams, files state.Outputs, hidden string) (func(context.Context, *state.Identity) error, error) {
	argv := strings.Fields(f.text)
	switch {
	case f.timeout <= 0:
		return nil, usageError("--reload-timeout must be positive")
	case len(argv) == 0 && f.shell:
		return nil, usageError("--reload-shell needs a --reload-command")
	case len(argv) == 0:
		return nil, nil
	case f.shell:
		argv = []string{"/bin/sh", "-c", f.text}
	case strings.ContainsAny(f.text, forShells):
		return nil, usageError("--reload-command is split at spaces and read by no shell, so that quotes and the like mean nothing: leave them out, or add --reload-shell")
	}
	return func(ctx context.Context, id *state.Identity) error {
		return runReload(ctx, argv, f.timeout, s, append(environWithout(hidden),
			"BCD_NODE_ID="+id.NodeID, "BCD_KEY_FILE="+files.Key, "BCD_CERT_FILE="+files.Cert, "BCD_CA_FILE="+files.CA))
	}, nil
}

func runReload(ctx context.Context, argv []string, timeout time.Duration, s streams, env []string) error {
	limited, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	cmd := exec.CommandContext(limited, argv[0], argv[1:]...)
	cmd.Env, cmd.Stdout, cmd.Stderr = env, s.err, s.err
	// A group of its own, so that nothing of a command that hangs is left.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = killedAfter
	err := cmd.Run()
	if limited.Err() != nil && cmd.Process != nil {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	}
	switch {
	case errors.Is(limited.Err(), context.DeadlineExceeded):
		return fmt.Errorf("%s: not done after %s", argv[0], timeout)
	case errors.Is(err, exec.ErrWaitDelay):
		return nil // It ended well, and left something running that holds its output.
	case err != nil:
		return fmt.Errorf("%s: %w", argv[0], err)
	}
	return nil
}

func environWithout(name string) []string {
	return slices.DeleteFunc(os.Environ(), func(v string) bool { return name != "" && strings.HasPrefix(v, name+"=") })
}
