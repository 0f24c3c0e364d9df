package joinrequest

import (
	"strings"
	"time"

	"github.com/better-compute/join-operator/api/v1alpha1"
)

// How long things are kept, by the database's time.
const (
	// undecidedFor is how long a request waits after its machine last asked.
	undecidedFor = 24 * time.Hour
	// decidedFor is how long an approval waits to be used, and how long a
	// rejection is remembered.
	decidedFor = 7 * 24 * time.Hour
	// shownFor is how long an object is shown after its request ended.
	shownFor = time.Hour
)

// What a request ended as.
const (
	endedJoined     = "Joined"
	endedExpired    = "Expired"
	endedSuperseded = "Superseded"
)

// namePrefix and the row's id make the name of the object.
const namePrefix = "jr-"

// nameOf returns the name of the object of a row.
func nameOf(id string) string { return namePrefix + id }

// idOf returns the id that an object's name speaks of. What it returns for a
// name of another kind is no row's id.
func idOf(name string) string { return strings.TrimPrefix(name, namePrefix) }

// row is a request as the database has it.
type row struct {
	id           string
	namespace    string
	attestorType string
	spec         []byte // JSON of a JoinRequestAsk
	specSHA256   []byte
	capped       bool
	objectUID    string
	lastAskedAt  time.Time
	others       int32

	verdict       v1alpha1.Verdict // "" while undecided
	decidedBy     string           // username
	decidedAt     time.Time
	decidedPool   string
	decidedTenant string

	ended      string // "" while it lives
	endedAt    time.Time
	nodeID     string
	nodeTenant string

	// now is the database's time when the row was read.
	now time.Time
}

// deadline is when a live request ends by itself.
func (r *row) deadline() time.Time {
	if r.verdict == "" {
		return r.lastAskedAt.Add(undecidedFor)
	}
	return r.decidedAt.Add(decidedFor)
}

// due reports whether a live request has come to its deadline.
func (r *row) due() bool { return r.ended == "" && !r.now.Before(r.deadline()) }

// over is when nothing more happened that a person waits for, and false while
// something may. A rejection lives on as a memory, but is over.
func (r *row) over() (time.Time, bool) {
	switch {
	case r.ended != "" && r.verdict == v1alpha1.VerdictRejected:
		return r.decidedAt, true
	case r.ended != "":
		return r.endedAt, true
	case r.verdict == v1alpha1.VerdictRejected:
		return r.decidedAt, true
	}
	return time.Time{}, false
}
