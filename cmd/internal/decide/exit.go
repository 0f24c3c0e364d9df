package decide

import "errors"

// Exit codes of both plugins.
const (
	ExitDone      = 0 // every request that was named is decided as asked
	ExitFailed    = 1 // at least one is not, for another reason or for several
	ExitUsage     = 2 // the command's words are off, or it may not ask
	ExitForbidden = 3 // a right is missing, or a policy forbids it
	ExitConflict  = 4 // the request changed since it was shown, or is decided the other way
)

const exitCodes = "Exit codes: 0 done, 1 failed (or several requests failed for different reasons), 2 usage,\n" +
	"3 forbidden, 4 the request changed since it was shown or is decided the other way."

// usageError is a command whose words are off.
type usageError struct{ error }

// forbiddenError names the right that is missing.
type forbiddenError struct{ error }

// conflictError is a request that is not what was shown.
type conflictError struct{ error }

func (e usageError) Unwrap() error     { return e.error }
func (e forbiddenError) Unwrap() error { return e.error }
func (e conflictError) Unwrap() error  { return e.error }

// exitCode is the exit code of an error of the command. Where several requests failed
// for different reasons none of them speaks for all.
func exitCode(err error) int {
	code := ExitDone
	for _, e := range each(err) {
		switch c := codeOf(e); {
		case code == ExitDone:
			code = c
		case code != c:
			return ExitFailed
		}
	}
	return code
}

func codeOf(err error) int {
	if _, ok := errors.AsType[usageError](err); ok {
		return ExitUsage
	}
	if _, ok := errors.AsType[forbiddenError](err); ok {
		return ExitForbidden
	}
	if _, ok := errors.AsType[conflictError](err); ok {
		return ExitConflict
	}
	return ExitFailed
}
