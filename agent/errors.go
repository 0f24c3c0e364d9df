package agent

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/better-compute/join-operator/api/wire"
)

// PendingError says that a person has to decide. It comes from a signed answer.
type PendingError struct {
	JoinRequest string
	// Tenant is the request's namespace where the answer named it.
	Tenant     string
	RetryAfter time.Duration
}

func (e *PendingError) Error() string {
	return "waiting for a person to decide join request " + e.JoinRequest
}

// ProblemError is a problem that an endpoint answered (RFC 9457). It is not
// signed, so it is never final.
type ProblemError struct {
	Status int
	Code   wire.Code
	// Detail is printable ASCII of limited length.
	Detail string
	// RetryAfter is zero where the answer named none.
	RetryAfter time.Duration
}

func (e *ProblemError) Error() string {
	text := e.Code.Title()
	if e.Code == "" {
		text = fmt.Sprintf("HTTP status %d", e.Status)
	}
	if e.Detail != "" {
		text += ": " + e.Detail
	}
	return text
}

// Refused reports whether the service turned the join down as it stands, rather
// than being unable to decide. It cannot be told from a liar's word, so a machine
// goes on asking.
func (e *ProblemError) Refused() bool {
	switch e.Code {
	case wire.AccessDenied, wire.Unsupported, wire.InvalidInput, wire.TooLarge:
		return true
	default:
		return false
	}
}

// UntrustedError says that an answer arrived which does not stand up to the
// pinned bundle and this machine's own request.
type UntrustedError struct{ Err error }

func (e *UntrustedError) Error() string { return "untrusted answer: " + e.Err.Error() }
func (e *UntrustedError) Unwrap() error { return e.Err }

// ExpiredError says that the stored certificate ran out.
type ExpiredError struct{ NotAfter time.Time }

func (e *ExpiredError) Error() string {
	return "the certificate ran out at " + e.NotAfter.UTC().Format(time.RFC3339)
}

// Summary is an error in one line, however many endpoints it tells of.
func Summary(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

// printable cuts what somebody else wrote down to what is safe in a terminal.
func printable(s string, limit int) string {
	s = strings.Map(func(r rune) rune {
		if r < 0x20 || r > 0x7e {
			return -1
		}
		return r
	}, s)
	return s[:min(len(s), limit)]
}

// LocalError says that something on this machine, not in what was answered, kept
// it from joining: its disk or its evidence.
type LocalError struct{ Err error }

func (e *LocalError) Error() string { return e.Err.Error() }
func (e *LocalError) Unwrap() error { return e.Err }

// IsRefused reports whether an endpoint said that the service turned the join
// down.
func IsRefused(err error) bool {
	p, ok := errors.AsType[*ProblemError](err)
	return ok && p.Refused()
}

// IsUntrusted reports whether an endpoint could not show that it may be believed:
// by its certificate or by its answer.
func IsUntrusted(err error) bool {
	_, ok := errors.AsType[*UntrustedError](err)
	return ok || unverifiedTLS(err)
}
