package attestors

import (
	"errors"
	"fmt"
	"regexp"
)

// Refusal is the error of evidence that was not good enough. The machine learns
// nothing of it but that it was refused; the reason stays on the server.
type Refusal struct {
	// Reason is [a-z0-9-]{1,40}.
	Reason string
	// Tenant is set only once the evidence authenticated it, as a token's secret
	// or a signature does: the refusal's event then lands in its stream.
	Tenant string
	// Detail is for the operator: which object, what was wanted, what came. It
	// holds no secret and no evidence.
	Detail string
}

var reasonPattern = regexp.MustCompile(`^[a-z0-9-]{1,40}$`)

// Refuse makes a refusal. A reason that is not [a-z0-9-]{1,40} is a bug of the
// attestor's and panics.
func Refuse(reason string) *Refusal {
	if !reasonPattern.MatchString(reason) {
		panic(fmt.Sprintf("attestors: reason %q does not match %s", reason, reasonPattern))
	}
	return &Refusal{Reason: reason}
}

// InTenant says that the evidence authenticated the tenant.
func (r *Refusal) InTenant(tenant string) *Refusal {
	c := *r
	c.Tenant = tenant
	return &c
}

// Because adds what an operator needs to mend it.
func (r *Refusal) Because(format string, args ...any) *Refusal {
	c := *r
	c.Detail = fmt.Sprintf(format, args...)
	return &c
}

func (r *Refusal) Error() string { return "refused: " + r.Reason }

// AsRefusal finds a refusal in an error's chain.
func AsRefusal(err error) (*Refusal, bool) {
	return errors.AsType[*Refusal](err)
}
