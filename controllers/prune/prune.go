// Package prune deletes rows that nobody needs any more, in short transactions
// that skip what others hold, so that no join ever waits for it.
package prune

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
)

// Defaults of Options.
const (
	DefaultBatch        = 5000
	DefaultEvery        = 10 * time.Minute
	DefaultEvents       = 7 * 24 * time.Hour
	DefaultRefusals     = time.Hour
	DefaultRequests     = 7 * 24 * time.Hour
	DefaultReplicas     = 24 * time.Hour
	DefaultCertificates = 365 * 24 * time.Hour
)

// Options say how long rows are kept after they ended. Zero takes the default.
type Options struct {
	// Batch bounds one transaction.
	Batch int
	// Every is the pause between two rounds.
	Every time.Duration
	// Events are kept this long after every follower has read them.
	Events time.Duration
	// Refusals is how long the windows that bound refusal events are kept.
	Refusals time.Duration
	// Requests are kept this long after they ended; a rejection is remembered for
	// as long.
	Requests time.Duration
	// Replicas are forgotten this long after they were last seen.
	Replicas time.Duration
	// Certificates that were replaced are kept this long after they ran out. A
	// node's newest is kept for ever: a machine that was off for two years is still
	// known.
	Certificates time.Duration
}

// Pruner deletes rows, on the leader only. Add it to a manager.
type Pruner struct {
	db     *pgxpool.Pool
	opts   Options
	log    *slog.Logger
	pruned *prometheus.CounterVec
}

// New makes a pruner; metrics are registered with reg unless it is nil.
func New(db *pgxpool.Pool, o Options, log *slog.Logger, reg prometheus.Registerer) (*Pruner, error) {
	if o.Batch == 0 {
		o.Batch = DefaultBatch
	}
	for field, value := range map[*time.Duration]time.Duration{
		&o.Every: DefaultEvery, &o.Events: DefaultEvents, &o.Refusals: DefaultRefusals,
		&o.Requests: DefaultRequests, &o.Replicas: DefaultReplicas, &o.Certificates: DefaultCertificates,
	} {
		if *field == 0 {
			*field = value
		}
	}
	p := &Pruner{db: db, opts: o, log: log, pruned: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "join_pruned_rows_total", Help: "Rows that ended and were deleted, by table.",
	}, []string{"table"})}
	if reg != nil {
		if err := reg.Register(p.pruned); err != nil {
			return nil, fmt.Errorf("register metrics: %w", err)
		}
	}
	return p, nil
}

// NeedLeaderElection is true: one pruner is enough.
func (p *Pruner) NeedLeaderElection() bool { return true }

// Start prunes until ctx ends.
func (p *Pruner) Start(ctx context.Context) error {
	for {
		if err := p.Round(ctx); err != nil && ctx.Err() == nil {
			p.log.WarnContext(ctx, "pruning stopped early; it goes on in the next round", "error", err)
		}
		select {
		case <-time.After(p.opts.Every):
		case <-ctx.Done():
			return nil
		}
	}
}

// Round deletes all that has ended by now, batch after batch.
func (p *Pruner) Round(ctx context.Context) error {
	for _, q := range p.queries() {
		for {
			tag, err := p.db.Exec(ctx, q.sql, q.keep, p.opts.Batch)
			if err != nil {
				return fmt.Errorf("prune %s: %w", q.table, err)
			}
			p.pruned.WithLabelValues(q.table).Add(float64(tag.RowsAffected()))
			if tag.RowsAffected() < int64(p.opts.Batch) {
				break
			}
		}
	}
	return nil
}
