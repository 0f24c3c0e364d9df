package httpapi

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/better-compute/join-operator/api/wire"
)

const (
	// pollBundles is how soon a new generation is served.
	pollBundles = time.Second
	// bundlesAtOnce bounds one reading.
	bundlesAtOnce = 64

	bundlesSQL = `SELECT generation, payload, jws FROM bundles WHERE generation > $1 ORDER BY generation LIMIT $2`
)

// Bundles is all generations of the join bundle, kept in memory: they are few, are
// asked for by every machine, and must be had while the database is away.
type Bundles struct {
	db      *pgxpool.Pool
	log     *slog.Logger
	current atomic.Pointer[published]
}

// published is the generations up to one. It does not change.
type published struct {
	payload []byte
	sha256  string
	// links are the signed bundles; generation g is at g-1.
	links []string
}

// NewBundles makes an empty one; Run fills it.
func NewBundles(db *pgxpool.Pool, log *slog.Logger) *Bundles { return &Bundles{db: db, log: log} }

// Run reads generations as they are published, until ctx ends.
func (b *Bundles) Run(ctx context.Context) {
	tick := time.NewTicker(pollBundles)
	defer tick.Stop()
	failing := false
	for {
		err := b.refresh(ctx)
		if err != nil && ctx.Err() == nil && !failing {
			b.log.Warn("the join bundle could not be read; the last one stays", "error", err)
		}
		failing = err != nil
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (b *Bundles) refresh(ctx context.Context) error {
	for {
		more, err := b.read(ctx)
		if err != nil || !more {
			return err
		}
	}
}

// read adds the next generations and reports whether there may be more.
func (b *Bundles) read(ctx context.Context) (more bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	next := published{}
	if now := b.current.Load(); now != nil {
		next = *now
	}
	before := len(next.links)
	rows, err := b.db.Query(ctx, bundlesSQL, before, bundlesAtOnce)
	if err != nil {
		return false, fmt.Errorf("read bundles: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		var generation int
		var payload []byte
		var jws string
		if err := rows.Scan(&generation, &payload, &jws); err != nil {
			return false, fmt.Errorf("read bundles: %w", err)
		}
		if generation != len(next.links)+1 {
			return false, fmt.Errorf("generation %d of the bundle follows generation %d", generation, len(next.links))
		}
		// The shared array grows behind what readers of the old slice see.
		next.links = append(next.links, jws)
		next.payload = payload
	}
	if err := rows.Err(); err != nil {
		return false, fmt.Errorf("read bundles: %w", err)
	}
	if len(next.links) == before {
		return false, nil
	}
	sum := sha256.Sum256(next.payload)
	next.sha256 = hex.EncodeToString(sum[:])
	b.current.Store(&next)
	b.log.Info("serving a new join bundle", "generation", len(next.links), "sha256", next.sha256)
	return len(next.links)-before == bundlesAtOnce, nil
}

func (b *Bundles) newest() *published { return b.current.Load() }

// SHA256 is the lower-case hexadecimal SHA-256 of the newest bundle's bytes, or
// empty where there is none.
func (b *Bundles) SHA256() string {
	if p := b.current.Load(); p != nil {
		return p.sha256
	}
	return ""
}

// after is the links that follow a generation, at most a page.
func (b *Bundles) after(generation int) []string {
	p := b.current.Load()
	if p == nil || generation >= len(p.links) {
		return []string{}
	}
	return p.links[generation:min(len(p.links), generation+wire.MaxRotations)]
}
