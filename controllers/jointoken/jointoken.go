// Package jointoken makes the token of each JoinToken, puts it into force as a
// row, and revokes it before the object goes.
//
// The order is what makes it safe to be killed at any line: the finalizer, then
// the Secret, then the row from what the Secret holds. A Secret that is lost
// after that is a condition, never a new secret under the same token; a token
// that was revoked never comes back.
package jointoken

import (
	"context"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/controllers/conditions"
	"github.com/better-compute/join-operator/controllers/outbox"
	"github.com/better-compute/join-operator/controllers/tenancy"
)

const (
	// tenantWait is how soon to look again for a tenant or its RoleBinding.
	tenantWait = 2 * time.Second
	// conflictWait is how soon to look again at a Secret in the way.
	conflictWait = time.Minute
)

// Reconciler makes and revokes tokens.
type Reconciler struct {
	Client client.Client
	// Live works without a cache. It reads and creates Secrets: the manager may
	// touch those of tenants' namespaces alone, one namespace at a time, and may
	// watch none. And it looks again before a token without an object is revoked.
	Live     client.Client
	DB       *pgxpool.Pool
	Feed     *outbox.Feed
	Recorder events.EventRecorder
	// Resync is how often a token is looked at though nothing was heard of it;
	// 10 min by default.
	Resync time.Duration
	// SkipNameValidation lets tests run several managers in one process.
	SkipNameValidation bool

	// checked is when the Secret of a JoinToken was looked at last, by its uid
	// (types.UID to time.Time): a token that is used a thousand times is not worth
	// a thousand reads of it.
	checked sync.Map
}

// Reconcile brings one JoinToken's Secret, row and status together.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var token v1alpha1.JoinToken
	switch err := r.Client.Get(ctx, req.NamespacedName, &token); {
	case apierrors.IsNotFound(err):
		return ctrl.Result{}, r.revokeOrphans(ctx, req.NamespacedName, "")
	case err != nil:
		return ctrl.Result{}, fmt.Errorf("get JoinToken: %w", err)
	}
	if !token.DeletionTimestamp.IsZero() {
		return ctrl.Result{}, r.finalize(ctx, &token)
	}
	unheld := token.DeepCopy()
	if controllerutil.AddFinalizer(&token, v1alpha1.TokenFinalizer) {
		patch := client.MergeFromWithOptions(unheld, client.MergeFromWithOptimisticLock{})
		if err := r.Client.Patch(ctx, &token, patch); err != nil {
			return ctrl.Result{}, fmt.Errorf("hold JoinToken %s: %w", req, err)
		}
	}
	if err := r.revokeOrphans(ctx, req.NamespacedName, token.UID); err != nil {
		return ctrl.Result{}, err
	}
	before := token.DeepCopy()
	result, err := r.reconcile(ctx, &token)
	if err != nil && meta.FindStatusCondition(token.Status.Conditions, v1alpha1.ConditionReady) == nil {
		of(&token).Unknown(v1alpha1.ConditionReady, v1alpha1.ReasonDatabase, "trying again: see the manager's log")
	}
	return result, errors.Join(err, conditions.Patch(ctx, r.Client, before, &token))
}

// revokeOrphans revokes tokens whose object is gone: somebody tore the finalizer
// off, or the row outlived its object. A revocation is final and a cache may lag
// behind another manager's work, so the object is looked at as it is now.
func (r *Reconciler) revokeOrphans(ctx context.Context, name types.NamespacedName, seen types.UID) error {
	found, err := hasOrphans(ctx, r.DB, name, seen)
	if err != nil || !found {
		return err
	}
	var live v1alpha1.JoinToken
	if err := r.Live.Get(ctx, name, &live); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("get JoinToken: %w", err)
	}
	return revokeAllBut(ctx, r.DB, name, live.UID)
}

// finalize revokes the row, then lets the object go. It needs the database
// alone: in a namespace that is going, the right to its Secrets is gone already.
func (r *Reconciler) finalize(ctx context.Context, t *v1alpha1.JoinToken) error {
	if !controllerutil.ContainsFinalizer(t, v1alpha1.TokenFinalizer) {
		return nil
	}
	if err := revokeAllBut(ctx, r.DB, client.ObjectKeyFromObject(t), ""); err != nil {
		return err
	}
	r.checked.Delete(t.UID)
	before := t.DeepCopy()
	controllerutil.RemoveFinalizer(t, v1alpha1.TokenFinalizer)
	patch := client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
	return client.IgnoreNotFound(r.Client.Patch(ctx, t, patch))
}

// reconcile sets the status; each step ends it or falls through to the next.
func (r *Reconciler) reconcile(ctx context.Context, t *v1alpha1.JoinToken) (ctrl.Result, error) {
	w, err := readWorld(ctx, r.DB, t)
	if err != nil {
		return ctrl.Result{}, err
	}
	expiry := expiresAt(t)
	t.Status.ExpiresAt = expiry
	if w.row == nil {
		return r.enforce(ctx, t, w)
	}
	return r.keep(ctx, t, w)
}

// enforce makes the Secret and puts the token into force, once all that it needs
// is there.
func (r *Reconciler) enforce(ctx context.Context, t *v1alpha1.JoinToken, w world) (ctrl.Result, error) {
	standing, err := tenancy.Of(ctx, r.Client, r.DB, t.Namespace)
	if err != nil {
		return ctrl.Result{}, err
	}
	switch {
	case !standing.InForce:
		of(t).False(v1alpha1.ConditionReady, standing.Reason, "%s", standing.Message)
		return ctrl.Result{RequeueAfter: tenantWait}, nil
	case expired(t, w.now):
		of(t).False(v1alpha1.ConditionReady, v1alpha1.ReasonTokenExpired, "expired before it was in force: move spec.expiresAt or make another JoinToken")
		return ctrl.Result{}, nil
	case !w.poolExists:
		of(t).False(v1alpha1.ConditionReady, v1alpha1.ReasonPoolMissing, "waiting for FleetPool %s in namespace %s: the token is made when it exists", t.Spec.Pool, t.Namespace)
		return ctrl.Result{RequeueAfter: r.Resync}, nil
	}
	id, hash, result, err := r.token(ctx, t)
	if err != nil || id == "" {
		return result, err
	}
	err = insert(ctx, r.DB, t, id, hash, timeOf(expiresAt(t)))
	switch {
	case errors.Is(err, errIDTaken):
		message := fmt.Sprintf("token id %s is or was another JoinToken's: what was revoked or spent does not come back; bring a new tokenID", id)
		if t.Spec.TokenID == "" {
			message = fmt.Sprintf("Secret %s holds a token that is or was another JoinToken's: delete the JoinToken and make it anew", SecretName(t.Name))
		}
		r.refuse(t, v1alpha1.ReasonSecretConflict, message)
		return ctrl.Result{RequeueAfter: conflictWait}, nil
	case err != nil:
		return ctrl.Result{}, err
	}
	if w, err = readWorld(ctx, r.DB, t); err != nil {
		return ctrl.Result{}, err
	}
	if w.row == nil {
		return ctrl.Result{}, errors.New("the token's row went as soon as it was made")
	}
	return r.report(t, w)
}

// token returns the id and hash that go into the row: those brought by the spec,
// or those of what the Secret holds. An empty id ends the reconciliation.
func (r *Reconciler) token(ctx context.Context, t *v1alpha1.JoinToken) (string, []byte, ctrl.Result, error) {
	if t.Spec.TokenID != "" {
		hash, err := hex.DecodeString(t.Spec.SecretSHA256)
		return t.Spec.TokenID, hash, ctrl.Result{}, err
	}
	token, err := readSecret(ctx, r.Live, t)
	if errors.Is(err, errSecretMissing) {
		if t.Status.TokenID != "" {
			// The database lost the row, and nobody has the secret any more.
			message := r.lost(t, fmt.Sprintf("Secret %s is gone, and so is its row", SecretName(t.Name)))
			of(t).False(v1alpha1.ConditionReady, v1alpha1.ReasonSecretLost, "%s", message)
			return "", nil, ctrl.Result{RequeueAfter: r.Resync}, nil
		}
		token, err = makeSecret(ctx, r.Live, t)
	}
	switch {
	case apierrors.IsForbidden(err):
		of(t).False(v1alpha1.ConditionReady, v1alpha1.ReasonNotATenant, "waiting for RoleBinding join-operator-tokens in this namespace, by which the manager may make the Secret")
		return "", nil, ctrl.Result{RequeueAfter: tenantWait}, nil
	case errors.Is(err, errSecretForeign), errors.Is(err, errSecretGarbled):
		r.refuse(t, v1alpha1.ReasonSecretConflict, fmt.Sprintf("Secret %s: %v; rename the JoinToken, or move the Secret out of the way", SecretName(t.Name), err))
		return "", nil, ctrl.Result{RequeueAfter: conflictWait}, nil
	case err != nil:
		return "", nil, ctrl.Result{}, err
	}
	hash := token.SecretSHA256(t.Namespace)
	return token.ID, hash[:], ctrl.Result{}, nil
}

// keep follows what may change of a token in force, and looks after its Secret.
func (r *Reconciler) keep(ctx context.Context, t *v1alpha1.JoinToken, w world) (ctrl.Result, error) {
	if w.row.revoked {
		t.Status.TokenID = w.row.id
		of(t).False(v1alpha1.ConditionReady, v1alpha1.ReasonRevoked, "the token is revoked, which is final: make another JoinToken")
		return ctrl.Result{}, nil
	}
	changed := false
	if uses(t) > w.row.uses {
		if err := grow(ctx, r.DB, w.row.id, uses(t)); err != nil {
			return ctrl.Result{}, err
		}
		changed = true
	}
	if to := timeOf(expiresAt(t)); !equalTime(to, w.row.expiresAt) {
		if err := moveExpiry(ctx, r.DB, w.row.id, to); err != nil {
			return ctrl.Result{}, err
		}
		changed = true
	}
	if changed {
		var err error
		if w, err = readWorld(ctx, r.DB, t); err != nil {
			return ctrl.Result{}, err
		}
		if w.row == nil {
			return ctrl.Result{}, errors.New("the token's row is gone")
		}
	}
	if err := r.checkSecret(ctx, t, w); err != nil {
		return ctrl.Result{}, err
	}
	return r.report(t, w)
}

// checkSecret sets SecretLost where the Secret no longer holds the token. The
// token stays in force: who has it may use it.
func (r *Reconciler) checkSecret(ctx context.Context, t *v1alpha1.JoinToken, w world) error {
	if t.Spec.TokenID != "" {
		return nil
	}
	if last, ok := r.checked.Load(t.UID); ok && time.Since(last.(time.Time)) < r.Resync/2 {
		return nil
	}
	r.checked.Store(t.UID, time.Now())
	token, err := readSecret(ctx, r.Live, t)
	switch {
	case errors.Is(err, errSecretMissing), errors.Is(err, errSecretForeign), errors.Is(err, errSecretGarbled):
		r.lost(t, fmt.Sprintf("Secret %s: %v", SecretName(t.Name), err))
		return nil
	case apierrors.IsForbidden(err):
		return nil // the namespace's RoleBinding is being made, or it is going
	case err != nil:
		return err
	}
	hash := token.SecretSHA256(t.Namespace)
	if subtle.ConstantTimeCompare(hash[:], w.row.secretSHA256) != 1 {
		r.lost(t, fmt.Sprintf("Secret %s holds another token", SecretName(t.Name)))
		return nil
	}
	of(t).Drop(v1alpha1.ConditionSecretLost)
	return nil
}

// report writes what the row says into the status.
func (r *Reconciler) report(t *v1alpha1.JoinToken, w world) (ctrl.Result, error) {
	t.Status.TokenID = w.row.id
	if t.Spec.TokenID == "" {
		t.Status.SecretRef = &v1alpha1.SecretReference{Name: SecretName(t.Name)}
	}
	left := w.row.usesLeft
	t.Status.UsesLeft = &left
	if w.row.lastUsedAt != nil {
		// Seconds are what the API keeps; more would be a change every time.
		last := metav1.NewTime(w.row.lastUsedAt.Truncate(time.Second))
		t.Status.LastUsedAt = &last
	}
	next := r.Resync
	switch {
	case expired(t, w.now):
		of(t).False(v1alpha1.ConditionReady, v1alpha1.ReasonTokenExpired, "expired: move spec.expiresAt or make another JoinToken")
	case left == 0:
		of(t).False(v1alpha1.ConditionReady, v1alpha1.ReasonSpent, "all %d uses are spent: raise spec.uses or make another JoinToken", uses(t))
	case !w.poolExists:
		of(t).False(v1alpha1.ConditionReady, v1alpha1.ReasonPoolMissing, "FleetPool %s is gone: joins are refused until there is one again", t.Spec.Pool)
	default:
		of(t).True(v1alpha1.ConditionReady, v1alpha1.ReasonInForce, "machines may join pool %s with it", t.Spec.Pool)
		if t.Status.ExpiresAt != nil {
			next = min(next, max(t.Status.ExpiresAt.Sub(w.now), time.Second))
		}
	}
	return ctrl.Result{RequeueAfter: next}, nil
}

// lost says so, once as an Event, and returns the condition's message.
func (r *Reconciler) lost(t *v1alpha1.JoinToken, message string) string {
	message += ": the token is not made again; if nobody has it, delete the JoinToken and make another"
	if of(t).True(v1alpha1.ConditionSecretLost, v1alpha1.ReasonSecretLost, "%s", message) {
		r.Recorder.Eventf(t, nil, corev1.EventTypeWarning, v1alpha1.ReasonSecretLost, "CheckSecret", "%s", message)
	}
	return message
}

// refuse says that a person must clear something away, once as an Event.
func (r *Reconciler) refuse(t *v1alpha1.JoinToken, reason, message string) {
	if of(t).False(v1alpha1.ConditionReady, reason, "%s", message) {
		r.Recorder.Eventf(t, nil, corev1.EventTypeWarning, reason, "MakeToken", "%s", message)
	}
}

func of(t *v1alpha1.JoinToken) conditions.Set {
	return conditions.Of(t, &t.Status.Conditions, &t.Status.ObservedGeneration)
}

// expiresAt is the expiry that the spec means: ttl counts from creation.
func expiresAt(t *v1alpha1.JoinToken) *metav1.Time {
	switch {
	case t.Spec.ExpiresAt != nil:
		return t.Spec.ExpiresAt
	case t.Spec.TTL != nil:
		at := metav1.NewTime(t.CreationTimestamp.Add(t.Spec.TTL.Duration).Truncate(time.Second))
		return &at
	}
	return nil
}

func expired(t *v1alpha1.JoinToken, now time.Time) bool {
	at := expiresAt(t)
	return at != nil && !now.Before(at.Time)
}

func timeOf(t *metav1.Time) *time.Time {
	if t == nil {
		return nil
	}
	return &t.Time
}

func equalTime(a, b *time.Time) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.Equal(*b)
}

func uses(t *v1alpha1.JoinToken) int32 { return max(t.Spec.Uses, 1) }

func role(t *v1alpha1.JoinToken) v1alpha1.Role {
	if t.Spec.Role == "" {
		return "node"
	}
	return t.Spec.Role
}
