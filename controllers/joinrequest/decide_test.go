package joinrequest

import (
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/controllers/guard"
)

var (
	since   = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	guarded = guard.State{Fingerprint: "f1", Since: since}
)

// decided is a request of pool gpu that alice approved, long before the policies
// were changed last.
func decided(change ...func(*v1alpha1.JoinRequest)) *v1alpha1.JoinRequest {
	jr := &v1alpha1.JoinRequest{
		ObjectMeta: metav1.ObjectMeta{Namespace: "t", Name: "jr-a", Generation: 2, CreationTimestamp: metav1.NewTime(since.Add(-time.Hour))},
		Spec: v1alpha1.JoinRequestSpec{
			JoinRequestAsk: v1alpha1.JoinRequestAsk{Pool: "gpu"},
			Decision:       &v1alpha1.Decision{Verdict: v1alpha1.VerdictApproved, DecidedBy: v1alpha1.UserInfo{Username: "alice"}},
		},
	}
	for _, c := range change {
		c(jr)
	}
	return jr
}

func young(jr *v1alpha1.JoinRequest) {
	jr.CreationTimestamp = metav1.NewTime(since.Add(guard.Settle))
}

func marked(status metav1.ConditionStatus, s guard.State, generation int64) func(*v1alpha1.JoinRequest) {
	return func(jr *v1alpha1.JoinRequest) {
		jr.Status.Conditions = []metav1.Condition{{
			Type: v1alpha1.ConditionAdmissionGuarded, Status: status, Message: guardedMessage(s), ObservedGeneration: generation,
		}}
	}
}

func TestADecisionIsRecordedOnlyWhereItIsProvedToBeGuarded(t *testing.T) {
	other := guard.State{Fingerprint: "f0", Since: since}
	for name, c := range map[string]struct {
		jr      *v1alpha1.JoinRequest
		guard   guard.State
		missing *right
		want    judgement
		why     string
	}{
		"object younger than the policies":      {jr: decided(young), guard: guarded, want: record},
		"object of the very second they came":   {jr: decided(func(jr *v1alpha1.JoinRequest) { jr.CreationTimestamp = metav1.NewTime(since) }), guard: guarded, want: discard, why: "cannot be shown"},
		"object older, seen undecided":          {jr: decided(marked(metav1.ConditionTrue, guarded, 1)), guard: guarded, want: record},
		"object older, never seen":              {jr: decided(), guard: guarded, want: discard, why: "cannot be shown"},
		"seen under other policies":             {jr: decided(marked(metav1.ConditionTrue, other, 1)), guard: guarded, want: discard, why: "cannot be shown"},
		"seen unguarded":                        {jr: decided(marked(metav1.ConditionFalse, guarded, 1)), guard: guarded, want: discard, why: "cannot be shown"},
		"marked when it was decided already":    {jr: decided(marked(metav1.ConditionTrue, guarded, 2)), guard: guarded, want: discard, why: "cannot be shown"},
		"unguarded now":                         {jr: decided(young), guard: guard.State{Problems: []string{"policy x is missing"}}, want: wait, why: "missing or altered"},
		"no state at all":                       {jr: decided(young), guard: guard.State{}, want: wait, why: "missing or altered"},
		"right withdrawn":                       {jr: decided(young), guard: guarded, missing: &right{"t", "gpu"}, want: discard, why: "kubectl auth can-i approve fleetpools/gpu -n t"},
		"unguarded now and right withdrawn too": {jr: decided(young), guard: guard.State{Problems: []string{"x"}}, missing: &right{"t", "gpu"}, want: wait, why: "missing or altered"},
		"tenant given outside the root": {
			jr: decided(young, func(jr *v1alpha1.JoinRequest) { jr.Spec.Decision.Tenant = "u" }), guard: guarded, want: discard, why: "means nothing",
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, why := judge(c.jr, c.guard, false, c.missing)
			if got != c.want || !strings.Contains(why, c.why) || (c.want != record) != (why != "") {
				t.Errorf("got %d because %q, want %d because …%s…", got, why, c.want, c.why)
			}
		})
	}
}

func TestWhatIsAskedOfAnApprover(t *testing.T) {
	for name, c := range map[string]struct {
		ns, pool  string
		decision  v1alpha1.Decision
		root      bool
		malformed bool
		want      []string
	}{
		"into its pool":                    {ns: "t", pool: "gpu", decision: approve("", ""), want: []string{"approve fleetpools/gpu -n t"}},
		"rejection":                        {ns: "t", pool: "gpu", decision: reject(), want: []string{"approve fleetpools/gpu -n t"}},
		"into another pool":                {ns: "t", pool: "gpu", decision: approve("cpu", ""), want: []string{"approve fleetpools/gpu -n t", "approve fleetpools/cpu -n t"}},
		"into the same pool, named":        {ns: "t", pool: "gpu", decision: approve("gpu", ""), want: []string{"approve fleetpools/gpu -n t"}},
		"root, for a tenant":               {ns: "root", pool: "gpu", decision: approve("", "t"), root: true, want: []string{"approve fleetpools/gpu -n root", "approve fleetpools/gpu -n t"}},
		"root, no pool, for a tenant":      {ns: "root", decision: approve("cpu", "t"), root: true, want: []string{"approve fleetpools/cpu -n root", "approve fleetpools/cpu -n t"}},
		"root, no pool, rejected":          {ns: "root", decision: reject(), root: true, want: []string{"approve fleetpools -n root"}},
		"root, no pool, no tenant":         {ns: "root", decision: approve("cpu", ""), root: true, malformed: true},
		"root, no pool, tenant alone":      {ns: "root", decision: approve("", "t"), root: true, malformed: true},
		"tenant named elsewhere":           {ns: "t", pool: "gpu", decision: approve("", "u"), malformed: true},
		"no pool at all":                   {ns: "t", decision: approve("", ""), malformed: true},
		"neither approved nor rejected":    {ns: "t", pool: "gpu", decision: v1alpha1.Decision{Verdict: "Maybe"}, malformed: true},
		"rejection that names a tenant":    {ns: "t", pool: "gpu", decision: v1alpha1.Decision{Verdict: v1alpha1.VerdictRejected, Tenant: "u"}, malformed: true},
		"rejection in the root, with pool": {ns: "root", pool: "gpu", decision: reject(), root: true, want: []string{"approve fleetpools/gpu -n root"}},
	} {
		t.Run(name, func(t *testing.T) {
			jr := &v1alpha1.JoinRequest{ObjectMeta: metav1.ObjectMeta{Namespace: c.ns}}
			jr.Spec.Pool, jr.Spec.Decision = c.pool, &c.decision
			if bad := malformed(jr, c.root); (bad != "") != c.malformed {
				t.Fatalf("malformed: %q", bad)
			}
			if c.malformed {
				return
			}
			var got []string
			for _, r := range rights(jr) {
				got = append(got, r.String())
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

func approve(pool, tenant string) v1alpha1.Decision {
	return v1alpha1.Decision{Verdict: v1alpha1.VerdictApproved, Pool: pool, Tenant: tenant}
}

func reject() v1alpha1.Decision { return v1alpha1.Decision{Verdict: v1alpha1.VerdictRejected} }

func TestAReviewAsksForTheWholeUser(t *testing.T) {
	by := v1alpha1.UserInfo{Username: "alice", UID: "7", Groups: []string{"ops"}, Extra: map[string]v1alpha1.ExtraValue{"scopes": {"a", "b"}}}
	s := review(by, right{"t", "gpu"}).Spec
	if s.User != "alice" || s.UID != "7" || !slices.Equal(s.Groups, by.Groups) || !slices.Equal(s.Extra["scopes"], []string{"a", "b"}) {
		t.Errorf("asked for %+v", s)
	}
	if a := s.ResourceAttributes; a.Verb != "approve" || a.Group != "join.better-compute.dev" || a.Resource != "fleetpools" || a.Name != "gpu" || a.Namespace != "t" || a.Subresource != "" {
		t.Errorf("asked for %+v", a)
	}
}

func TestCapsLeaveRoomForEveryTenant(t *testing.T) {
	many := func(n int, namespace, source, token string) []waiter {
		out := make([]waiter, n)
		for i := range out {
			out[i] = waiter{namespace: namespace, source: source, token: token}
		}
		return out
	}
	l := Limits{Tenant: 4, Source: 5, Total: 8, Reserved: 2, TokenFactor: 2}
	for name, c := range map[string]struct {
		shown, capped []waiter
		left          map[string]int
		want          int
	}{
		"room":                      {shown: many(1, "a", "", ""), capped: many(2, "a", "", ""), want: 2},
		"a full tenant":             {shown: many(3, "a", "", ""), capped: many(2, "a", "", ""), want: 1},
		"a full source":             {shown: append(many(2, "a", "s", ""), many(2, "b", "s", "")...), capped: many(3, "c", "s", ""), want: 1},
		"unknown sources":           {shown: append(many(3, "a", "", ""), many(3, "b", "", "")...), capped: many(1, "c", "", ""), want: 1},
		"a token twice its uses":    {shown: many(1, "a", "", "k"), capped: many(3, "a", "", "k"), left: map[string]int{"k": 1}, want: 1},
		"a spent token":             {capped: many(3, "a", "", "k"), want: 0},
		"all full, but the reserve": {shown: append(many(4, "a", "", ""), many(4, "b", "", "")...), capped: many(4, "c", "", ""), want: 2},
	} {
		t.Run(name, func(t *testing.T) {
			if got := len(l.admit(c.shown, c.capped, c.left)); got != c.want {
				t.Errorf("admitted %d, want %d", got, c.want)
			}
		})
	}
}

func TestARequestEndsByTheDatabasesTime(t *testing.T) {
	at := since
	for name, c := range map[string]struct {
		row      row
		due      bool
		over     bool
		overFrom time.Time
	}{
		"undecided":               {row: row{lastAskedAt: at, now: at.Add(undecidedFor - 1)}},
		"undecided for a day":     {row: row{lastAskedAt: at, now: at.Add(undecidedFor)}, due: true},
		"approved":                {row: row{verdict: "Approved", lastAskedAt: at, decidedAt: at, now: at.Add(decidedFor - 1)}},
		"approved for a week":     {row: row{verdict: "Approved", decidedAt: at, now: at.Add(decidedFor)}, due: true},
		"rejected":                {row: row{verdict: "Rejected", decidedAt: at, now: at.Add(time.Minute)}, over: true, overFrom: at},
		"rejected for a week":     {row: row{verdict: "Rejected", decidedAt: at, now: at.Add(decidedFor)}, due: true, over: true, overFrom: at},
		"forgotten rejection":     {row: row{verdict: "Rejected", decidedAt: at, ended: endedExpired, endedAt: at.Add(decidedFor), now: at.Add(decidedFor)}, over: true, overFrom: at},
		"joined":                  {row: row{verdict: "Approved", decidedAt: at, ended: endedJoined, endedAt: at.Add(time.Hour), now: at.Add(decidedFor)}, over: true, overFrom: at.Add(time.Hour)},
		"superseded":              {row: row{ended: endedSuperseded, endedAt: at, now: at}, over: true, overFrom: at},
		"expired, never decided":  {row: row{ended: endedExpired, endedAt: at, now: at.Add(undecidedFor)}, over: true, overFrom: at},
		"asked again a while ago": {row: row{lastAskedAt: at.Add(time.Hour), now: at.Add(undecidedFor)}},
	} {
		t.Run(name, func(t *testing.T) {
			from, over := c.row.over()
			if c.row.due() != c.due || over != c.over || !from.Equal(c.overFrom) {
				t.Errorf("due %t, over %t from %s", c.row.due(), over, from)
			}
		})
	}
}
