// Command shared starts a Postgres server for the command that is its arguments,
// which finds it by JOIN_TEST_POSTGRES. The server ends with this process.
package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"

	"github.com/better-compute/join-operator/test/pgtest"
)

func main() {
	code, err := run(os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "shared:", err)
		code = 1
	}
	os.Exit(code)
}

func run(command []string) (int, error) {
	if len(command) == 0 {
		return 0, errors.New("no command given")
	}
	url, err := pgtest.StartShared()
	if err != nil {
		return 0, err
	}
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Env = append(os.Environ(), pgtest.URLVariable+"="+url)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	err = cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return exit.ExitCode(), nil
	}
	return 0, err
}
