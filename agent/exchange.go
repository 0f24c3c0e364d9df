package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"

	"github.com/better-compute/join-operator/agent/state"
	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/attestors"
)

// maxRounds is the most challenges that one exchange answers.
const maxRounds = 8

// exchange runs the rounds of one exchange: a challenge is answered at once, and
// what comes back is a verified answer that is no challenge.
func (m *Machine) exchange(ctx context.Context, o JoinOptions) (*wire.Answer, error) {
	var challenge, sealedState []byte
	for range maxRounds {
		evidence, err := o.Producer.Produce(ctx, m.produceRequest(o.Role, challenge))
		if err != nil {
			return nil, &LocalError{fmt.Errorf("attestor %s: %w", o.Producer.ID(), err)}
		}
		a, err := m.ask(ctx, o, evidence, sealedState)
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
func (m *Machine) ask(ctx context.Context, o JoinOptions, evidence attestors.Produced, sealedState []byte) (*wire.Answer, error) {
	a, err := m.askOnce(ctx, o, evidence, sealedState)
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
	return m.askOnce(ctx, o, evidence, sealedState)
}

func (m *Machine) askOnce(ctx context.Context, o JoinOptions, evidence attestors.Produced, sealedState []byte) (*wire.Answer, error) {
	body, err := m.envelope(o, evidence, sealedState)
	if err != nil {
		return nil, &LocalError{err}
	}
	var answer *wire.Answer
	err = m.eachEndpoint(ctx, func(endpoint *url.URL) error {
		answer, err = m.askAt(ctx, endpoint, o, body)
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

func (m *Machine) envelope(o JoinOptions, evidence attestors.Produced, sealedState []byte) ([]byte, error) {
	plaintext, err := json.Marshal(&wire.Sealed{Token: evidence.Token, Evidence: evidence.Payload, Claims: o.Claims})
	if err != nil {
		return nil, err
	}
	attestor := o.Producer.ID()
	kid, sealed, err := m.bundle.Seal(attestor, o.Role, m.request.CSR, plaintext)
	if err != nil {
		return nil, err
	}
	body, err := json.Marshal(&wire.Join{
		Attestor: attestor, Role: o.Role, CSR: m.request.CSR,
		KeyID: kid, Sealed: sealed, HasSealed: true, State: sealedState,
	})
	if err != nil {
		return nil, err
	}
	if len(body) > wire.MaxBody {
		return nil, fmt.Errorf("the evidence makes the request %d bytes long; the protocol allows %d", len(body), wire.MaxBody)
	}
	return body, nil
}

// askAt sends a round to one endpoint and verifies what comes back before
// anything of it is used.
func (m *Machine) askAt(ctx context.Context, endpoint *url.URL, o JoinOptions, body []byte) (*wire.Answer, error) {
	r, err := m.http.post(ctx, m.bundle.TLS(m.now), endpoint, wire.PathJoin, body)
	if err != nil {
		return nil, err
	}
	if r.status != http.StatusOK {
		return nil, r.problem(m.clock.Now())
	}
	if r.mediaType != wire.MediaTypeJOSE {
		return nil, &UntrustedError{fmt.Errorf("it has the media type %.64q", r.mediaType)}
	}
	a, err := m.bundle.OpenAnswer(r.body)
	if err != nil {
		return nil, &UntrustedError{err}
	}
	if err := m.asked(o).check(a); err != nil {
		return nil, &UntrustedError{err}
	}
	m.noticeClock(a.IssuedAt)
	return a, nil
}

// confirm says to the service that the certificate is stored. With once it tries
// each endpoint once; else it tries for a quarter of a minute or so.
func (m *Machine) confirm(ctx context.Context, id *state.Identity, once bool) error {
	leaf := id.Chain[0]
	signature, err := wire.SignStatement(m.request.Key, wire.ConfirmStatement(leaf))
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
	r, err := m.http.post(ctx, m.bundle.TLS(m.now), endpoint, wire.PathConfirm, body)
	if err != nil {
		return err
	}
	if r.status != http.StatusNoContent {
		return r.problem(m.clock.Now())
	}
	return nil
}
