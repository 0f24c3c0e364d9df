package joinrequest

import (
	"fmt"

	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/controllers/guard"
)

// guardedMessage marks an object that was seen undecided while this very set of
// admission policies was in force. It is the proof, kept on the object itself,
// that a decision which appears on it later is newer than the policies.
func guardedMessage(s guard.State) string {
	return "the admission policies guard decisions (" + s.Fingerprint + ")"
}

// provedNewer reports whether an object's decision is certain to have been made
// under the policies that are in force: the object, which nobody can create
// decided, is younger than they are, or it was marked while it was undecided.
func provedNewer(jr *v1alpha1.JoinRequest, s guard.State) bool {
	if !s.Guarded() {
		return false
	}
	if !jr.CreationTimestamp.Time.Before(s.Since.Add(guard.Settle)) {
		return true
	}
	for _, c := range jr.Status.Conditions {
		if c.Type == v1alpha1.ConditionAdmissionGuarded {
			return c.Status == metav1.ConditionTrue && c.Message == guardedMessage(s) && c.ObservedGeneration < jr.Generation
		}
	}
	return false
}

// malformed says why a decision means nothing, or returns "".
func malformed(jr *v1alpha1.JoinRequest, root bool) string {
	d := jr.Spec.Decision
	switch {
	case d.Verdict != v1alpha1.VerdictApproved && d.Verdict != v1alpha1.VerdictRejected:
		return "its verdict is neither Approved nor Rejected"
	case d.Tenant != "" && !root:
		return "spec.decision.tenant is for requests in the operator's own namespace"
	case d.Verdict == v1alpha1.VerdictApproved && root && jr.Spec.Pool == "" && (d.Tenant == "" || d.Pool == ""):
		return "a machine without a pool is approved with both --tenant and --pool"
	case d.Verdict == v1alpha1.VerdictApproved && jr.Spec.Pool == "" && d.Pool == "":
		return "there is no pool to approve it into"
	}
	return ""
}

// right is what an approver must hold: the verb approve on one pool, or on all
// pools of the namespace where the pool is empty.
type right struct{ namespace, pool string }

// String is how kubectl auth can-i is asked for it.
func (r right) String() string {
	if r.pool == "" {
		return fmt.Sprintf("approve fleetpools -n %s", r.namespace)
	}
	return fmt.Sprintf("approve fleetpools/%s -n %s", r.pool, r.namespace)
}

// rights returns all that the writer of a decision must hold, as the admission
// policy asks for it.
func rights(jr *v1alpha1.JoinRequest) []right {
	d := jr.Spec.Decision
	var out []right
	if jr.Spec.Pool != "" || d.Pool == "" {
		out = append(out, right{jr.Namespace, jr.Spec.Pool})
	}
	if d.Pool != "" && d.Pool != jr.Spec.Pool {
		out = append(out, right{jr.Namespace, d.Pool})
	}
	if d.Tenant != "" && d.Tenant != jr.Namespace {
		pool := d.Pool
		if pool == "" {
			pool = jr.Spec.Pool
		}
		out = append(out, right{d.Tenant, pool})
	}
	return out
}

// review asks the API server whether a user holds a right.
func review(by v1alpha1.UserInfo, r right) *authorizationv1.SubjectAccessReview {
	extra := make(map[string]authorizationv1.ExtraValue, len(by.Extra))
	for k, v := range by.Extra {
		extra[k] = authorizationv1.ExtraValue(v)
	}
	return &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: by.Username, UID: by.UID, Groups: by.Groups, Extra: extra,
		ResourceAttributes: &authorizationv1.ResourceAttributes{
			Group: v1alpha1.GroupVersion.Group, Version: v1alpha1.GroupVersion.Version, Resource: "fleetpools",
			Verb: v1alpha1.VerbApprove, Namespace: r.namespace, Name: r.pool,
		},
	}}
}

// judgement is what becomes of a decision.
type judgement int

const (
	record judgement = iota
	wait
	discard
)

// judge says what becomes of a decision that is not recorded. missing is the
// first right that its writer does not hold, nil where they hold all.
func judge(jr *v1alpha1.JoinRequest, s guard.State, root bool, missing *right) (judgement, string) {
	by := jr.Spec.Decision.DecidedBy.Username
	switch {
	case !s.Guarded():
		return wait, "the decision is not recorded while the admission policies are missing or altered"
	case !provedNewer(jr, s):
		return discard, fmt.Sprintf("the decision by %q cannot be shown to have been made while the admission policies were in force", by)
	case malformed(jr, root) != "":
		return discard, fmt.Sprintf("the decision by %q means nothing: %s", by, malformed(jr, root))
	case missing != nil:
		return discard, fmt.Sprintf("%q may not decide it any more: kubectl auth can-i %s", by, missing)
	}
	return record, ""
}
