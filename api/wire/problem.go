package wire

import "net/http"

// Code is the machine-readable kind of a problem.
type Code string

// The codes of protocol 1 and the only ones that are ever sent.
const (
	AccessDenied     Code = "ACCESS_DENIED"
	Unsupported      Code = "UNSUPPORTED"
	InvalidInput     Code = "INVALID_INPUT"
	StaleBundle      Code = "STALE_BUNDLE"
	NotFound         Code = "NOT_FOUND"
	MethodNotAllowed Code = "METHOD_NOT_ALLOWED"
	TooLarge         Code = "TOO_LARGE"
	RateLimited      Code = "RATE_LIMITED"
	Unavailable      Code = "UNAVAILABLE"
	Internal         Code = "INTERNAL"
)

// Problem is every answer that is not 200 or 204: RFC 9457 problem details. It
// is not signed, so a machine never takes it as final.
type Problem struct {
	Status int    `json:"status"`
	Title  string `json:"title"`
	Code   Code   `json:"code"`
	Detail string `json:"detail,omitempty"`
}

// Status is the HTTP status of a code.
func (c Code) Status() int {
	switch c {
	case AccessDenied:
		return http.StatusForbidden
	case Unsupported, InvalidInput, StaleBundle:
		return http.StatusBadRequest
	case NotFound:
		return http.StatusNotFound
	case MethodNotAllowed:
		return http.StatusMethodNotAllowed
	case TooLarge:
		return http.StatusRequestEntityTooLarge
	case RateLimited:
		return http.StatusTooManyRequests
	case Unavailable:
		return http.StatusServiceUnavailable
	default:
		return http.StatusInternalServerError
	}
}

// Title is the short text of a code. That of AccessDenied is all that a machine
// ever learns of a refusal.
func (c Code) Title() string {
	switch c {
	case AccessDenied:
		return "Join refused"
	case Unsupported:
		return "Attestor not supported"
	case InvalidInput:
		return "Invalid input"
	case StaleBundle:
		return "Sealed to an unknown key"
	case NotFound:
		return "Not found"
	case MethodNotAllowed:
		return "Method not allowed"
	case TooLarge:
		return "Body too large"
	case RateLimited:
		return "Too many requests"
	case Unavailable:
		return "Temporarily unavailable"
	default:
		return "Internal error"
	}
}

// Problem is the body of a code. Detail may be empty and must be for AccessDenied.
func (c Code) Problem(detail string) Problem {
	return Problem{Status: c.Status(), Title: c.Title(), Code: c, Detail: detail}
}
