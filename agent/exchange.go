package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"

	"github.com/better-compute/join-operator/agent/state"
	"github.com/better-compute/join-operator/agent/trust"
	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/attestors"
)

// maxRounds is the most challenges that one exchange answers.
const maxRounds = 8

// question is what one exchange asks.
type question interface {
	path() string
	// expects is what an answer must answer.
	expects() asked
	// prepare makes what is new in a round; challenge is nil in the first. What
	// it returns makes the round's body, sealed by the bundle that is pinned then.
	prepare(ctx context.Context, challenge []byte) (envelope, error)
}

type envelope func(b *trust.Bundle, sealedState []byte) ([]byte, error)

// exchange runs the rounds of one exchange: a challenge is answered at once, and
// what comes back is a verified answer that is no challenge.
func (m *Machine) exchange(ctx context.Context, q question) (*wire.Answer, error) {
	var challenge, sealedState []byte
	for range maxRounds {
		body, err := q.prepare(ctx, challenge)
		if err != nil {
			return nil, &LocalError{err}
		}
		a, err := m.ask(ctx, q, body, sealedState)
		if err != nil {
			return nil, err
		}
		if a.Outcome != wire.OutcomeChallenge {
			return a, nil
		}
		if challenge, err = wire.DecodeBase64(a.Challenge); err != nil {
			return nil, &UntrustedError{errors.New("its challenge is not base64")}
		}
		if sealedState, err = wire.DecodeBase64(a.State); err != nil {
			return nil, &UntrustedError{errors.New("its state is not base64")}
		}
		if challenge == nil {
			challenge = []byte{}
		}
	}
	return nil, &UntrustedError{fmt.Errorf("%d challenges and no end", maxRounds)}
}

// ask sends one round. Where the answer shows that the pinned bundle may be old,
// it walks the rotations and sends the round again, sealed by the newer bundle.
func (m *Machine) ask(ctx context.Context, q question, body envelope, sealedState []byte) (*wire.Answer, error) {
	a, err := m.askOnce(ctx, q, body, sealedState)
	if err == nil || !mayBeStale(err) {
		return a, err
	}
	adopted, walkErr := m.walkRotations(ctx, "")
	if walkErr != nil && !errors.Is(walkErr, errWalkedLately) {
		m.log.Info("the pinned bundle may be old, but no newer one was reached", "error", walkErr)
	}
	if !adopted {
		return nil, err
	}
	return m.askOnce(ctx, q, body, sealedState)
}

func (m *Machine) askOnce(ctx context.Context, q question, body envelope, sealedState []byte) (*wire.Answer, error) {
	raw, err := body(m.bundle, sealedState)
	if err != nil {
		return nil, &LocalError{err}
	}
	if len(raw) > wire.MaxBody {
		return nil, &LocalError{fmt.Errorf("the evidence makes the request %d bytes long; the protocol allows %d", len(raw), wire.MaxBody)}
	}
	var answer *wire.Answer
	err = m.eachEndpoint(ctx, func(endpoint *url.URL) error {
		answer, err = m.askAt(ctx, endpoint, q, raw)
		return err
	}, decidedByService)
	if err != nil {
		return nil, err
	}
	return answer, nil
}

// decidedByService reports whether an answer is the service's rather than one
// endpoint's trouble: another endpoint would say the same, and count it again.
func decidedByService(err error) bool {
	p, ok := errors.AsType[*ProblemError](err)
	return ok && (p.Refused() || p.Code == wire.StaleBundle || p.Code == wire.RateLimited)
}

// askAt sends a round to one endpoint and verifies what comes back before
// anything of it is used.
func (m *Machine) askAt(ctx context.Context, endpoint *url.URL, q question, body []byte) (*wire.Answer, error) {
	r, err := m.post(ctx, endpoint, q.path(), body)
	if err != nil {
		return nil, err
	}
	if r.status != http.StatusOK {
		return nil, r.problem(m.now())
	}
	if r.mediaType != wire.MediaTypeJOSE {
		return nil, &UntrustedError{fmt.Errorf("it has the media type %.64q", r.mediaType)}
	}
	a, err := m.bundle.OpenAnswer(r.body)
	if err != nil {
		return nil, &UntrustedError{err}
	}
	if err := q.expects().check(a); err != nil {
		return nil, &UntrustedError{err}
	}
	m.noticeClock(a.IssuedAt)
	return a, nil
}

// joinQuestion asks to join with an attestor's evidence.
type joinQuestion struct {
	request  *state.Request
	producer attestors.Producer
	role     wire.Role
	claims   wire.Claims
	// again is the node to join as again, or nil.
	again *state.Identity
}

func (*joinQuestion) path() string { return wire.PathJoin }

func (q *joinQuestion) expects() asked {
	return asked{
		csrSHA256: q.request.CSRSHA256(), publicKey: q.request.Key.Public(), role: q.role,
		challenger: q.producer.ID(), attestor: q.producer.ID(), again: q.again,
	}
}

func (q *joinQuestion) prepare(ctx context.Context, challenge []byte) (envelope, error) {
	attestor := q.producer.ID()
	evidence, err := q.producer.Produce(ctx, attestors.ProduceRequest{
		Role: q.role, CSR: q.request.CSR, CSRSHA256: q.request.CSRSHA256(), Challenge: challenge,
	})
	if err != nil {
		return nil, fmt.Errorf("attestor %s: %w", attestor, err)
	}
	plaintext, err := json.Marshal(&wire.Sealed{Token: evidence.Token, Evidence: evidence.Payload, Claims: q.claims})
	if err != nil {
		return nil, err
	}
	return func(b *trust.Bundle, sealedState []byte) ([]byte, error) {
		kid, sealed, err := b.Seal(attestor, q.role, q.request.CSR, plaintext)
		if err != nil {
			return nil, err
		}
		return json.Marshal(&wire.Join{
			Attestor: attestor, Role: q.role, CSR: q.request.CSR,
			KeyID: kid, Sealed: sealed, HasSealed: true, State: sealedState,
		})
	}, nil
}

// confirm says to the service that the certificate is stored. With once it tries
// each endpoint once; else it tries for a quarter of a minute or so.
func (m *Machine) confirm(ctx context.Context, id *state.Identity, once bool) error {
	leaf := id.Chain[0]
	signature, err := wire.SignStatement(id.Key, wire.ConfirmStatement(leaf))
	if err != nil {
		return err
	}
	body, err := json.Marshal(&wire.Confirm{Certificate: leaf, Signature: signature})
	if err != nil {
		return err
	}
	back := backOff{base: confirmBase, limit: confirmMax, random: m.random}
	for try := 1; ; try++ {
		err := m.eachEndpoint(ctx, func(endpoint *url.URL) error { return m.confirmAt(ctx, endpoint, body) }, decidedByService)
		if err == nil || once || try == confirmTries {
			return err
		}
		if err := m.clock.Sleep(ctx, back.next(0)); err != nil {
			return err
		}
	}
}

func (m *Machine) confirmAt(ctx context.Context, endpoint *url.URL, body []byte) error {
	r, err := m.post(ctx, endpoint, wire.PathConfirm, body)
	if err != nil {
		return err
	}
	if r.status != http.StatusNoContent {
		return r.problem(m.now())
	}
	return nil
}
