package fleetnode

import "sync/atomic"

// DefaultObjectLimit is how many FleetNodes are made in a whole cluster: etcd
// holds some 100,000 objects well.
const DefaultObjectLimit = 50_000

// Budget counts the FleetNodes of the cluster. It is nearly right between two
// full passes, which count anew.
type Budget struct {
	limit int64
	made  atomic.Int64
}

// NewBudget makes a budget of at most limit objects; zero takes the default.
func NewBudget(limit int64) *Budget {
	if limit <= 0 {
		limit = DefaultObjectLimit
	}
	return &Budget{limit: limit}
}

// Full reports whether no further FleetNode is made.
func (b *Budget) Full() bool { return b.made.Load() >= b.limit }

// Limit is how many are made in the whole cluster.
func (b *Budget) Limit() int64 { return b.limit }

// take makes room for one more and reports whether there was any.
func (b *Budget) take() bool {
	if b.made.Add(1) > b.limit {
		b.made.Add(-1)
		return false
	}
	return true
}

func (b *Budget) give() { b.made.Add(-1) }

func (b *Budget) set(n int64) { b.made.Store(n) }

func (b *Budget) room() int64 { return max(b.limit-b.made.Load(), 0) }
