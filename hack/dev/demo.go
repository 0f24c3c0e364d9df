package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/better-compute/join-operator/hack/controlplane"
)

// step is one thing that the demo shows.
type step struct {
	// explain is said before it, in a sentence or two; empty continues the step
	// before.
	explain string
	// script is run by bash as somebody who sourced .dev/env, in a folder of the
	// demo's own, and printed as it is.
	script string
	// as is the user whose kubeconfig is in force; empty is the administrator.
	as string
	// exit is the exit code that the script must end with.
	exit int
	// shows are texts that its output must hold.
	shows []string
}

// demo brings the system up, shows the story and takes the system down. It fails
// unless every step did what it says.
func (s *system) demo(ctx context.Context) (err error) {
	if err := s.down(); err != nil {
		return err
	}
	defer func() {
		// Also after Ctrl-C, and whatever went wrong.
		err = errors.Join(err, s.down(), os.RemoveAll(s.path("demo")))
	}()
	s.say("bringing the system up: etcd, API server, cert-manager, Postgres, manager, two join services, gateway")
	if err := s.up(ctx); err != nil {
		return err
	}
	if err := os.MkdirAll(s.path("demo"), 0o700); err != nil {
		return err
	}
	for _, user := range []string{"alice", "bob"} {
		cfg, err := s.layout().As(user)
		if err != nil {
			return err
		}
		if err := controlplane.WriteKubeconfig(s.path("demo", user+".kubeconfig"), cfg); err != nil {
			return err
		}
	}
	steps := story()
	for _, st := range steps {
		if err := s.show(ctx, st); err != nil {
			return err
		}
	}
	fmt.Println()
	s.say("every step did what it says (%d commands)", len(steps))
	return nil
}

func (s *system) show(ctx context.Context, st step) error {
	if st.explain != "" {
		fmt.Printf("\n\033[1m# %s\033[0m\n", strings.ReplaceAll(st.explain, "\n", "\n# "))
	}
	who := ""
	if st.as != "" {
		who = "(" + st.as + ") "
	}
	fmt.Printf("%s$ %s\n", who, strings.ReplaceAll(strings.TrimSpace(st.script), "\n", "\n> "))
	ctx, cancel := context.WithTimeout(ctx, 90*time.Second)
	defer cancel()
	preamble := "set -euo pipefail; . " + quote(s.path("env")) + "\n"
	if st.as != "" {
		preamble += "export KUBECONFIG=" + quote(s.path("demo", st.as+".kubeconfig")) + "\n"
	}
	cmd := exec.CommandContext(ctx, "bash", "-c", preamble+st.script)
	cmd.Dir = s.path("demo")
	// What a script leaves in the background must not keep this waiting.
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	fmt.Print(string(out))
	code := 0
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		code = exit.ExitCode()
	} else if err != nil && !errors.Is(err, exec.ErrWaitDelay) {
		return err
	}
	if code != st.exit {
		return fmt.Errorf("the command ended with %d instead of %d", code, st.exit)
	}
	for _, text := range st.shows {
		if !strings.Contains(string(out), text) {
			return fmt.Errorf("the output does not hold %q", text)
		}
	}
	return nil
}
