package main

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/test/machine"
)

// joiner is a machine that has not joined yet: everything that a real one has on disk.
type joiner struct {
	*machine.Machine
	token string
}

func makeJoiners(n int, tokens []string) ([]joiner, error) {
	joiners := make([]joiner, n)
	var g errgroup.Group
	g.SetLimit(runtime.NumCPU())
	for i := range joiners {
		g.Go(func() error {
			m, err := machine.New()
			joiners[i] = joiner{m, tokens[i%len(tokens)]}
			return err
		})
	}
	return joiners, g.Wait()
}

// join does one join over a connection of its own and verifies the answer.
func (j joiner) join(ctx context.Context, t *machine.Target) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	a, err := t.JoinToken(ctx, j.Machine, j.token)
	if err != nil {
		return err
	}
	if a.Outcome != wire.OutcomeJoined {
		return fmt.Errorf("the answer says %q", a.Outcome)
	}
	return nil
}
