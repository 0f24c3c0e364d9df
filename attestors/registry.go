package attestors

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
)

// Module is a part of a program that brings attestors of its own.
type Module interface {
	Attestors() []*Attestor
}

// Registry holds the attestors of one service by id. It does not change once made.
type Registry struct {
	byID map[string]*Attestor
}

// DefaultID is the attestor of a join that names none.
const DefaultID = "join-token"

// NewRegistry collects attestors from a list of anything that extends the
// service: attestors, slices of such, and each [Module]; what is none of these is
// skipped. Two attestors with one id are an error. The built-in, if given, fills
// the place of its id unless the list brings one.
func NewRegistry(builtin *Attestor, extensions ...any) (*Registry, error) {
	r := &Registry{byID: map[string]*Attestor{}}
	if err := r.add(extensions); err != nil {
		return nil, err
	}
	if builtin != nil {
		if _, taken := r.byID[builtin.ID()]; !taken {
			r.byID[builtin.ID()] = builtin
		}
	}
	return r, nil
}

func (r *Registry) add(extensions []any) error {
	for _, e := range extensions {
		switch v := e.(type) {
		case []any:
			if err := r.add(v); err != nil {
				return err
			}
		case []*Attestor:
			for _, a := range v {
				if err := r.put(a); err != nil {
					return err
				}
			}
		case *Attestor:
			if err := r.put(v); err != nil {
				return err
			}
		case Module:
			if p := reflect.ValueOf(v); p.Kind() == reflect.Pointer && p.IsNil() {
				continue
			}
			if err := r.add([]any{v.Attestors()}); err != nil {
				return err
			}
		}
	}
	return nil
}

func (r *Registry) put(a *Attestor) error {
	if a == nil || a.spec.Verify == nil {
		return nil
	}
	if _, taken := r.byID[a.ID()]; taken {
		return fmt.Errorf("two attestors have the id %q", a.ID())
	}
	r.byID[a.ID()] = a
	return nil
}

// Find returns the attestor that a machine names; empty names [DefaultID].
func (r *Registry) Find(id string) (*Attestor, bool) {
	if id == "" {
		id = DefaultID
	}
	a, ok := r.byID[id]
	return a, ok
}

// IDs lists the registered ids in order.
func (r *Registry) IDs() []string { return slices.Sorted(maps.Keys(r.byID)) }
