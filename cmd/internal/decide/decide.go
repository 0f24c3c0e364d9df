package decide

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/api/v1alpha1"
)

// tries is how often a decision is sent while only bookkeeping changes under it.
const tries = 5

func (o *options) run(ctx context.Context, args []string) error {
	names, err := o.names(args)
	if err == nil {
		err = o.check()
	}
	if err != nil {
		return usageError{err}
	}
	if err := o.makePrinter(); err != nil {
		return usageError{err}
	}
	if err := o.connect(); err != nil {
		return err
	}
	requests, errs := o.find(ctx, names)
	if len(names) == 0 {
		if requests, err = o.undecided(ctx); err != nil {
			return err
		}
		if len(requests) == 0 {
			fmt.Fprintf(o.streams.ErrOut, "no undecided join requests in namespace %s\n", o.namespace)
			return nil
		}
	}
	asks := !o.yes && o.dryRun == "none"
	if o.all && asks {
		if err := o.confirmCount(requests); err != nil {
			return err
		}
		asks = false
	}
	me, err := o.whoAmI(ctx)
	if err != nil {
		return err
	}
	var decided []*v1alpha1.JoinRequest
	for i := range requests {
		r := &requests[i]
		err := o.decide(ctx, r, me, asks)
		if err == nil && o.waits() {
			decided = append(decided, r)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("joinrequest %s: %w", r.Name, err))
		}
	}
	return errors.Join(append(errs, o.await(ctx, decided)...)...)
}

// makePrinter makes one printer for all requests, so that what it prints is one stream.
func (o *options) makePrinter() (err error) {
	if o.dryRun != "none" {
		if err := o.printed.Complete("%s (" + o.dryRun + " dry run)"); err != nil {
			return err
		}
	}
	o.printer, err = o.printed.ToPrinter()
	return err
}

func (o *options) print(r *v1alpha1.JoinRequest) error { return o.printer.PrintObj(r, o.streams.Out) }

func (o *options) waits() bool { return o.wait && o.dryRun == "none" }

// decide shows one request, asks, and writes the decision.
func (o *options) decide(ctx context.Context, r *v1alpha1.JoinRequest, me v1alpha1.UserInfo, asks bool) error {
	if d := r.Spec.Decision; d != nil {
		return o.decided(r, d)
	}
	if o.verdict == v1alpha1.VerdictApproved && r.Spec.Pool == "" && o.pool == "" {
		return usageError{errors.New("the request names no pool, so say into which one: --pool")}
	}
	if asks {
		if err := o.confirm(r); err != nil {
			return err
		}
	}
	decision := &v1alpha1.Decision{Verdict: o.verdict, DecidedBy: me, Message: o.message, Pool: o.pool, Tenant: o.tenant}
	if o.dryRun == "client" {
		r.Spec.Decision = decision
		return o.print(r)
	}
	if err := o.send(ctx, r, decision); err != nil {
		if now, ok := errors.AsType[decidedError](err); ok {
			*r = *now.request
			return o.decided(r, r.Spec.Decision)
		}
		return err
	}
	if o.waits() {
		return nil
	}
	return o.print(r)
}

// decidedError is a request that somebody decided while it was shown.
type decidedError struct{ request *v1alpha1.JoinRequest }

func (decidedError) Error() string { return "it was decided meanwhile" }

// send writes the decision under the resourceVersion that was shown, so that what
// changed since is a conflict. Where nothing changed that a person goes by (the
// controllers count the others that wait, and the count falls with every decision) it
// is sent again under the new one.
func (o *options) send(ctx context.Context, r *v1alpha1.JoinRequest, decision *v1alpha1.Decision) error {
	opts := []client.PatchOption{client.FieldOwner("kubectl-" + o.verb())}
	if o.dryRun == "server" {
		opts = append(opts, client.DryRunAll)
	}
	for range tries {
		patch, err := json.Marshal(map[string]any{
			"metadata": map[string]any{"resourceVersion": r.ResourceVersion, "uid": r.UID},
			"spec":     map[string]any{"decision": decision},
		})
		if err != nil {
			return err
		}
		shown := r.DeepCopy()
		err = o.client.Patch(ctx, r, client.RawPatch(types.MergePatchType, patch), opts...)
		switch {
		case err == nil:
			return nil
		case apierrors.IsForbidden(err):
			return o.forbidden(ctx, err, o.needs(shown))
		case apierrors.IsNotFound(err):
			return conflictError{errors.New("it is gone since it was shown")}
		case !apierrors.IsConflict(err) && !apierrors.IsInvalid(err):
			return err
		}
		var now v1alpha1.JoinRequest
		switch getErr := o.client.Get(ctx, client.ObjectKeyFromObject(shown), &now); {
		case getErr != nil:
			return conflictError{fmt.Errorf("it changed since it was shown, and cannot be read again: %w", getErr)}
		case now.Spec.Decision != nil:
			return decidedError{&now}
		case !apierrors.IsConflict(err) && now.UID == shown.UID:
			return err
		case !asShown(shown, &now):
			return conflictError{errors.New("it changed since it was shown: look at it again and decide anew")}
		}
		*r = now
	}
	return conflictError{errors.New("it keeps changing: look at it again and decide anew")}
}

// asShown is whether the request is still what the person saw: the same object, and in
// its status nothing that speaks against it.
func asShown(shown, now *v1alpha1.JoinRequest) bool {
	still := func(r *v1alpha1.JoinRequest) *v1alpha1.JoinRequest {
		r = r.DeepCopy()
		r.ResourceVersion, r.ManagedFields = "", nil
		r.Status = v1alpha1.JoinRequestStatus{}
		return r
	}
	state := func(r *v1alpha1.JoinRequest) string {
		c := meta.FindStatusCondition(r.Status.Conditions, v1alpha1.ConditionReady)
		if c == nil {
			return v1alpha1.ReasonAwaitingDecision
		}
		return c.Reason
	}
	return equality.Semantic.DeepEqual(still(shown), still(now)) &&
		now.Status.OthersWaiting <= shown.Status.OthersWaiting && state(now) == state(shown)
}

// decided is about a request that somebody decided before: the same way is as good as
// done, the other way cannot be.
func (o *options) decided(r *v1alpha1.JoinRequest, d *v1alpha1.Decision) error {
	said := fmt.Sprintf("already %s by %s%s", strings.ToLower(string(d.Verdict)), printable(d.DecidedBy.Username), when(r))
	if d.Verdict != o.verdict {
		return conflictError{fmt.Errorf("%s; a decision is final", said)}
	}
	if o.pool != "" && o.pool != into(r, d) {
		return conflictError{fmt.Errorf("%s into pool %q, not %q; a decision is final", said, into(r, d), o.pool)}
	}
	if o.tenant != "" && o.tenant != d.Tenant {
		return conflictError{fmt.Errorf("%s for tenant %q, not %q; a decision is final", said, d.Tenant, o.tenant)}
	}
	if *o.printed.OutputFormat != "" {
		if o.waits() {
			return nil
		}
		return o.print(r)
	}
	fmt.Fprintf(o.streams.Out, "joinrequest.%s/%s %s\n", v1alpha1.GroupVersion.Group, r.Name, said)
	return nil
}

func into(r *v1alpha1.JoinRequest, d *v1alpha1.Decision) string {
	if d.Pool != "" {
		return d.Pool
	}
	return r.Spec.Pool
}

// when is the time of a decision: that of the write that brought it.
func when(r *v1alpha1.JoinRequest) string {
	for _, f := range r.ManagedFields {
		if f.Subresource == "" && f.Time != nil && f.FieldsV1 != nil && strings.Contains(f.FieldsV1.GetRawString(), `"f:decision"`) {
			return " at " + f.Time.UTC().Format(time.RFC3339)
		}
	}
	if c := meta.FindStatusCondition(r.Status.Conditions, v1alpha1.ConditionRecorded); c != nil {
		return " at " + c.LastTransitionTime.UTC().Format(time.RFC3339)
	}
	return ""
}
