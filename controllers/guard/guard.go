// Package guard watches over the admission policies that keep decisions honest:
// while one of them or its binding is missing or altered, no decision is recorded.
//
// It tells apart two questions. Whether decisions are guarded now is a comparison
// of what is installed with what this release needs. Since when they are is told
// by the policies themselves: a policy that was deleted comes back with another
// uid, one that was altered and put right has another generation and a newer time
// of its fields. So nothing has to be remembered anywhere, and a manager that was
// down knows as much as one that was not.
package guard

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/better-compute/join-operator/api/v1alpha1"
)

// Settle is how long after its last change a policy is taken to be in force in
// every API server, the clocks of which may differ a little.
const Settle = 5 * time.Second

// State is how decisions are guarded at one moment.
type State struct {
	// Problems says what is missing or altered; none means guarded.
	Problems []string
	// Fingerprint names this very set of policies: it changes whenever one of them
	// was away or altered in between. It is empty where there are problems.
	Fingerprint string
	// Since is when the newest change of any of them was made, by the API server's
	// clock. Zero where there are problems.
	Since time.Time
}

// Guarded reports whether all policies and bindings are as they must be.
func (s State) Guarded() bool { return len(s.Problems) == 0 && s.Fingerprint != "" }

// Settled reports whether the policies have been in force for long enough that no
// API server still decides without them.
func (s State) Settled(now time.Time) bool { return s.Guarded() && now.Sub(s.Since) >= Settle }

// Guard compares what is installed with what this release needs.
type Guard struct {
	Client          client.Reader
	Expected        Expected
	Recorder        events.EventRecorder
	Logger          *slog.Logger
	SystemNamespace string
	// Metrics may be nil.
	Metrics prometheus.Registerer
	// SkipNameValidation lets tests run several managers in one process.
	SkipNameValidation bool

	guarded prometheus.Gauge
	mu      sync.Mutex
	told    string // the problems that were told last
}

// SetupWithManager adds the controller that measures and tells; it runs on the
// leader. Who needs a State asks [Guard.Check].
func (g *Guard) SetupWithManager(mgr ctrl.Manager) error {
	g.guarded = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "join_admission_guarded",
		Help: "1 while the admission policies that guard decisions are as they must be; 0 while no decision is recorded.",
	})
	if g.Metrics != nil {
		if err := g.Metrics.Register(g.guarded); err != nil {
			return fmt.Errorf("register metrics: %w", err)
		}
	}
	return ctrl.NewControllerManagedBy(mgr).
		Named("guard").
		Watches(&admissionv1.ValidatingAdmissionPolicy{}, handler.EnqueueRequestsFromMapFunc(one), builder.WithPredicates(g.Ours())).
		Watches(&admissionv1.ValidatingAdmissionPolicyBinding{}, handler.EnqueueRequestsFromMapFunc(one), builder.WithPredicates(g.Ours())).
		WatchesRawSource(atStart).
		WithOptions(controller.Options{SkipNameValidation: &g.SkipNameValidation}).
		Complete(reconcile.Func(g.reconcile))
}

// Ours passes the policies and bindings that guard decisions, when they come, go
// or change in what they say.
func (g *Guard) Ours() predicate.Predicate {
	return predicate.And[client.Object](
		predicate.NewPredicateFuncs(func(o client.Object) bool {
			_, policy := g.Expected.policies[o.GetName()]
			_, binding := g.Expected.bindings[o.GetName()]
			return policy || binding
		}),
		predicate.Or[client.Object](predicate.GenerationChangedPredicate{}, uidChanged),
	)
}

// reconcile measures, and tells each change once.
func (g *Guard) reconcile(ctx context.Context, _ reconcile.Request) (reconcile.Result, error) {
	s, err := g.Check(ctx, g.Client)
	if err != nil {
		return reconcile.Result{}, err
	}
	g.tell(ctx, s)
	return reconcile.Result{RequeueAfter: 5 * time.Minute}, nil
}

func (g *Guard) tell(ctx context.Context, s State) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if s.Guarded() {
		g.guarded.Set(1)
	} else {
		g.guarded.Set(0)
	}
	problems := strings.Join(s.Problems, "; ")
	if problems == g.told {
		return
	}
	g.told = problems
	about := &corev1.ObjectReference{APIVersion: "v1", Kind: "Namespace", Namespace: g.SystemNamespace, Name: g.SystemNamespace}
	if s.Guarded() {
		g.Logger.InfoContext(ctx, "decisions are guarded again", "since", s.Since)
		g.Recorder.Eventf(about, nil, corev1.EventTypeNormal, v1alpha1.ReasonGuarded, "Guard", "The admission policies are as they must be: decisions are recorded again")
		return
	}
	g.Logger.ErrorContext(ctx, "decisions are not guarded, none is recorded", "problems", problems)
	g.Recorder.Eventf(about, nil, corev1.EventTypeWarning, v1alpha1.ReasonUnguarded, "Guard", "No decision is recorded: %s", brief(problems))
}

// brief fits a text into an Event.
func brief(s string) string {
	const most = 900
	if len(s) > most {
		return s[:most] + "…"
	}
	return s
}

// Check compares what the reader sees. A cached reader does for what is shown;
// before a decision is recorded, the reader must be a live one. An error means
// that nothing is known, not that decisions are unguarded.
func (g *Guard) Check(ctx context.Context, reader client.Reader) (State, error) {
	var s State
	identity := sha256.New()
	seen := func(o client.Object, kind string) {
		_, _ = fmt.Fprintf(identity, // a hash does not fail
			"%s\x00%s\x00%s\x00%d\x00", kind, o.GetName(), o.GetUID(), o.GetGeneration())
		s.Since = latest(s.Since, changed(o))
	}
	for _, name := range slices.Sorted(maps.Keys(g.Expected.policies)) {
		var p admissionv1.ValidatingAdmissionPolicy
		switch err := reader.Get(ctx, client.ObjectKey{Name: name}, &p); {
		case apierrors.IsNotFound(err), err == nil && !p.DeletionTimestamp.IsZero():
			s.Problems = append(s.Problems, "ValidatingAdmissionPolicy "+name+" is missing")
		case err != nil:
			return State{}, fmt.Errorf("get ValidatingAdmissionPolicy %s: %w", name, err)
		case !equality.Semantic.DeepEqual(normalPolicy(p.Spec), g.Expected.policies[name]):
			s.Problems = append(s.Problems, "ValidatingAdmissionPolicy "+name+" is altered")
		default:
			seen(&p, "policy")
		}
	}
	for _, name := range slices.Sorted(maps.Keys(g.Expected.bindings)) {
		var b admissionv1.ValidatingAdmissionPolicyBinding
		switch err := reader.Get(ctx, client.ObjectKey{Name: name}, &b); {
		case apierrors.IsNotFound(err), err == nil && !b.DeletionTimestamp.IsZero():
			s.Problems = append(s.Problems, "ValidatingAdmissionPolicyBinding "+name+" is missing")
		case err != nil:
			return State{}, fmt.Errorf("get ValidatingAdmissionPolicyBinding %s: %w", name, err)
		case !equality.Semantic.DeepEqual(normalBinding(b.Spec), g.Expected.bindings[name]):
			s.Problems = append(s.Problems, "ValidatingAdmissionPolicyBinding "+name+" is altered")
		default:
			seen(&b, "binding")
		}
	}
	if len(s.Problems) > 0 {
		return State{Problems: s.Problems}, nil
	}
	s.Fingerprint = hex.EncodeToString(identity.Sum(nil)[:8])
	return s, nil
}

// changed is when an object was made or last written, its status aside.
func changed(o client.Object) time.Time {
	at := o.GetCreationTimestamp().Time
	for _, f := range o.GetManagedFields() {
		if f.Subresource == "" && f.Time != nil {
			at = latest(at, f.Time.Time)
		}
	}
	return at
}

func latest(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}
