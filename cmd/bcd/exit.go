package main

import (
	"context"
	"errors"

	"github.com/better-compute/join-operator/agent"
	"github.com/better-compute/join-operator/agent/state"
)

// Exit codes. They are an interface: docs/bcd.md lists them, scripts use them.
const (
	exitOK          = 0
	exitFailed      = 1
	exitUsage       = 2
	exitPending     = 3
	exitRefused     = 4
	exitUnavailable = 5
	exitUntrusted   = 6
	exitDamaged     = 7
	exitLocked      = 8
	exitExpired     = 9
	exitNotJoined   = 10
	exitInterrupted = 130
)

// usageError is a command line that cannot be carried out.
type usageError string

func (e usageError) Error() string { return string(e) }

// localError is something wrong on this machine rather than in an exchange.
type localError struct{ error }

func (e localError) Unwrap() error { return e.error }

// shownError has been printed already.
type shownError struct{ error }

func (e shownError) Unwrap() error { return e.error }

// codedError is a status that is no failure, only an exit code.
type codedError struct{ code int }

func (e codedError) Error() string { return outcome(e.code) }

// errNotJoined is what status ends with before a machine has joined.
var errNotJoined = errors.New("this machine has not joined")

// exitCode sorts an error: a signed answer first, then what endpoints said, then
// that nothing usable came.
func exitCode(err error) int {
	if coded, ok := errors.AsType[codedError](err); ok {
		return coded.code
	}
	switch {
	case is[usageError](err), errors.Is(err, agent.ErrNoBundle):
		return exitUsage
	case errors.Is(err, context.Canceled):
		return exitInterrupted
	case errors.Is(err, state.ErrLocked):
		return exitLocked
	case is[*state.DamagedError](err):
		return exitDamaged
	case is[*agent.ExpiredError](err):
		return exitExpired
	case is[*agent.PendingError](err):
		return exitPending
	case errors.Is(err, errNotJoined):
		return exitNotJoined
	case is[localError](err), is[*agent.LocalError](err):
		return exitFailed
	case agent.IsRefused(err):
		return exitRefused
	case agent.IsUntrusted(err):
		return exitUntrusted
	default:
		return exitUnavailable
	}
}

// outcome is the exit code's name in JSON.
func outcome(code int) string {
	switch code {
	case exitOK:
		return "joined"
	case exitUsage:
		return "usage"
	case exitPending:
		return "pending"
	case exitRefused:
		return "refused"
	case exitUnavailable:
		return "unavailable"
	case exitUntrusted:
		return "untrusted"
	case exitDamaged:
		return "damaged"
	case exitLocked:
		return "locked"
	case exitExpired:
		return "expired"
	case exitNotJoined:
		return "not-joined"
	case exitInterrupted:
		return "interrupted"
	default:
		return "failed"
	}
}

func is[E error](err error) bool {
	_, ok := errors.AsType[E](err)
	return ok
}
