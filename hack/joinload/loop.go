package main

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/better-compute/join-operator/test/machine"
)

// outcome is one join as its machine saw it.
type outcome struct {
	took time.Duration
	err  error
}

// closedLoop keeps a number of machines joining at once.
func closedLoop(ctx context.Context, t *machine.Target, machines []joiner, concurrency int) []outcome {
	outcomes := make([]outcome, len(machines))
	var next atomic.Int64
	var wg sync.WaitGroup
	for range concurrency {
		wg.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= len(machines) {
					return
				}
				outcomes[i] = timed(ctx, t, machines[i], time.Now())
			}
		})
	}
	wg.Wait()
	return outcomes
}

// openLoop begins joins at a rate, whatever is still under way. A join's time
// counts from when it was due, so that a stall is seen by all who wait behind it.
func openLoop(ctx context.Context, t *machine.Target, machines []joiner, rate float64) []outcome {
	outcomes := make([]outcome, len(machines))
	began := time.Now()
	var wg sync.WaitGroup
	for i := range machines {
		due := began.Add(time.Duration(float64(i) / rate * float64(time.Second)))
		time.Sleep(time.Until(due))
		wg.Go(func() { outcomes[i] = timed(ctx, t, machines[i], due) })
	}
	wg.Wait()
	return outcomes
}

func timed(ctx context.Context, t *machine.Target, m joiner, from time.Time) outcome {
	err := m.join(ctx, t)
	return outcome{took: time.Since(from), err: err}
}
