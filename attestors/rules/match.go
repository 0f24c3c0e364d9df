package rules

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"

	"cel.dev/cel-go/common/types"
	"cel.dev/cel-go/interpreter"

	"github.com/better-compute/join-operator/attestors"
)

// Reasons of refusals.
const (
	// ReasonNoRule: none of the rules matches.
	ReasonNoRule = "no-rule"
	// ReasonRuleError: a rule errs or costs too much, or what was verified is more
	// than rules look at.
	ReasonRuleError = "rule-error"
)

// Match finds the first rule that is true of what was verified. Where there is
// none, and where a rule before it fails, the error is a refusal; its detail names
// the rule, and nothing that a machine sent.
func (s *Set) Match(ctx context.Context, values map[string]any) (*Rule, error) {
	if m := s.variables.check(values); m != nil {
		if m.bug {
			return nil, m
		}
		return nil, attestors.Refuse(ReasonRuleError).Because("what was verified is too large for rules: %s", m)
	}
	for i := range s.rules {
		r := &s.rules[i]
		matches, err := r.matches(ctx, values)
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case err != nil:
			return nil, attestors.Refuse(ReasonRuleError).Because("rule %q (spec.rules[%d].when): %s", r.Name, r.index, err)
		case matches:
			rule := r.Rule
			return &rule, nil
		}
	}
	return nil, attestors.Refuse(ReasonNoRule).Because("none of the %d rules matches what was verified", len(s.rules))
}

// matches evaluates one rule.
func (c *compiled) matches(ctx context.Context, values map[string]any) (bool, error) {
	out, _, err := c.program.ContextEval(ctx, values)
	if err != nil {
		return false, c.failure(err)
	}
	matches, ok := out.(types.Bool)
	if !ok {
		return false, errors.New("it is not true or false")
	}
	return bool(matches), nil
}

// failure says what went wrong and where. CEL's own words may quote what a machine
// sent, so they are not repeated.
func (c *compiled) failure(err error) error {
	var cancelled interpreter.EvalCancelledError
	if errors.As(err, &cancelled) && cancelled.Cause == interpreter.CostLimitExceeded {
		return fmt.Errorf("it costs more than %d", maxRuleCost)
	}
	var e *types.Err
	if errors.As(err, &e) {
		if at := c.source.GetStartLocation(e.NodeID()); at != nil && at.Line() > 0 {
			return fmt.Errorf("it fails at %s: what it speaks of is not there (ask first: 'key' in facts), or not of that form", position(at.Line(), at.Column()))
		}
	}
	return errors.New("it fails: what it speaks of is not there (ask first: 'key' in facts), or not of that form")
}

// Apply wraps an attestor so that rules say where the machines that it admits
// belong: tenant, pool and site are the first matching rule's, whatever the
// attestor says. Challenges, refusals and errors are passed on.
func Apply(a *attestors.Attestor, s *Set) (*attestors.Attestor, error) {
	spec := a.Spec()
	verify := spec.Verify
	spec.Verify = func(ctx context.Context, ev attestors.Evidence, jc *attestors.JoinContext) (attestors.Outcome, error) {
		out, err := verify(ctx, ev, jc)
		if err != nil {
			return out, err
		}
		switch o := out.(type) {
		case *attestors.Admit:
			assigned, err := s.assign(ctx, o)
			if err != nil {
				return nil, err
			}
			return assigned, nil
		case *attestors.Pending:
			if o.Would == nil {
				return out, nil // the service says what is wrong with it
			}
			would, err := s.assign(ctx, o.Would)
			if err != nil {
				return nil, err
			}
			return &attestors.Pending{Would: would}, nil
		}
		return out, nil
	}
	return attestors.Define(spec)
}

// assign is what is admitted, where the rules send it.
func (s *Set) assign(ctx context.Context, a *attestors.Admit) (*attestors.Admit, error) {
	values := map[string]any{
		FactsVariable: a.Facts, RoleVariable: string(a.Role), HardwareKeyVariable: hex.EncodeToString(a.HardwareKey),
	}
	for name, value := range a.Verified {
		if _, taken := values[name]; taken {
			return nil, &misfit{name, "it is every attestor's", true}
		}
		values[name] = value
	}
	rule, err := s.Match(ctx, values)
	if err != nil {
		return nil, err
	}
	assigned := *a
	assigned.Tenant, assigned.Pool, assigned.Site = rule.Tenant, rule.Pool, rule.Site
	return &assigned, nil
}
