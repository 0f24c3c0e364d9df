// Command dev runs the whole system on this machine, as separate processes with
// the identities and rights that they have in production.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

const usage = `usage: dev COMMAND [--dir FOLDER]

  up              start what does not run yet, and return when all is ready
  down            stop everything and throw the system's data away (logs stay)
  demo            up, then the main story with the real output of each command, then down
  status          list the processes
  start NAME      start one process and wait until it is ready
  stop NAME       stop one process (SIGTERM)
  kill NAME       kill -9 one process
  pause NAME      freeze one process; resume NAME lets it go on
  rotate          run the keys job once more
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "dev:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("dev", flag.ContinueOnError)
	dir := flags.String("dir", ".dev", "`folder` of everything that the system writes")
	flags.Usage = func() { fmt.Fprint(os.Stderr, usage) }
	var words []string
	for rest := args; len(rest) > 0; {
		if err := flags.Parse(rest); err != nil {
			return err
		}
		if rest = flags.Args(); len(rest) > 0 {
			words, rest = append(words, rest[0]), rest[1:]
		}
	}
	if len(words) == 0 {
		flags.Usage()
		return errors.New("no command given")
	}
	s, err := newSystem(*dir)
	if err != nil {
		return err
	}
	command, names := words[0], words[1:]
	if command == "kubelet" {
		return s.kubelet(ctx)
	}
	unlock, err := s.lock()
	if err != nil {
		return err
	}
	defer unlock()
	switch command {
	case "up":
		return s.up(ctx)
	case "down":
		return s.down()
	case "demo":
		return s.demo(ctx)
	case "status":
		return s.status()
	case "rotate":
		return s.rotateKeys(ctx)
	}
	act, ok := map[string]func(process) error{
		"start":  func(p process) error { return s.start(ctx, p) },
		"stop":   func(p process) error { return s.end(p, p.stop) },
		"kill":   func(p process) error { return s.end(p, syscall.SIGKILL) },
		"pause":  func(p process) error { return s.signal(p, syscall.SIGSTOP) },
		"resume": func(p process) error { return s.signal(p, syscall.SIGCONT) },
	}[command]
	if !ok || len(names) == 0 {
		flags.Usage()
		return fmt.Errorf("unknown command, or no process named: %q", words)
	}
	for _, name := range names {
		p, err := s.find(name)
		if err != nil {
			return err
		}
		if err := act(p); err != nil {
			return fmt.Errorf("%s %s: %w", command, name, err)
		}
	}
	return nil
}
