// Package conditions is the last step of every reconciler: it sums an object's
// conditions up and writes its status once, so that observedGeneration is honest
// on every path and nothing is written where nothing changed.
package conditions

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// maxMessage is what the schema of a condition takes.
const maxMessage = 32768

// Set is the conditions of one object while they are decided. What it sets
// speaks of the object's generation as it was read.
type Set struct {
	conditions *[]metav1.Condition
	generation int64
}

// Of returns the conditions of an object's status. It says at once that the
// status speaks of the object's generation.
func Of(o client.Object, conditions *[]metav1.Condition, observed *int64) Set {
	*observed = o.GetGeneration()
	return Set{conditions, o.GetGeneration()}
}

// True sets a condition and reports whether anything but its generation changed.
func (s Set) True(kind, reason, format string, args ...any) bool {
	return s.set(kind, metav1.ConditionTrue, reason, format, args)
}

// False sets a condition and reports whether anything but its generation changed.
func (s Set) False(kind, reason, format string, args ...any) bool {
	return s.set(kind, metav1.ConditionFalse, reason, format, args)
}

// Unknown sets a condition and reports whether anything but its generation changed.
func (s Set) Unknown(kind, reason, format string, args ...any) bool {
	return s.set(kind, metav1.ConditionUnknown, reason, format, args)
}

// Drop removes a condition that no longer says anything.
func (s Set) Drop(kind string) bool { return meta.RemoveStatusCondition(s.conditions, kind) }

// Find returns a condition, or nil.
func (s Set) Find(kind string) *metav1.Condition {
	return meta.FindStatusCondition(*s.conditions, kind)
}

func (s Set) set(kind string, status metav1.ConditionStatus, reason, format string, args []any) bool {
	message := fmt.Sprintf(format, args...)
	if len(message) > maxMessage {
		message = message[:maxMessage]
	}
	was := s.Find(kind)
	changed := was == nil || was.Status != status || was.Reason != reason || was.Message != message
	meta.SetStatusCondition(s.conditions, metav1.Condition{
		Type: kind, Status: status, Reason: reason, Message: message, ObservedGeneration: s.generation,
	})
	return changed
}

// Patch writes the status of after, once, where it differs from before. It fails
// with a conflict where the object changed meanwhile, so that no status speaks of
// what its writer did not see; an object that is gone is no error.
func Patch(ctx context.Context, c client.Client, before, after client.Object) error {
	if equality.Semantic.DeepEqual(before, after) {
		return nil
	}
	patch := client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
	if err := c.Status().Patch(ctx, after, patch); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("write the status of %s: %w", client.ObjectKeyFromObject(after), err)
	}
	return nil
}
