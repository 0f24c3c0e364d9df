package joinrequest

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/controllers/conditions"
	"github.com/better-compute/join-operator/controllers/guard"
	"github.com/better-compute/join-operator/controllers/tenancy"
)

// stalled is kstatus' own condition for what will not become ready by itself.
const stalled = "Stalled"

// note is an Event to make once the status is written.
type note struct{ kind, reason, text string }

// show writes what became of the request into its status.
func (r *Reconciler) show(ctx context.Context, q *request) (ctrl.Result, bool, error) {
	state, err := r.Guard.Check(ctx, r.Client)
	if err != nil {
		return ctrl.Result{}, true, err
	}
	tenant, err := tenancy.Of(ctx, r.Client, r.DB, q.key.Namespace)
	if err != nil {
		return ctrl.Result{}, true, err
	}
	after := q.object.DeepCopy()
	notes := summarise(after, q.row, situation{guard: state, settled: state.Settled(r.Now()), tenant: tenant, held: q.held})
	if err := conditions.Patch(ctx, r.Client, q.object, after); err != nil {
		return ctrl.Result{}, true, err
	}
	for _, n := range notes {
		r.Recorder.Eventf(after, nil, n.kind, n.reason, "Decide", "%s", brief(n.text))
	}
	return ctrl.Result{RequeueAfter: next(q, state, r.Now())}, true, nil
}

// next is when to look again though nothing is heard.
func next(q *request, s guard.State, now time.Time) time.Duration {
	soon := min(refresh, max(q.row.deadline().Sub(q.row.now), again))
	switch {
	case q.row.ended != "" || q.row.verdict != "":
		return soon
	case q.held != "":
		return maxBackoff
	case s.Guarded() && !s.Settled(now):
		return again
	}
	return soon
}

// situation is what a status says beside the row.
type situation struct {
	guard   guard.State
	settled bool
	tenant  tenancy.Standing
	held    string
}

// summarise sets all of an object's status from its row, and returns what is news.
func summarise(jr *v1alpha1.JoinRequest, w *row, s situation) []note {
	set := conditions.Of(jr, &jr.Status.Conditions, &jr.Status.ObservedGeneration)
	jr.Status.OthersWaiting = 0
	if w.verdict == "" && w.ended == "" {
		jr.Status.OthersWaiting = w.others
		return undecided(jr, set, s)
	}
	set.Drop(v1alpha1.ConditionTenantBlocked)
	var notes []note
	if w.verdict != "" {
		notes = recorded(jr, w, set)
	}
	switch w.ended {
	case "":
		if w.verdict == v1alpha1.VerdictRejected {
			set.False(v1alpha1.ConditionReady, v1alpha1.ReasonRejected, "rejected by %s: the machine is refused for seven days", w.decidedBy)
			set.True(stalled, v1alpha1.ReasonRejected, "rejected by %s", w.decidedBy)
		} else {
			set.False(v1alpha1.ConditionReady, v1alpha1.ReasonRecorded, "approved by %s; the machine joins at its next poll", w.decidedBy)
		}
	case endedJoined:
		jr.Status.NodeRef = nodeRef(w)
		set.True(v1alpha1.ConditionReady, v1alpha1.ReasonJoined, "the machine joined as FleetNode %s", w.nodeID)
		if set.True(v1alpha1.ConditionJoined, v1alpha1.ReasonJoined, "the machine joined as FleetNode %s", w.nodeID) {
			notes = append(notes, note{corev1.EventTypeNormal, v1alpha1.ReasonJoined, "The machine joined as FleetNode " + w.nodeID})
		}
	case endedExpired:
		notes = append(notes, end(set, v1alpha1.ConditionExpired, v1alpha1.ReasonExpired, expired(w))...)
	case endedSuperseded:
		notes = append(notes, end(set, v1alpha1.ConditionSuperseded, v1alpha1.ReasonSuperseded,
			"the same machine asked again with another key: decide its newer request")...)
	}
	return notes
}

// undecided says what a person has to do, and marks the object with the policies
// under which it is undecided.
func undecided(jr *v1alpha1.JoinRequest, set conditions.Set, s situation) []note {
	switch {
	case !s.guard.Guarded():
		set.False(v1alpha1.ConditionAdmissionGuarded, v1alpha1.ReasonUnguarded, "%s", brief(fmt.Sprintf("no decision is recorded: %v", s.guard.Problems)))
	case jr.Spec.Decision != nil: // the mark stays as it was put there
	case s.settled:
		set.True(v1alpha1.ConditionAdmissionGuarded, v1alpha1.ReasonGuarded, "%s", guardedMessage(s.guard))
	default:
		set.False(v1alpha1.ConditionAdmissionGuarded, v1alpha1.ReasonUnguarded, "the admission policies were changed just now: wait until all API servers follow them")
	}
	if s.tenant.InForce || s.tenant.Terminating {
		set.Drop(v1alpha1.ConditionTenantBlocked)
	} else {
		set.True(v1alpha1.ConditionTenantBlocked, s.tenant.Reason, "%s", s.tenant.Message)
	}
	if s.held != "" {
		set.False(v1alpha1.ConditionReady, v1alpha1.ReasonUnguarded, "%s", s.held)
		if set.False(v1alpha1.ConditionRecorded, v1alpha1.ReasonUnguarded, "%s", s.held) {
			return []note{{corev1.EventTypeWarning, v1alpha1.ReasonUnguarded, s.held}}
		}
		return nil
	}
	set.Drop(v1alpha1.ConditionRecorded)
	set.False(v1alpha1.ConditionReady, v1alpha1.ReasonAwaitingDecision, "waits for a person: kubectl approve joinrequest %s -n %s, or kubectl reject", jr.Name, jr.Namespace)
	return nil
}

// recorded says that the decision stands.
func recorded(jr *v1alpha1.JoinRequest, w *row, set conditions.Set) []note {
	if !set.True(v1alpha1.ConditionRecorded, v1alpha1.ReasonRecorded, "%s by %s", w.verdict, w.decidedBy) {
		return nil
	}
	if w.verdict == v1alpha1.VerdictRejected {
		return []note{{corev1.EventTypeNormal, v1alpha1.ReasonRejected, w.decidedBy + " rejected; the machine is refused for seven days"}}
	}
	text := w.decidedBy + " approved"
	if w.decidedPool != "" && w.decidedPool != jr.Spec.Pool {
		text += " into pool " + w.decidedPool
	}
	if w.decidedTenant != "" {
		text += " of tenant " + w.decidedTenant
	}
	return []note{{corev1.EventTypeNormal, v1alpha1.ReasonApproved, text + "; the machine joins at its next poll"}}
}

// end says that nothing more happens to a request.
func end(set conditions.Set, kind, reason, text string) []note {
	set.False(v1alpha1.ConditionReady, reason, "%s", text)
	set.True(stalled, reason, "%s", text)
	if set.True(kind, reason, "%s", text) {
		return []note{{corev1.EventTypeNormal, reason, text}}
	}
	return nil
}

func expired(w *row) string {
	switch w.verdict {
	case v1alpha1.VerdictApproved:
		return "approved, but the machine did not come back for seven days: when it asks again, it is asked about again"
	case v1alpha1.VerdictRejected:
		return "rejected, and seven days have passed: when the machine asks again, it is asked about again"
	}
	return "nobody decided, and the machine has not asked for a day: when it asks again, it is asked about again"
}

// nodeRef names the node, with its namespace where that is another one.
func nodeRef(w *row) *v1alpha1.NodeReference {
	ref := &v1alpha1.NodeReference{Name: w.nodeID}
	if w.nodeTenant != "" && w.nodeTenant != w.namespace {
		ref.Namespace = w.nodeTenant
	}
	return ref
}
