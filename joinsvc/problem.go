package joinsvc

import (
	"fmt"
	"time"

	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/attestors"
)

// Problem is an answer that is neither a signed one nor a refusal. Detail is safe
// to show to a machine.
type Problem struct {
	Code       wire.Code
	Detail     string
	RetryAfter time.Duration
	// Cause is for the log alone.
	Cause error
}

func (p *Problem) Error() string {
	text := string(p.Code)
	if p.Detail != "" {
		text += ": " + p.Detail
	}
	if p.Cause != nil {
		text += ": " + p.Cause.Error()
	}
	return text
}

func (p *Problem) Unwrap() error { return p.Cause }

// retryUnavailable is when a machine that met an outage comes again; it adds jitter.
const retryUnavailable = 5 * time.Second

func unavailable(cause error) *Problem {
	return &Problem{Code: wire.Unavailable, RetryAfter: retryUnavailable, Cause: cause}
}

// RefusedJoin is the error of a join, or of a confirmation, that was refused. It
// unwraps to its [attestors.Refusal]. A machine learns nothing of it; hand it to
// [Service.RecordRefusal] once the answer has left.
type RefusedJoin struct {
	Refusal *attestors.Refusal
	// Attestor is the id of the attestor whose join it was; "join" for what no
	// attestor has a part in.
	Attestor  string
	CSRSHA256 [32]byte
	// HardwareKeySHA256 is as the machine claimed it, "" where that is no hash.
	HardwareKeySHA256 string
	// TokenID is the public part of the token that was shown, if any.
	TokenID string
	// Reclaim is set where a known machine asked to become what its node is not.
	Reclaim *ReclaimRefused
}

// ReclaimRefused is what a node is and what a machine that proved to be it asked for.
type ReclaimRefused struct {
	NodeID, Tenant string
	Wanted, Has    Place
}

// Place is what of a node never changes by a join.
type Place struct {
	Tenant string    `json:"tenant"`
	Role   wire.Role `json:"role"`
	Pool   string    `json:"pool"`
	Site   string    `json:"site,omitempty"`
}

// Reason is what is recorded: "<attestor>:<reason>".
func (r *RefusedJoin) Reason() string { return r.Attestor + ":" + r.Refusal.Reason }

func (r *RefusedJoin) Error() string {
	if r.Refusal.Detail == "" {
		return "refused " + r.Reason()
	}
	return fmt.Sprintf("refused %s: %s", r.Reason(), r.Refusal.Detail)
}

func (r *RefusedJoin) Unwrap() error { return r.Refusal }
