package fleetnode

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/controllers/conditions"
)

const (
	stateAdopting = "adopting"
	stateActive   = "active"
	stateRetired  = "retired"

	// unattested stands for the statement of a key that nobody made one about.
	unattested = "unattested"

	// lastSeenGrain is how coarse lastSeenAt is: finer would write every object
	// all the time.
	lastSeenGrain = 6 * time.Hour

	maxFacts    = 32
	maxFactSize = 256
)

// report writes the row into the status.
func (r *Reconciler) report(fn *v1alpha1.FleetNode, n *node) {
	s := &fn.Status
	s.Role, s.Pool, s.Site, s.Attestor = v1alpha1.Role(n.role), n.pool, n.site, n.attestor
	s.NodeKey = n.nodeKeyURI
	if s.NodeKey == "" {
		s.NodeKey = unattested
	}
	s.Certificate = nil
	if n.cert != nil {
		s.Certificate = &v1alpha1.NodeCertificate{SerialNumber: n.cert.serial, NotAfter: seconds(n.cert.notAfter), Role: v1alpha1.Role(n.cert.role)}
	}
	s.Facts = printable(n.facts)
	joined := seconds(n.createdAt)
	s.JoinedAt = &joined
	if n.lastSeenAt != nil && (s.LastSeenAt == nil || n.lastSeenAt.Sub(s.LastSeenAt.Time).Abs() >= lastSeenGrain) {
		seen := seconds(*n.lastSeenAt)
		s.LastSeenAt = &seen
	}
	switch n.state {
	case stateAdopting:
		s.State = v1alpha1.NodeAdopting
		of(fn).False(v1alpha1.ConditionReady, v1alpha1.ReasonAdopting, "it has its certificate and has not said yet that it stored it")
	case stateActive:
		s.State = v1alpha1.NodeActive
		of(fn).True(v1alpha1.ConditionReady, v1alpha1.ReasonActive, "the node is in the fleet")
	case stateRetired:
		s.State = v1alpha1.NodeRetired
		of(fn).False(v1alpha1.ConditionReady, v1alpha1.ReasonRetired, "the node is retired: its certificates are revoked, and the machine's next join waits for a person")
	}
	setConflicted(fn, n)
	setReclaimRefused(fn, n)
}

func setConflicted(fn *v1alpha1.FleetNode, n *node) {
	if n.conflictedAt == nil {
		of(fn).Drop(v1alpha1.ConditionConflicted)
		return
	}
	message := fmt.Sprintf("at %s a second machine used this node's identity: find out which is the right one, delete the FleetNode and let that machine join anew",
		n.conflictedAt.UTC().Format(time.RFC3339))
	of(fn).True(v1alpha1.ConditionConflicted, v1alpha1.ReasonConflict, "%s", message)
	if n.state != stateRetired {
		of(fn).False(v1alpha1.ConditionReady, v1alpha1.ReasonConflict, "%s", message)
	}
}

// setReclaimRefused shows the newest refusal. One whose event was pruned stays
// until the node joins again.
func setReclaimRefused(fn *v1alpha1.FleetNode, n *node) {
	has := of(fn).Find(v1alpha1.ConditionReclaimRefused)
	if n.reclaimRefused == nil {
		if has != nil && !strings.HasSuffix(has.Message, refusedUnder(n)) {
			of(fn).Drop(v1alpha1.ConditionReclaimRefused)
		}
		return
	}
	var d struct {
		Wanted json.RawMessage `json:"wanted"`
		Has    json.RawMessage `json:"has"`
	}
	_ = json.Unmarshal(n.reclaimRefused, &d) // what does not parse is shown empty
	of(fn).True(v1alpha1.ConditionReclaimRefused, v1alpha1.ConditionReclaimRefused,
		"the machine came back for %s and the node has %s: a reclaim changes neither tenant, site, pool nor role; change spec.pool or spec.site, or delete the FleetNode; %s",
		short(d.Wanted), short(d.Has), refusedUnder(n))
}

// refusedUnder names the certificate that was the newest when a reclaim was
// refused.
func refusedUnder(n *node) string {
	if n.cert == nil {
		return "without a certificate"
	}
	return "certificate " + n.cert.serial
}

func short(raw json.RawMessage) string {
	text := strings.Map(func(c rune) rune {
		if c < ' ' || c > '~' {
			return '?'
		}
		return c
	}, strings.Trim(string(raw), `"`))
	if text == "" {
		return "another place"
	}
	return text[:min(len(text), maxFactSize)]
}

func of(fn *v1alpha1.FleetNode) conditions.Set {
	return conditions.Of(fn, &fn.Status.Conditions, &fn.Status.ObservedGeneration)
}

// announce tells of what became of a node, once each.
func (r *Reconciler) announce(before, after *v1alpha1.FleetNode) {
	for _, c := range []string{v1alpha1.ConditionConflicted, v1alpha1.ConditionReclaimRefused} {
		if is := meta.FindStatusCondition(after.Status.Conditions, c); is != nil && !meta.IsStatusConditionTrue(before.Status.Conditions, c) {
			r.Recorder.Eventf(after, nil, corev1.EventTypeWarning, is.Reason, "Watch", "%s", is.Message)
		}
	}
	if after.Status.State == v1alpha1.NodeRetired && before.Status.State != v1alpha1.NodeRetired {
		r.Recorder.Eventf(after, nil, corev1.EventTypeNormal, v1alpha1.ReasonRetired, actionRetire, "The node is retired: its certificates are revoked")
	}
	if before.Status.Pool != "" && before.Status.Pool != after.Status.Pool {
		r.Recorder.Eventf(after, nil, corev1.EventTypeNormal, "Moved", "Move", "Moved from pool %s to pool %s", before.Status.Pool, after.Status.Pool)
	}
}

// printable keeps of the facts what the API accepts.
func printable(facts map[string]string) map[string]v1alpha1.PrintableValue {
	var out map[string]v1alpha1.PrintableValue
	for _, k := range slices.Sorted(maps.Keys(facts)) {
		v := facts[k]
		if len(v) > maxFactSize || strings.ContainsFunc(v, func(c rune) bool { return c < ' ' || c > '~' }) {
			continue
		}
		if out == nil {
			out = map[string]v1alpha1.PrintableValue{}
		}
		if len(out) == maxFacts {
			break
		}
		out[k] = v1alpha1.PrintableValue(v)
	}
	return out
}

// seconds is what the API keeps of a time; more would be a change every time.
func seconds(t time.Time) metav1.Time { return metav1.NewTime(t.Truncate(time.Second)) }
