package attestorset

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/better-compute/join-operator/attestors"
	"github.com/better-compute/join-operator/attestors/configured"
)

const (
	// poll is how soon a new version is in force.
	poll = time.Second
	// readTimeout bounds one look at the database.
	readTimeout = 5 * time.Second
	// maxError bounds what a replica tells of a version that it cannot build.
	maxError = 500
)

// Config is what a [Set] is made of. Metrics are optional.
type Config struct {
	// DB connects as join_service.
	DB *pgxpool.Pool
	// BuiltIn are the attestors that nobody has to configure. A configuration may
	// take the place of one of its own type.
	BuiltIn *attestors.Registry
	// Types are those that can be configured.
	Types configured.Types
	// Environment is lent to the attestors that are built.
	Environment attestors.Environment
	// Replica is the id of this replica's row.
	Replica string
	Logger  *slog.Logger
	Metrics prometheus.Registerer
}

// Set finds attestors. It may be used by many joins at once, and changes while they
// run: a join goes on with the attestor that it found.
type Set struct {
	cfg     Config
	current atomic.Pointer[map[string]entry]
	metrics metrics
	failing bool
}

// entry is what is known of one configuration.
type entry struct {
	// attestor is nil where no version of it could be built yet. Its name is then
	// nobody's: a built-in must not answer for a configuration that was to narrow it.
	attestor *attestors.Attestor
	// inForce is the version that attestor was built of, published the newest one.
	inForce, published int64
	// publishedAt tells versions apart that have one number: a database that was
	// restored gives numbers again. Microseconds since 1970.
	publishedAt int64
	// err says why the newest could not be built.
	err string
}

// New makes a set that finds nothing before Run read the configurations.
func New(cfg Config) (*Set, error) {
	if cfg.DB == nil || cfg.BuiltIn == nil || cfg.Logger == nil || cfg.Replica == "" {
		return nil, errors.New("attestorset: DB, BuiltIn, Logger and Replica are required")
	}
	s := &Set{cfg: cfg}
	if err := s.metrics.register(cfg.Metrics); err != nil {
		return nil, err
	}
	return s, nil
}

// Ready says why nothing is found yet, or nil.
func (s *Set) Ready() error {
	if s.current.Load() == nil {
		return errors.New("the configurations of attestors have not been read yet")
	}
	return nil
}

// Find returns the attestor that a machine names; empty names [attestors.DefaultID].
func (s *Set) Find(id string) (*attestors.Attestor, bool) {
	if id == "" {
		id = attestors.DefaultID
	}
	current := s.current.Load()
	if current == nil {
		return nil, false
	}
	if e, taken := (*current)[id]; taken {
		return e.attestor, e.attestor != nil
	}
	return s.cfg.BuiltIn.Find(id)
}

// Run follows the configurations until ctx ends. While the database is away, what
// was read last stays in force.
func (s *Set) Run(ctx context.Context) {
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for {
		err := s.refresh(ctx)
		if err != nil && ctx.Err() == nil && !s.failing {
			s.cfg.Logger.Warn("the configurations of attestors could not be read; the last ones stay in force", "error", err)
		}
		s.failing = err != nil
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// refresh reads what changed, builds it, puts it in force and says so.
func (s *Set) refresh(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	var before map[string]entry
	if now := s.current.Load(); now != nil {
		before = *now
	}
	read, err := readConfigs(ctx, s.cfg.DB, before)
	if err != nil {
		return err
	}
	after := make(map[string]entry, len(read))
	for _, c := range read {
		after[c.name] = s.next(before[c.name], c)
	}
	if s.current.Load() == nil || !maps.Equal(before, after) {
		s.current.Store(&after)
		s.tell(before, after)
	}
	return report(ctx, s.cfg.DB, s.cfg.Replica, after)
}

// next is what is known of a configuration after it was read.
func (s *Set) next(e entry, c config) entry {
	if c.spec == nil {
		return e
	}
	a, err := s.build(c)
	e.published, e.publishedAt, e.err = c.version, c.publishedAt, ""
	if err != nil {
		e.err = cut(err.Error(), maxError)
		return e
	}
	e.attestor, e.inForce = a, c.version
	return e
}

// build makes an attestor. One that panics is one that cannot be built.
func (s *Set) build(c config) (a *attestors.Attestor, err error) {
	defer func() {
		if p := recover(); p != nil {
			a, err = nil, fmt.Errorf("its type panicked: a value of type %T", p)
		}
	}()
	if a, err = s.cfg.Types.Build(c.name, c.version, c.spec, s.cfg.Environment); err != nil {
		return nil, err
	}
	if builtIn, taken := s.cfg.BuiltIn.Find(c.name); taken && builtIn.Type() != a.Type() {
		return nil, &attestors.FieldError{Field: "metadata.name", Reason: "it is the id of a built-in attestor of another type"}
	}
	return a, nil
}

// tell says what changed.
func (s *Set) tell(before, after map[string]entry) {
	for name, e := range after {
		was := before[name]
		s.metrics.set(name, e)
		switch {
		case e == was:
		case e.err != "":
			s.cfg.Logger.Error("a configuration of an attestor cannot be built; the last one that could stays in force",
				"attestor", name, "version", e.published, "inForce", e.inForce, "error", e.err)
		default:
			s.cfg.Logger.Info("an attestor was configured", "attestor", name, "version", e.inForce)
		}
	}
	for name := range before {
		if _, stays := after[name]; !stays {
			s.metrics.drop(name)
			s.cfg.Logger.Info("the configuration of an attestor was withdrawn", "attestor", name)
		}
	}
}

// cut shortens a text to n bytes, at a character's end.
func cut(s string, n int) string {
	for i := range s {
		if i > n {
			return s[:i]
		}
	}
	return s
}
