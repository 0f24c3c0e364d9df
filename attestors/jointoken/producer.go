package jointoken

import (
	"context"
	"errors"

	"github.com/better-compute/join-operator/attestors"
)

// ErrChallenged is returned by a [Producer] that is given a challenge: a token
// answers none.
var ErrChallenged = errors.New("a join token answers no challenge")

// Producer is the machine's half: it hands the token over, to be sealed. There
// is nothing to bind to the request, since a token is a bearer secret.
type Producer struct {
	token Token
}

// NewProducer reads a token's text, as strictly as [Parse].
func NewProducer(text string) (*Producer, error) {
	t, err := Parse(text)
	if err != nil {
		return nil, err
	}
	return &Producer{token: t}, nil
}

// ID is the attestor's id.
func (*Producer) ID() string { return attestors.DefaultID }

// Produce gives the token for a first round.
func (p *Producer) Produce(_ context.Context, req attestors.ProduceRequest) (attestors.Produced, error) {
	if req.Challenge != nil {
		return attestors.Produced{}, ErrChallenged
	}
	return attestors.Produced{Token: p.token.Text()}, nil
}

var _ attestors.Producer = (*Producer)(nil)
