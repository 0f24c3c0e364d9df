package jointoken_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/better-compute/join-operator/api/v1alpha1"
	text "github.com/better-compute/join-operator/attestors/jointoken"
	"github.com/better-compute/join-operator/controllers/internal/controllertest"
	"github.com/better-compute/join-operator/controllers/jointoken"
	"github.com/better-compute/join-operator/controllers/outbox"
)

func TestMain(m *testing.M) { controllertest.Main(m) }

// world is a tenant with a pool, and a manager that makes tokens.
type world struct {
	*controllertest.Env
	tenant string
	stop   func()
}

func setup(t *testing.T) *world {
	e := controllertest.New(t)
	w := &world{Env: e, tenant: e.Tenant()}
	e.Pool(w.tenant, "gpu")
	w.run(e.Client)
	return w
}

// run starts a manager whose access to Secrets is the given client.
func (w *world) run(secrets client.Client) {
	w.stop = w.Run(func(mgr ctrl.Manager, feed *outbox.Feed) error {
		return (&jointoken.Reconciler{
			Client: mgr.GetClient(), Live: secrets, DB: w.Manager, Feed: feed, Recorder: mgr.GetEventRecorder("join-manager"),
			Resync: 500 * time.Millisecond, SkipNameValidation: true,
		}).SetupWithManager(mgr)
	})
}

func (w *world) token(name string, change ...func(*v1alpha1.JoinToken)) *v1alpha1.JoinToken {
	jt := &v1alpha1.JoinToken{ObjectMeta: metav1.ObjectMeta{Namespace: w.tenant, Name: name}, Spec: v1alpha1.JoinTokenSpec{Pool: "gpu"}}
	for _, c := range change {
		c(jt)
	}
	return jt
}

// ready waits until the condition Ready of a JoinToken is "status/reason".
func (w *world) ready(jt *v1alpha1.JoinToken, want string) {
	w.Eventually(func(ctx context.Context) error {
		if err := w.Client.Get(ctx, client.ObjectKeyFromObject(jt), jt); err != nil {
			return err
		}
		if jt.Status.ObservedGeneration != jt.Generation {
			return fmt.Errorf("observed generation %d of %d", jt.Status.ObservedGeneration, jt.Generation)
		}
		return controllertest.Condition(jt.Status.Conditions, v1alpha1.ConditionReady, want)
	})
}

// secret returns the token that a JoinToken's Secret holds.
func (w *world) secret(t *testing.T, jt *v1alpha1.JoinToken) text.Token {
	t.Helper()
	var s corev1.Secret
	if err := w.Client.Get(t.Context(), client.ObjectKey{Namespace: jt.Namespace, Name: jt.Status.SecretRef.Name}, &s); err != nil {
		t.Fatal(err)
	}
	token, err := text.Parse(string(s.Data["token"]))
	if err != nil {
		t.Fatal(err)
	}
	return token
}

func usesLeft(w *world, id string) int64 {
	return controllertest.Query[int64](w.Env, `SELECT coalesce(sum(uses_left), 0) FROM join_token_slots WHERE token_id = $1`, id)
}

func TestTokenIsInForceAsItsSecretHoldsIt(t *testing.T) {
	w := setup(t)
	jt := w.token("first", func(jt *v1alpha1.JoinToken) { jt.Spec.Uses = 1000; jt.Spec.Site = "fra1" })
	w.Create(jt)
	w.ready(jt, "True/InForce")
	token := w.secret(t, jt)
	hash := token.SecretSHA256(w.tenant)
	got := controllertest.Query[string](w.Env, `SELECT concat_ws(' ', id, tenant, name, role, pool, site, uses, secret_sha256 = $2, expires_at IS NULL) FROM join_tokens WHERE object_uid = $1`,
		string(jt.UID), hash[:])
	if want := strings.Join([]string{token.ID, w.tenant, "first node gpu fra1 1000 t t"}, " "); got != want {
		t.Errorf("row is %q, want %q", got, want)
	}
	if n := controllertest.Query[int](w.Env, `SELECT count(*) FROM join_token_slots WHERE token_id = $1 AND uses_left BETWEEN 15 AND 16`, token.ID); n != 64 {
		t.Errorf("%d slots hold an even share, want 64", n)
	}
	if jt.Status.TokenID != token.ID || *jt.Status.UsesLeft != 1000 {
		t.Errorf("status is %+v", jt.Status)
	}
	var s corev1.Secret
	if err := w.Client.Get(t.Context(), client.ObjectKey{Namespace: w.tenant, Name: "first-token"}, &s); err != nil {
		t.Fatal(err)
	}
	if s.Immutable == nil || !*s.Immutable || !metav1.IsControlledBy(&s, jt) {
		t.Errorf("the Secret is not immutable and the JoinToken's: %+v", s.ObjectMeta)
	}
	// Nothing but the Secret has the secret.
	secret := strings.Split(token.Text(), "_")[2]
	if n := controllertest.Query[int](w.Env, `SELECT count(*) FROM audit_log WHERE detail::text LIKE '%' || $1 || '%'`, secret); n != 0 {
		t.Error("the audit holds the secret")
	}

	// Applied again: nothing changes.
	before := jt.ResourceVersion
	w.Patch(jt, func() { jt.Spec.Uses = 1000 })
	w.ready(jt, "True/InForce")
	if jt.ResourceVersion != before || w.secret(t, jt).Text() != token.Text() {
		t.Error("applying it again changed something")
	}
}

func TestSpecIsRefusedOrFollowed(t *testing.T) {
	w := setup(t)
	for name, change := range map[string]func(*v1alpha1.JoinToken){
		"more uses than a million": func(jt *v1alpha1.JoinToken) { jt.Spec.Uses = 1_000_001 },
		"negative uses":            func(jt *v1alpha1.JoinToken) { jt.Spec.Uses = -1 },
		"a negative ttl":           func(jt *v1alpha1.JoinToken) { jt.Spec.TTL = &metav1.Duration{Duration: -time.Hour} },
		"a token id without hash":  func(jt *v1alpha1.JoinToken) { jt.Spec.TokenID = "abcdefghijkl" },
		"an unknown role":          func(jt *v1alpha1.JoinToken) { jt.Spec.Role = "admin" },
	} {
		if err := w.Client.Create(t.Context(), w.token("bad", change)); !apierrors.IsInvalid(err) {
			t.Errorf("%s: %v, want Invalid", name, err)
		}
	}
	// The type leaves out a zero; kubectl does not.
	zero := map[string]any{"apiVersion": v1alpha1.GroupVersion.String(), "kind": "JoinToken",
		"metadata": map[string]any{"name": "zero", "namespace": w.tenant}, "spec": map[string]any{"pool": "gpu", "uses": int64(0)}}
	if err := w.Client.Create(t.Context(), unstructuredOf(zero)); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "spec.uses") {
		t.Errorf("uses: 0: %v, want Invalid for spec.uses", err)
	}

	jt := w.token("changing", func(jt *v1alpha1.JoinToken) { jt.Spec.Uses = 3 })
	w.Create(jt)
	w.ready(jt, "True/InForce")
	for name, change := range map[string]func(*v1alpha1.JoinToken){
		"spec.pool is immutable": func(jt *v1alpha1.JoinToken) { jt.Spec.Pool = "cpu" },
		"spec.role is immutable": func(jt *v1alpha1.JoinToken) { jt.Spec.Role = "site" },
		"spec.uses may grow":     func(jt *v1alpha1.JoinToken) { jt.Spec.Uses = 2 },
		"spec.site is immutable": func(jt *v1alpha1.JoinToken) { jt.Spec.Site = "fra1" },
	} {
		changed := jt.DeepCopy()
		change(changed)
		if err := w.Client.Update(t.Context(), changed); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), name) {
			t.Errorf("%v, want Invalid: %s", err, name)
		}
	}

	// One use is spent, then uses grow past the number of slots.
	w.Exec(`UPDATE join_token_slots SET uses_left = 0, last_used_at = now() WHERE token_id = $1 AND slot = 0`, jt.Status.TokenID)
	w.Patch(jt, func() { jt.Spec.Uses = 200 })
	w.ready(jt, "True/InForce")
	if left := usesLeft(w, jt.Status.TokenID); left != 199 || *jt.Status.UsesLeft != 199 || jt.Status.LastUsedAt == nil {
		t.Errorf("%d uses are left and the status says %+v, want 199", left, jt.Status)
	}
	if n := controllertest.Query[int](w.Env, `SELECT count(*) FROM join_token_slots WHERE token_id = $1 AND uses_left > 0`, jt.Status.TokenID); n != 64 {
		t.Errorf("%d slots have uses, want 64", n)
	}

	// Expiry moves into the past and back.
	past, future := metav1.NewTime(time.Now().Add(-time.Minute).Truncate(time.Second)), metav1.NewTime(time.Now().Add(time.Hour).Truncate(time.Second))
	w.Patch(jt, func() { jt.Spec.ExpiresAt = &past })
	w.ready(jt, "False/TokenExpired")
	w.Patch(jt, func() { jt.Spec.ExpiresAt = &future })
	w.ready(jt, "True/InForce")
	if got := controllertest.Query[time.Time](w.Env, `SELECT expires_at FROM join_tokens WHERE id = $1`, jt.Status.TokenID); !got.Equal(future.Time) {
		t.Errorf("the row expires at %s, want %s", got, future)
	}
}

func TestUsesAreSeenAndSpent(t *testing.T) {
	w := setup(t)
	jt := w.token("once")
	w.Create(jt)
	w.ready(jt, "True/InForce")
	w.Exec(`UPDATE join_token_slots SET uses_left = 0, last_used_at = now() WHERE token_id = $1`, jt.Status.TokenID)
	w.Exec(`INSERT INTO events (type, tenant, node_id, data) VALUES ('node.joined', $1, 'n-x', jsonb_build_object('tokenID', $2::text))`, w.tenant, jt.Status.TokenID)
	w.Notify()
	w.ready(jt, "False/Spent")
	if *jt.Status.UsesLeft != 0 || jt.Status.LastUsedAt == nil {
		t.Errorf("status is %+v", jt.Status)
	}
	w.Patch(jt, func() { jt.Spec.Uses = 2 })
	w.ready(jt, "True/InForce")
}

func TestRefusalsAndJoinsAreEventsOnTheJoinToken(t *testing.T) {
	e := controllertest.New(t)
	w := &world{Env: e, tenant: e.Tenant()}
	e.Pool(w.tenant, "gpu")
	w.stop = w.Run(func(mgr ctrl.Manager, feed *outbox.Feed) error {
		recorder := mgr.GetEventRecorder("join-manager")
		feed.Observe((&outbox.Announcer{DB: w.Manager, Recorder: recorder, Logger: controllertest.Logger(t)}).Observe)
		return (&jointoken.Reconciler{
			Client: mgr.GetClient(), Live: w.Client, DB: w.Manager, Feed: feed, Recorder: recorder, SkipNameValidation: true,
		}).SetupWithManager(mgr)
	})
	jt := w.token("watched")
	w.Create(jt)
	w.ready(jt, "True/InForce")
	for _, reason := range []string{"join-token:spent", "join-token:expired"} {
		w.Exec(`INSERT INTO events (type, tenant, data) VALUES ('security.join.refused', $1, jsonb_build_object('reason', $2::text, 'tokenID', $3::text, 'csrSHA256', 'c0ffee'))`,
			w.tenant, reason, jt.Status.TokenID)
	}
	w.Exec(`INSERT INTO events (type, tenant, node_id, data) VALUES ('node.joined', $1, 'n-1', jsonb_build_object('tokenID', $2::text))`, w.tenant, jt.Status.TokenID)
	w.Exec(`INSERT INTO events (type, tenant, data) VALUES ('security.join.refused', $1, '{"reason": "join-token:malformed"}')`, w.tenant)
	w.Notify()
	secret := strings.Split(w.secret(t, jt).Text(), "_")[2]
	for object, wants := range map[string][]string{
		"JoinToken/watched":     {"join-token:spent", "join-token:expired", "joined as FleetNode n-1"},
		"Namespace/" + w.tenant: {"join-token:malformed"},
	} {
		for _, want := range wants {
			w.Eventually(func(ctx context.Context) error {
				var events corev1.EventList
				if err := w.Client.List(ctx, &events, client.InNamespace(w.tenant)); err != nil {
					return err
				}
				for _, ev := range events.Items {
					if strings.Contains(ev.Message, secret) {
						t.Errorf("an Event tells the secret")
					}
					if ev.InvolvedObject.Kind+"/"+ev.InvolvedObject.Name == object && strings.Contains(ev.Message, want) &&
						(ev.InvolvedObject.Kind != "JoinToken" || ev.InvolvedObject.UID == jt.UID) {
						return nil
					}
				}
				return fmt.Errorf("no Event on %s that says %q", object, want)
			})
		}
	}
}

func TestExpiredAtCreationNeverIsInForce(t *testing.T) {
	w := setup(t)
	past := metav1.NewTime(time.Now().Add(-time.Hour))
	jt := w.token("late", func(jt *v1alpha1.JoinToken) { jt.Spec.ExpiresAt = &past })
	w.Create(jt)
	w.ready(jt, "False/TokenExpired")
	if n := controllertest.Query[int](w.Env, `SELECT count(*) FROM join_tokens`); n != 0 || jt.Status.SecretRef != nil {
		t.Errorf("%d rows, status %+v", n, jt.Status)
	}
}

func TestTTLCountsFromCreation(t *testing.T) {
	w := setup(t)
	jt := w.token("brief", func(jt *v1alpha1.JoinToken) { jt.Spec.TTL = &metav1.Duration{Duration: time.Hour} })
	w.Create(jt)
	w.ready(jt, "True/InForce")
	want := jt.CreationTimestamp.Add(time.Hour)
	if got := controllertest.Query[time.Time](w.Env, `SELECT expires_at FROM join_tokens`); !got.Equal(want) || !jt.Status.ExpiresAt.Equal(&metav1.Time{Time: want}) {
		t.Errorf("expires at %s and the status says %s, want %s", got, jt.Status.ExpiresAt, want)
	}
	w.DB.SetNow(t, want.Add(time.Second))
	w.ready(jt, "False/TokenExpired")
}

func TestWaitsForPoolAndTenant(t *testing.T) {
	w := setup(t)
	jt := w.token("early", func(jt *v1alpha1.JoinToken) { jt.Spec.Pool = "later" })
	w.Create(jt)
	w.ready(jt, "False/PoolMissing")
	w.Pool(w.tenant, "later")
	w.ready(jt, "True/InForce")

	ns := w.Namespace()
	w.Pool(ns.Name, "gpu")
	other := w.token("homeless", func(jt *v1alpha1.JoinToken) { jt.Namespace = ns.Name })
	w.Create(other)
	w.ready(other, "False/NotATenant")
	w.Exec(`INSERT INTO tenants (name, uid, state) VALUES ($1, 'the-one-before', 'active')`, ns.Name)
	w.ready(other, "False/TenantBlocked")
	w.Exec(`UPDATE tenants SET uid = $2 WHERE name = $1`, ns.Name, string(ns.UID))
	w.ready(other, "True/InForce")
}

func TestForeignSecretIsNotTouched(t *testing.T) {
	w := setup(t)
	foreign := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.tenant, Name: "taken-token"}, Data: map[string][]byte{"token": []byte(text.Generate().Text())}}
	w.Create(foreign)
	jt := w.token("taken")
	w.Create(jt)
	w.ready(jt, "False/SecretConflict")
	if n := controllertest.Query[int](w.Env, `SELECT count(*) FROM join_tokens`); n != 0 {
		t.Errorf("%d rows were made", n)
	}
	var s corev1.Secret
	if err := w.Client.Get(t.Context(), client.ObjectKeyFromObject(foreign), &s); err != nil || s.ResourceVersion != foreign.ResourceVersion {
		t.Errorf("the foreign Secret was changed (%v)", err)
	}
}

func TestLostSecretIsNeverMadeAnew(t *testing.T) {
	w := setup(t)
	jt := w.token("careless")
	w.Create(jt)
	w.ready(jt, "True/InForce")
	id := jt.Status.TokenID
	w.Delete(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.tenant, Name: "careless-token"}})
	w.Eventually(func(ctx context.Context) error {
		if err := w.Client.Get(ctx, client.ObjectKeyFromObject(jt), jt); err != nil {
			return err
		}
		return controllertest.Condition(jt.Status.Conditions, v1alpha1.ConditionSecretLost, "True/SecretLost")
	})
	// The database is set back too: still no second secret.
	w.Exec(`DELETE FROM join_tokens`)
	w.ready(jt, "False/SecretLost")
	err := w.Client.Get(t.Context(), client.ObjectKey{Namespace: w.tenant, Name: "careless-token"}, &corev1.Secret{})
	if !apierrors.IsNotFound(err) || jt.Status.TokenID != id {
		t.Errorf("a Secret was made again: %v, token %s was %s", err, jt.Status.TokenID, id)
	}
}

func TestBroughtTokenNeedsNoSecretAndStaysRevoked(t *testing.T) {
	w := setup(t)
	token := text.Generate()
	hash := token.SecretSHA256(w.tenant)
	bring := func(jt *v1alpha1.JoinToken) {
		jt.Spec.TokenID, jt.Spec.SecretSHA256 = token.ID, fmt.Sprintf("%x", hash)
	}
	jt := w.token("gitops", bring)
	w.Create(jt)
	w.ready(jt, "True/InForce")
	if jt.Status.SecretRef != nil || !controllertest.Query[bool](w.Env, `SELECT secret_sha256 = $1 FROM join_tokens WHERE id = $2`, hash[:], token.ID) {
		t.Errorf("status is %+v", jt.Status)
	}
	var secrets corev1.SecretList
	if err := w.Client.List(t.Context(), &secrets, client.InNamespace(w.tenant)); err != nil || len(secrets.Items) != 0 {
		t.Errorf("Secrets: %v %v", secrets.Items, err)
	}
	// What was revoked does not come back, under whatever name or namespace.
	w.Delete(jt)
	w.gone(jt)
	again := w.token("gitops", bring)
	w.Create(again)
	w.ready(again, "False/SecretConflict")
	if !controllertest.Query[bool](w.Env, `SELECT bool_and(revoked_at IS NOT NULL) FROM join_tokens`) {
		t.Error("the token is in force again")
	}
}

func (w *world) gone(o client.Object) {
	w.Eventually(func(ctx context.Context) error {
		err := w.Client.Get(ctx, client.ObjectKeyFromObject(o), o.DeepCopyObject().(client.Object))
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("it is still there (%v)", err)
	})
}

func TestDeletionRevokesBeforeTheObjectGoes(t *testing.T) {
	w := setup(t)
	jt := w.token("short")
	w.Create(jt)
	w.ready(jt, "True/InForce")
	old := w.secret(t, jt)
	w.Delete(jt)
	w.gone(jt)
	if !controllertest.Query[bool](w.Env, `SELECT revoked_at IS NOT NULL FROM join_tokens WHERE id = $1`, old.ID) {
		t.Error("the object is gone and its row is in force")
	}
	if n := controllertest.Query[int](w.Env, `SELECT count(*) FROM audit_log WHERE action = 'token.revoke' AND detail->>'tokenID' = $1`, old.ID); n != 1 {
		t.Errorf("%d audit rows of the revocation, want 1", n)
	}
	w.gone(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.tenant, Name: "short-token"}})

	// The same name again is another token.
	again := w.token("short")
	w.Create(again)
	w.ready(again, "True/InForce")
	if w.secret(t, again).ID == old.ID {
		t.Error("the token came back")
	}

	// Torn away while nobody looks: revoked all the same.
	w.stop()
	w.Patch(again, func() { again.Finalizers = nil })
	w.Delete(again)
	w.gone(again)
	w.run(w.Client)
	w.Eventually(func(context.Context) error {
		if n := controllertest.Query[int](w.Env, `SELECT count(*) FROM join_tokens WHERE revoked_at IS NULL`); n != 0 {
			return fmt.Errorf("%d tokens are in force", n)
		}
		return nil
	})
}

func TestNamespaceGoesWithItsTokens(t *testing.T) {
	w := setup(t)
	jt := w.token("doomed")
	w.Create(jt)
	w.ready(jt, "True/InForce")
	// The right to the namespace's Secrets is gone before its objects are.
	w.stop()
	denied := forbidding(w.Client)
	w.run(denied)
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.tenant}}
	w.Delete(ns)
	w.gone(ns)
	if !controllertest.Query[bool](w.Env, `SELECT bool_and(revoked_at IS NOT NULL) FROM join_tokens`) {
		t.Error("the namespace is gone and its token is in force")
	}
}

// forbidding is a client that is refused every Secret.
func forbidding(c client.Client) client.Client {
	refuse := apierrors.NewForbidden(corev1.Resource("secrets"), "", errors.New("no RoleBinding"))
	return interceptor.NewClient(withoutWatch{c}, interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
			if _, secret := o.(*corev1.Secret); secret {
				return refuse
			}
			return c.Get(ctx, key, o, opts...)
		},
		Create: func(context.Context, client.WithWatch, client.Object, ...client.CreateOption) error {
			return refuse
		},
	})
}

// A row that another manager made, for an object that this one's cache has not
// seen yet, is no orphan.
func TestACacheThatLagsRevokesNothing(t *testing.T) {
	w := setup(t)
	jt := w.token("fresh")
	w.Create(jt)
	w.ready(jt, "True/InForce")
	w.stop()
	// The manager's cache does not know the object; the API server does.
	w.Run(func(mgr ctrl.Manager, feed *outbox.Feed) error {
		blind := interceptor.NewClient(withoutWatch{mgr.GetClient()}, interceptor.Funcs{
			Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
				if _, token := o.(*v1alpha1.JoinToken); token {
					return apierrors.NewNotFound(corev1.Resource("jointokens"), key.Name)
				}
				return c.Get(ctx, key, o, opts...)
			},
		})
		r := &jointoken.Reconciler{Client: blind, Live: w.Client, DB: w.Manager, Feed: feed, SkipNameValidation: true}
		for range 3 {
			if _, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(jt)}); err != nil {
				t.Error(err)
			}
		}
		return nil
	})
	if !controllertest.Query[bool](w.Env, `SELECT bool_and(revoked_at IS NULL) FROM join_tokens`) {
		t.Error("the token of an object that exists was revoked")
	}
}

func TestWaitsForTheRightToMakeSecrets(t *testing.T) {
	e := controllertest.New(t)
	w := &world{Env: e, tenant: e.Tenant()}
	e.Pool(w.tenant, "gpu")
	w.run(forbidding(e.Client))
	jt := w.token("patient")
	w.Create(jt)
	w.ready(jt, "False/NotATenant")
	w.stop()
	w.run(e.Client)
	w.ready(jt, "True/InForce")
}

// TestKilledAtAnyLine lets the manager die before each of its writes, in turn.
func TestKilledAtAnyLine(t *testing.T) {
	e := controllertest.New(t)
	w := &world{Env: e, tenant: e.Tenant()}
	e.Pool(w.tenant, "gpu")
	// The Secret is made, and the manager dies before it hears of it.
	died := errors.New("killed")
	created := 0
	w.run(interceptor.NewClient(withoutWatch{e.Client}, interceptor.Funcs{
		Create: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.CreateOption) error {
			created++
			return errors.Join(c.Create(ctx, o, opts...), died)
		},
	}))
	jt := w.token("sturdy")
	w.Create(jt)
	w.ready(jt, "True/InForce")
	if created != 1 || w.secret(t, jt).ID != jt.Status.TokenID {
		t.Errorf("%d Secrets were made for one token", created)
	}
	// The row is stored, and the manager dies before the status.
	w.stop()
	w.Exec(`DELETE FROM join_tokens`)
	w.Exec(`DELETE FROM join_token_slots`)
	w.run(e.Client)
	w.Eventually(func(context.Context) error {
		if n := usesLeft(w, jt.Status.TokenID); n != 1 {
			return fmt.Errorf("%d uses, want 1", n)
		}
		return nil
	})
}
