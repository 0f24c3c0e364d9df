package decide

import (
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/api/v1alpha1"
)

// poll is how often a waiting command looks: the right to get is enough for it.
const poll = 250 * time.Millisecond

// await waits until the manager recorded the decisions, and prints them as they are.
func (o *options) await(ctx context.Context, requests []*v1alpha1.JoinRequest) (errs []error) {
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	for _, r := range requests {
		err := o.awaitRecorded(ctx, r)
		if err == nil {
			err = o.print(r)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("joinrequest %s: %w", r.Name, err))
		}
	}
	return errs
}

// awaitRecorded waits until the manager has taken the decision over, or thrown it away.
func (o *options) awaitRecorded(ctx context.Context, r *v1alpha1.JoinRequest) error {
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for {
		var now v1alpha1.JoinRequest
		err := o.client.Get(ctx, client.ObjectKeyFromObject(r), &now)
		switch {
		case apierrors.IsNotFound(err) || (err == nil && now.UID != r.UID):
			return conflictError{fmt.Errorf("the decision was thrown away and the machine's request is made again: kubectl events --for joinrequest/%s -n %s says why", r.Name, r.Namespace)}
		case err != nil && ctx.Err() == nil:
			return err
		case err == nil:
			*r = now
			if meta.IsStatusConditionTrue(r.Status.Conditions, v1alpha1.ConditionRecorded) {
				return nil
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return o.unrecorded(r)
		}
	}
}

func (o *options) unrecorded(r *v1alpha1.JoinRequest) error {
	text := fmt.Sprintf("%s, but not recorded within %s", o.done(), o.timeout)
	if c := meta.FindStatusCondition(r.Status.Conditions, v1alpha1.ConditionReady); c != nil {
		return fmt.Errorf("%s: %s: %s", text, c.Reason, c.Message)
	}
	return errors.New(text + ": no manager looked at it yet")
}
