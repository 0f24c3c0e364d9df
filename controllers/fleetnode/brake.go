package fleetnode

import (
	"fmt"

	"github.com/better-compute/join-operator/api/v1alpha1"
)

// The brake: more than brakeCount and more than one in brakeShare of a tenant's
// nodes that are to go within brakeWindow are a burst.
const (
	brakeCount  = 20
	brakeShare  = 20
	brakeWindow = "10 minutes"

	// What the annotation v1alpha1.BrakeAnnotation on a namespace may say.
	confirmValue = "confirm"
	cancelValue  = "cancel"

	// confirmedKey marks audit rows of what was confirmed: it is no part of a
	// later burst.
	confirmedKey = "confirmed"
)

// tripped is a brake that holds a tenant's nodes.
type tripped struct {
	// armed is true once the namespace was seen without an annotation since the
	// brake tripped: an annotation that stood there before answered another burst.
	armed bool
}

// situation is all that the brake decides by.
type situation struct {
	// brake is nil while nothing is held.
	brake *tripped
	// annotation is the namespace's, empty where there is none.
	annotation string
	// crdGoing is true where the FleetNode CRD is being deleted.
	crdGoing bool
	// done counts the nodes that went within the window without a confirmation,
	// wanted those that are to go now, this one included, and left the tenant's
	// nodes that are still in the fleet.
	done, wanted, left int64
}

type verdict int

const (
	goOn verdict = iota
	goOnConfirmed
	hold
	cancel
)

// decide is the whole rule: what to do, and the brake as it is from now on.
func decide(s situation) (verdict, *tripped) {
	b := s.brake
	if b == nil {
		n := s.done + s.wanted
		burst := n > brakeCount && n*brakeShare > s.left+s.done
		if !burst && !s.crdGoing {
			return goOn, nil
		}
		return hold, &tripped{armed: s.annotation == ""}
	}
	next := &tripped{armed: b.armed || s.annotation == ""}
	switch {
	case next.armed && s.annotation == confirmValue:
		return goOnConfirmed, next
	case next.armed && s.annotation == cancelValue:
		return cancel, next
	}
	return hold, next
}

// holdMessage says what is held and how to go on.
func holdMessage(namespace, annotation string, b *tripped) string {
	text := fmt.Sprintf("many nodes of namespace %s are to be deleted or retired at once, or the FleetNode CRD is being deleted: "+
		"none is revoked until an administrator runs `kubectl annotate namespace %s %s=%s`, or =%s to keep them all",
		namespace, namespace, v1alpha1.BrakeAnnotation, confirmValue, cancelValue)
	if !b.armed && annotation != "" {
		text += fmt.Sprintf("; the annotation that stands there answered an earlier burst: remove it first (%s-)", v1alpha1.BrakeAnnotation)
	}
	return text
}
