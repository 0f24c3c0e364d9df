package joinsvc

import (
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/attestors"
)

// metrics never carry what a machine sent: attestors are labelled by registered
// ids, outcomes by the protocol's words.
type metrics struct {
	joins    *prometheus.CounterVec
	seconds  *prometheus.HistogramVec
	verified *prometheus.HistogramVec
	refused  *prometheus.CounterVec
	confirms *prometheus.CounterVec
	retries  prometheus.Counter
	capped   prometheus.Counter
	dropped  prometheus.Counter
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		joins: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "join_requests_total", Help: "Rounds of joins by attestor and outcome.",
		}, []string{"attestor", "outcome"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "join_request_duration_seconds", Help: "How long a round took in the join service, without the pause before a refusal.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 13),
		}, []string{"attestor", "outcome"}),
		verified: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "join_verification_duration_seconds", Help: "Verifications by attestor and verdict, and how long they took.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 4, 8),
		}, []string{"attestor", "verdict"}),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "join_refusals_total", Help: "Refusals by attestor and reason.",
		}, []string{"attestor", "reason"}),
		confirms: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "join_confirmations_total", Help: "Confirmations by outcome.",
		}, []string{"outcome"}),
		retries: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "join_transaction_retries_total", Help: "Transactions that lost a race and started again.",
		}),
		capped: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "join_requests_capped_total", Help: "New requests that wait without a JoinRequest, since too many are undecided.",
		}),
		dropped: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "join_refusal_records_dropped_total", Help: "Refusals beyond what is recorded in a minute; all of them are in join_refusals_total.",
		}),
	}
	if reg == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{m.joins, m.seconds, m.verified, m.refused, m.confirms, m.retries, m.capped, m.dropped} {
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("register metrics: %w", err)
		}
	}
	return m, nil
}

// joined counts one round.
func (m *metrics) joined(a *ask, answer *wire.Answer, err error, took time.Duration) {
	attestor := "none" // what was named is not ours to label with
	if a.attestor != nil {
		attestor = a.attestor.ID()
	}
	outcome := outcomeOf(answer, err)
	m.joins.WithLabelValues(attestor, outcome).Inc()
	m.seconds.WithLabelValues(attestor, outcome).Observe(took.Seconds())
	var refused *RefusedJoin
	if errors.As(err, &refused) {
		m.refused.WithLabelValues(refused.Attestor, refused.Refusal.Reason).Inc()
	}
}

// confirmed counts one confirmation.
func (m *metrics) confirmed(err error) {
	m.confirms.WithLabelValues(outcomeOf(&wire.Answer{Outcome: "confirmed"}, err)).Inc()
}

func outcomeOf(answer *wire.Answer, err error) string {
	var refused *RefusedJoin
	var problem *Problem
	switch {
	case err == nil:
		return string(answer.Outcome)
	case errors.As(err, &refused):
		return string(wire.AccessDenied)
	case errors.As(err, &problem):
		return string(problem.Code)
	}
	return string(wire.Internal)
}

// Verified and Refused make the service's metrics a meter of its attestors.
func (m *metrics) Verified(attestor string, v attestors.Verdict, took time.Duration) {
	m.verified.WithLabelValues(attestor, string(v)).Observe(took.Seconds())
}

// Refused is counted with the join, together with the service's own refusals.
func (m *metrics) Refused(string, string) {}
