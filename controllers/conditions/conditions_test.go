package conditions

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/better-compute/join-operator/api/v1alpha1"
)

func TestConditionsSpeakOfTheGenerationThatWasRead(t *testing.T) {
	jr := &v1alpha1.JoinRequest{ObjectMeta: metav1.ObjectMeta{Generation: 3}}
	s := Of(jr, &jr.Status.Conditions, &jr.Status.ObservedGeneration)
	if !s.False(v1alpha1.ConditionReady, v1alpha1.ReasonAwaitingDecision, "waits for %s", "a person") {
		t.Error("a first condition is a change")
	}
	got := s.Find(v1alpha1.ConditionReady)
	if got == nil || got.ObservedGeneration != 3 || jr.Status.ObservedGeneration != 3 || got.Message != "waits for a person" || got.LastTransitionTime.IsZero() {
		t.Fatalf("got %+v", got)
	}
	if s.False(v1alpha1.ConditionReady, v1alpha1.ReasonAwaitingDecision, "waits for a person") {
		t.Error("the same again is no change")
	}
	if !s.Drop(v1alpha1.ConditionReady) || s.Find(v1alpha1.ConditionReady) != nil {
		t.Error("the condition stayed")
	}
}

func TestMessagesFitTheSchema(t *testing.T) {
	jr := &v1alpha1.JoinRequest{}
	s := Of(jr, &jr.Status.Conditions, &jr.Status.ObservedGeneration)
	s.Unknown(v1alpha1.ConditionReady, v1alpha1.ReasonDatabase, "%s", strings.Repeat("x", 40000))
	if n := len(s.Find(v1alpha1.ConditionReady).Message); n != maxMessage {
		t.Errorf("message of %d characters", n)
	}
}
