package fleetnode

import (
	"crypto/rand"
	"fmt"
	"strings"

	"github.com/better-compute/join-operator/api/v1alpha1"
)

// The brake: more than brakeCount and more than one in brakeShare of a tenant's
// nodes that are to go within brakeWindow are a burst.
const (
	brakeCount  = 20
	brakeShare  = 20
	brakeWindow = "10 minutes"

	// What the annotation v1alpha1.BrakeAnnotation on a namespace says, before a dash
	// and the burst that it answers.
	confirmAnswer = "confirm"
	cancelAnswer  = "cancel"

	// confirmedKey marks audit rows of what was confirmed: it is no part of a
	// later burst.
	confirmedKey = "confirmed"
)

// tripped is a brake that holds a tenant's nodes.
type tripped struct {
	// burst names what is held: an annotation that answered another burst, or stood
	// there before, is no answer to this one.
	burst string
}

func (b *tripped) answer(word string) string { return word + "-" + b.burst }

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

// decide is the whole rule: what to do, and the brake as it is from now on. A
// burst that is new takes its name from newBurst.
func decide(s situation, newBurst func() string) (verdict, *tripped) {
	b := s.brake
	if b == nil {
		n := s.done + s.wanted
		burst := n > brakeCount && n*brakeShare > s.left+s.done
		if !burst && !s.crdGoing {
			return goOn, nil
		}
		return hold, &tripped{newBurst()}
	}
	switch s.annotation {
	case b.answer(confirmAnswer):
		return goOnConfirmed, b
	case b.answer(cancelAnswer):
		return cancel, b
	}
	return hold, b
}

// newBurst makes the name of a burst: it is typed by people, and is no secret.
func newBurst() string { return strings.ToLower(rand.Text()[:6]) }

// holdMessage says what is held and how to go on.
func holdMessage(namespace, annotation string, b *tripped) string {
	command := fmt.Sprintf("kubectl annotate --overwrite namespace %s %s=", namespace, v1alpha1.BrakeAnnotation)
	text := fmt.Sprintf("many nodes of namespace %s are to be deleted or retired at once, or the FleetNode CRD is being deleted: "+
		"none is revoked until an administrator runs `%s%s`, or `%s%s` to keep them all",
		namespace, command, b.answer(confirmAnswer), command, b.answer(cancelAnswer))
	if annotation != "" {
		text += "; the annotation that stands there answers another burst, or none"
	}
	return text
}
