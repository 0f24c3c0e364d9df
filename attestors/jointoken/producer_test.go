package jointoken

import (
	"errors"
	"strings"
	"testing"

	"github.com/better-compute/join-operator/attestors"
)

// TestProducerHandsTheTokenOver and answers no challenge.
func TestProducerHandsTheTokenOver(t *testing.T) {
	text := Generate().Text()
	p, err := NewProducer(text)
	if err != nil || p.ID() != "join-token" {
		t.Fatalf("producer %v, error %v", p, err)
	}
	got, err := p.Produce(t.Context(), attestors.ProduceRequest{Role: attestors.RoleNode})
	if err != nil || got.Token != text || got.Payload != nil {
		t.Errorf("produced %d bytes of payload, error %v", len(got.Payload), err)
	}
	if _, err := p.Produce(t.Context(), attestors.ProduceRequest{Challenge: []byte{}}); !errors.Is(err, ErrChallenged) {
		t.Errorf("a challenge: %v", err)
	}
	for _, bad := range []string{"", text + " ", strings.ToUpper(text), text[:40]} {
		if _, err := NewProducer(bad); !errors.Is(err, ErrMalformed) {
			t.Errorf("%d characters: %v", len(bad), err)
		}
	}
}
