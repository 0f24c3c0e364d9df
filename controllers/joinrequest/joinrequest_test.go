package joinrequest_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/controllers/internal/controllertest"
	"github.com/better-compute/join-operator/controllers/joinrequest"
)

func TestAPendingJoinIsShownApprovedAndJoined(t *testing.T) {
	w := setup(t)
	w.start(t)
	id := w.pends(t)
	jr := w.becomes(id, v1alpha1.ConditionReady, "False/AwaitingDecision")
	if jr.Labels["join.better-compute.dev/attestor-type"] != "join-token" || len(jr.Finalizers)+len(jr.OwnerReferences) != 0 {
		t.Errorf("metadata %+v", jr.ObjectMeta)
	}
	w.becomes(id, v1alpha1.ConditionAdmissionGuarded, "True/AdmissionGuarded")
	if err := w.decides(w.bob, "bob", id, "Approved"); !apierrors.IsInvalid(err) && !apierrors.IsForbidden(err) {
		t.Fatalf("bob decided: %v", err)
	}
	if err := w.decides(w.alice, "alice", id, "Approved"); err != nil {
		t.Fatal(err)
	}
	w.becomes(id, v1alpha1.ConditionRecorded, "True/Recorded")
	w.becomes(id, v1alpha1.ConditionReady, "False/Recorded")
	w.told("jr-"+id, "Approved", "alice approved; the machine joins at its next poll")
	if got := controllertest.Query[string](w.Env, `SELECT verdict || ' ' || (decided_by->>'username') || ' ' || object_uid FROM join_requests WHERE id = $1`, id); got != "Approved alice "+string(jr.UID) {
		t.Errorf("the row says %q", got)
	}
	if n := controllertest.Query[int](w.Env, `SELECT count(*) FROM audit_log WHERE action = 'request.approve' AND actor = 'alice' AND tenant = $1`, w.tenant); n != 1 {
		t.Errorf("%d audit rows", n)
	}
	if n := controllertest.Query[int](w.Env, `SELECT count(*) FROM events WHERE type = 'join.decided' AND data->>'id' = $1`, id); n != 1 {
		t.Errorf("%d events", n)
	}

	w.Node(w.tenant, "gpu", "n-one")
	w.Exec(`UPDATE join_requests SET ended = 'Joined', ended_at = join_now(), node_id = 'n-one' WHERE id = $1`, id)
	w.Exec(`INSERT INTO events (type, tenant, node_id, data) VALUES ('node.joined', $1, 'n-one', jsonb_build_object('joinRequest', 'jr-' || $2::text))`, w.tenant, id)
	jr = w.becomes(id, v1alpha1.ConditionReady, "True/Joined")
	if jr.Status.NodeRef == nil || jr.Status.NodeRef.Name != "n-one" || jr.Status.NodeRef.Namespace != "" {
		t.Errorf("nodeRef %+v", jr.Status.NodeRef)
	}
	w.DB.Advance(t, time.Hour+time.Minute)
	w.goes(id)
	w.Eventually(func(context.Context) error {
		if uid := controllertest.Query[string](w.Env, `SELECT coalesce(object_uid, '') FROM join_requests WHERE id = $1`, id); uid != "" {
			return errors.New("the row still names its object")
		}
		return nil
	})
}

func TestARejectionIsRememberedForAWeekAndShownForAnHour(t *testing.T) {
	w := setup(t)
	w.start(t)
	id := w.pends(t)
	w.becomes(id, v1alpha1.ConditionAdmissionGuarded, "True/AdmissionGuarded")
	if err := w.decides(w.alice, "alice", id, "Rejected"); err != nil {
		t.Fatal(err)
	}
	w.becomes(id, v1alpha1.ConditionReady, "False/Rejected")
	w.becomes(id, "Stalled", "True/Rejected")
	w.told("jr-"+id, "Rejected", "alice rejected")
	w.DB.Advance(t, time.Hour+time.Minute)
	w.goes(id)
	ended := func() string {
		return controllertest.Query[string](w.Env, `SELECT coalesce(ended, '') FROM join_requests WHERE id = $1`, id)
	}
	if got := ended(); got != "" {
		t.Fatalf("the rejection was forgotten: %s", got)
	}
	w.DB.Advance(t, 7*24*time.Hour)
	w.Eventually(func(ctx context.Context) error {
		if got := ended(); got != "Expired" {
			return fmt.Errorf("ended %q", got)
		}
		return nil
	})
	if err := w.Client.Get(t.Context(), w.key(id), &v1alpha1.JoinRequest{}); !apierrors.IsNotFound(err) {
		t.Errorf("the object of a rejection came back: %v", err)
	}
}

func TestAnUndecidedObjectThatIsDeletedIsMadeAgain(t *testing.T) {
	w := setup(t)
	w.start(t)
	id := w.pends(t)
	first := w.becomes(id, v1alpha1.ConditionReady, "False/AwaitingDecision")
	w.Delete(first)
	again := w.appearsAnew(id, string(first.UID))
	if again.Spec.CSRSHA256 != first.Spec.CSRSHA256 {
		t.Errorf("the request made again asks for %+v", again.Spec)
	}
}

func TestAManagerFinishesWhatAKilledOneBegan(t *testing.T) {
	w := setup(t)
	w.start(t)
	deleted, forgotten := w.pends(t), w.pends(t)
	for _, id := range []string{deleted, forgotten} {
		w.becomes(id, v1alpha1.ConditionAdmissionGuarded, "True/AdmissionGuarded")
	}
	w.stop()
	// It was killed after it deleted an object; after it made one and before it
	// wrote down which; and before it could make one.
	gone := w.appears(deleted)
	w.Delete(gone)
	w.Exec(`UPDATE join_requests SET object_uid = NULL WHERE id = $1`, forgotten)
	if err := w.decides(w.alice, "alice", forgotten, "Approved"); err != nil {
		t.Fatal(err)
	}
	never := w.pends(t)
	w.start(t)
	w.appearsAnew(deleted, string(gone.UID))
	w.becomes(forgotten, v1alpha1.ConditionRecorded, "True/Recorded")
	w.appears(never)
}

func TestADecisionOnAnotherObjectOfTheSameRequestIsThrownAway(t *testing.T) {
	w := setup(t)
	w.start(t)
	id := w.pends(t)
	first := w.becomes(id, v1alpha1.ConditionAdmissionGuarded, "True/AdmissionGuarded")
	w.stop()
	w.Delete(first)
	second := w.objectOf(t, id)
	w.Create(second)
	if err := w.decides(w.alice, "alice", id, "Approved"); err != nil {
		t.Fatal(err)
	}
	w.start(t)
	w.told("jr-"+id, "DecisionDiscarded", "in the place of the recorded one")
	w.appearsAnew(id, string(second.UID))
	if v := w.verdict(id); v != "" {
		t.Errorf("recorded: %s", v)
	}
}

func TestWhatIsApprovedIsWhatJoins(t *testing.T) {
	w := setup(t)
	id := w.pends(t)
	forged := &v1alpha1.JoinRequest{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.tenant, Name: "jr-" + id},
		Spec: v1alpha1.JoinRequestSpec{JoinRequestAsk: v1alpha1.JoinRequestAsk{
			Attestor: "join-token", Role: "node", Pool: "gpu",
			CSRSHA256: strings.Repeat("a", 64), PublicKeySHA256: strings.Repeat("a", 64), SubjectSHA256: strings.Repeat("a", 64),
		}},
	}
	w.Create(forged) // by a tenant's administrator, before the manager came
	if err := w.decides(w.alice, "alice", id, "Approved"); err != nil {
		t.Fatal(err)
	}
	nobody := forged.DeepCopy()
	nobody.ObjectMeta = metav1.ObjectMeta{Namespace: w.tenant, Name: "jr-aaaaaaaaaaaaaaaa"}
	w.Create(nobody)
	w.start(t)
	made := w.appearsAnew(id, string(forged.UID))
	if made.Spec.CSRSHA256 == forged.Spec.CSRSHA256 {
		t.Error("the forged request stands")
	}
	w.told("jr-"+id, "NotWhatWasAsked", "asked for something else")
	w.told(w.tenant, "NotWhatWasAsked", "no machine asked for it")
	w.goes("aaaaaaaaaaaaaaaa")
	if v := w.verdict(id); v != "" {
		t.Errorf("a decision about something else was recorded: %s", v)
	}
}

func TestADecisionWhoseApproverLostTheRightIsThrownAway(t *testing.T) {
	w := setup(t)
	w.start(t)
	id := w.pends(t)
	first := w.becomes(id, v1alpha1.ConditionAdmissionGuarded, "True/AdmissionGuarded")
	w.stop()
	if err := w.decides(w.alice, "alice", id, "Approved"); err != nil {
		t.Fatal(err)
	}
	w.Delete(&rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Namespace: w.tenant, Name: "approve"}})
	w.Eventually(func(context.Context) error { // the authorizer follows by a watch of its own
		probe := w.pends(t)
		w.Create(w.objectOf(t, probe))
		if err := w.decides(w.alice, "alice", probe, "Approved"); err == nil {
			return errors.New("alice may still approve")
		}
		return nil
	})
	w.start(t)
	w.appearsAnew(id, string(first.UID))
	w.told("jr-"+id, "DecisionDiscarded", `"alice" may not decide it any more: kubectl auth can-i approve fleetpools/gpu`)
	if v := w.verdict(id); v != "" {
		t.Errorf("recorded: %s", v)
	}
	// Nobody stays stuck behind it.
	w.Create(&rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.tenant, Name: "approve-again"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "approve"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: "bob"}},
	})
	w.Eventually(func(context.Context) error { return w.decides(w.bob, "bob", id, "Approved") })
	w.becomes(id, v1alpha1.ConditionRecorded, "True/Recorded")
}

func TestNothingIsRecordedWhileUnguarded(t *testing.T) {
	for name, breakIt := range map[string]func(*world){
		"policy deleted":  func(w *world) { w.Delete(manifests()[0]) },
		"binding deleted": func(w *world) { w.Delete(manifests()[1]) },
		"policy altered": func(w *world) {
			u := manifests()[0]
			w.Patch(u, func() { u.Object["spec"].(map[string]any)["failurePolicy"] = "Ignore" })
		},
		"binding altered": func(w *world) {
			u := manifests()[1]
			w.Patch(u, func() { u.Object["spec"].(map[string]any)["validationActions"] = []any{"Audit"} })
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := setup(t)
			w.start(t)
			id := w.pends(t)
			first := w.becomes(id, v1alpha1.ConditionAdmissionGuarded, "True/AdmissionGuarded")
			breakIt(w)
			w.becomes(id, v1alpha1.ConditionAdmissionGuarded, "False/AdmissionUnguarded")
			// Alice may, and may be in the right; nobody can tell.
			if err := w.decides(w.alice, "alice", id, "Approved"); err != nil {
				t.Fatal(err)
			}
			w.becomes(id, v1alpha1.ConditionRecorded, "False/AdmissionUnguarded")
			w.becomes(id, v1alpha1.ConditionReady, "False/AdmissionUnguarded")
			if v := w.verdict(id); v != "" {
				t.Fatalf("recorded while unguarded: %s", v)
			}
			w.uninstall()
			w.Eventually(func(ctx context.Context) error {
				for _, u := range manifests() {
					if err := w.Client.Create(ctx, u); err != nil && !apierrors.IsAlreadyExists(err) {
						return err
					}
				}
				return nil
			})
			w.appearsAnew(id, string(first.UID))
			w.told("jr-"+id, "DecisionDiscarded", "cannot be shown")
			if v := w.verdict(id); v != "" {
				t.Fatalf("a decision made while unguarded was recorded: %s", v)
			}
			w.becomes(id, v1alpha1.ConditionAdmissionGuarded, "True/AdmissionGuarded")
			if err := w.decides(w.alice, "alice", id, "Approved"); err != nil {
				t.Fatal(err)
			}
			w.becomes(id, v1alpha1.ConditionRecorded, "True/Recorded")
		})
	}
}

func TestDecisionsMadeWhileTheManagerWasAwayAreRecorded(t *testing.T) {
	w := setup(t)
	w.start(t)
	id := w.pends(t)
	w.becomes(id, v1alpha1.ConditionAdmissionGuarded, "True/AdmissionGuarded")
	w.stop()
	// The policies are older than the object no more, but the same: a label says
	// nothing about what they do.
	u := manifests()[0]
	w.Patch(u, func() { u.SetLabels(map[string]string{"touched": "yes"}) })
	unseen := w.pends(t)
	w.Create(w.objectOf(t, unseen)) // a replica makes it; no manager sees it undecided
	v := manifests()[1]
	w.Patch(v, func() { v.SetLabels(map[string]string{"touched": "yes"}) })
	for _, i := range []string{id, unseen} {
		if err := w.decides(w.alice, "alice", i, "Approved"); err != nil {
			t.Fatal(err)
		}
	}
	w.start(t)
	w.becomes(id, v1alpha1.ConditionRecorded, "True/Recorded")
	w.told("jr-"+unseen, "DecisionDiscarded", "cannot be shown")
	if v := w.verdict(unseen); v != "" {
		t.Errorf("a decision that may be older than the policies was recorded: %s", v)
	}
}

func TestRequestsExpireByTheDatabasesTime(t *testing.T) {
	w := setup(t)
	w.start(t)
	approved, undecided := w.pends(t), w.pends(t)
	w.becomes(approved, v1alpha1.ConditionAdmissionGuarded, "True/AdmissionGuarded")
	if err := w.decides(w.alice, "alice", approved, "Approved"); err != nil {
		t.Fatal(err)
	}
	w.becomes(approved, v1alpha1.ConditionRecorded, "True/Recorded")
	w.DB.Advance(t, 24*time.Hour+time.Minute)
	w.becomes(undecided, v1alpha1.ConditionExpired, "True/Expired")
	w.becomes(undecided, v1alpha1.ConditionReady, "False/Expired")
	w.DB.Advance(t, time.Hour+time.Minute)
	w.goes(undecided)
	w.becomes(approved, v1alpha1.ConditionReady, "False/Recorded")
	w.DB.Advance(t, 6*24*time.Hour)
	w.becomes(approved, v1alpha1.ConditionExpired, "True/Expired")
}

func TestASupersededRequestSaysSo(t *testing.T) {
	w := setup(t)
	w.start(t)
	id := w.pends(t)
	w.appears(id)
	w.Exec(`UPDATE join_requests SET ended = 'Superseded', ended_at = join_now() WHERE id = $1`, id)
	w.becomes(id, v1alpha1.ConditionSuperseded, "True/Superseded")
	w.becomes(id, v1alpha1.ConditionReady, "False/Superseded")
}

func TestADeletedTenantNamespaceIsGoneAndNothingHangs(t *testing.T) {
	w := setup(t)
	w.start(t)
	first, second := w.pends(t), w.pends(t)
	w.becomes(first, v1alpha1.ConditionAdmissionGuarded, "True/AdmissionGuarded")
	w.appears(second)
	if err := w.decides(w.alice, "alice", first, "Approved"); err != nil {
		t.Fatal(err)
	}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.tenant}}
	w.Delete(ns)
	w.Eventually(func(ctx context.Context) error {
		if err := w.Client.Get(ctx, client.ObjectKeyFromObject(ns), ns); !apierrors.IsNotFound(err) {
			return fmt.Errorf("namespace: %v %+v", err, ns.Status)
		}
		return nil
	})
	w.Eventually(func(context.Context) error {
		state := controllertest.Query[string](w.Env, `SELECT state FROM tenants WHERE name = $1`, w.tenant)
		live := controllertest.Query[int](w.Env, `SELECT count(*) FROM join_requests WHERE ended IS NULL`)
		if state != "gone" || live != 0 {
			return fmt.Errorf("tenant %s, %d live requests", state, live)
		}
		return nil
	})
}

func TestTheAPIServerMayComeBack(t *testing.T) {
	w := setup(t)
	network := &cable{}
	cluster := *w.Cluster
	cluster.Config = rest.CopyConfig(w.Config)
	cluster.Config.Dial = network.dial
	env := *w.Env
	env.Cluster = &cluster
	behind := *w
	behind.Env = &env
	behind.start(t)
	before := w.pends(t)
	w.becomes(before, v1alpha1.ConditionAdmissionGuarded, "True/AdmissionGuarded")
	network.cut()
	during := w.pends(t)
	if err := w.decides(w.alice, "alice", before, "Approved"); err != nil {
		t.Fatal(err)
	}
	// The sweep has met the row, and failed.
	w.Eventually(func(context.Context) error {
		if network.refused() == 0 {
			return errors.New("nobody has tried yet")
		}
		return nil
	})
	if v := w.verdict(before); v != "" {
		t.Errorf("recorded through a cut cable: %s", v)
	}
	network.mend()
	w.becomes(during, v1alpha1.ConditionReady, "False/AwaitingDecision")
	w.becomes(before, v1alpha1.ConditionRecorded, "True/Recorded")
}

func TestCappedRequestsAreShownAsOthersAreDecided(t *testing.T) {
	w := setup(t)
	w.limits = joinrequest.Limits{Tenant: 1, Source: 500, Total: 5000, Reserved: 50, TokenFactor: 2}
	w.Exec(`INSERT INTO join_token_slots (token_id, slot, uses_left) VALUES ('tokentokento', 0, 10)`)
	shown, capped := w.pends(t), w.pends(t)
	w.Exec(`UPDATE join_requests SET capped = true WHERE id = $1`, capped)
	w.start(t)
	w.becomes(shown, v1alpha1.ConditionAdmissionGuarded, "True/AdmissionGuarded")
	w.told(w.tenant, "RequestsCapped", "1 machines wait")
	if err := w.Client.Get(t.Context(), w.key(capped), &v1alpha1.JoinRequest{}); !apierrors.IsNotFound(err) {
		t.Fatalf("a capped request has an object: %v", err)
	}
	if jr := w.appears(shown); jr.Status.OthersWaiting != 1 {
		t.Errorf("others waiting: %d", jr.Status.OthersWaiting)
	}
	if err := w.decides(w.alice, "alice", shown, "Rejected"); err != nil {
		t.Fatal(err)
	}
	w.becomes(capped, v1alpha1.ConditionReady, "False/AwaitingDecision")
}

func TestARequestInABlockedTenantSaysSo(t *testing.T) {
	w := setup(t)
	w.start(t)
	id := w.pends(t)
	w.appears(id)
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.tenant}}
	w.Patch(ns, func() { ns.Labels = nil })
	w.becomes(id, v1alpha1.ConditionTenantBlocked, "True/NotATenant")
}

// objectOf is the object that a replica makes of a row.
func (w *world) objectOf(t *testing.T, id string) *v1alpha1.JoinRequest {
	t.Helper()
	jr := &v1alpha1.JoinRequest{ObjectMeta: metav1.ObjectMeta{Namespace: w.tenant, Name: "jr-" + id}}
	jr.Spec.JoinRequestAsk = controllertest.Query[v1alpha1.JoinRequestAsk](w.Env, `SELECT spec FROM join_requests WHERE id = $1`, id)
	return jr
}

// cable is the network between a manager and its API server.
type cable struct {
	mu     sync.Mutex
	broken bool
	failed int
	open   []net.Conn
}

func (c *cable) dial(ctx context.Context, network, address string) (net.Conn, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.broken {
		c.failed++
		return nil, errors.New("the cable is cut")
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
	if err == nil {
		c.open = append(c.open, conn)
	}
	return conn, err
}

func (c *cable) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.broken = true
	for _, conn := range c.open {
		_ = conn.Close()
	}
	c.open = nil
}

func (c *cable) mend() { c.mu.Lock(); c.broken = false; c.mu.Unlock() }

func (c *cable) refused() int { c.mu.Lock(); defer c.mu.Unlock(); return c.failed }
