package gateway

import (
	"fmt"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics of the handler. Labels come from fixed lists.
type metrics struct {
	answers *prometheus.CounterVec
	took    prometheus.Histogram
	again   prometheus.Counter
}

func newMetrics(h *Handler) (*metrics, error) {
	c := &h.cfg
	m := &metrics{
		answers: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "join_gateway_answers_total", Help: "Answers to machines, by endpoint and status.",
		}, []string{"endpoint", "status"}),
		took: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "join_gateway_relay_seconds", Help: "Time from a request's last byte to the service's answer.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 14),
		}),
		again: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "join_gateway_retries_total", Help: "Requests that were sent again because a replica gave no answer.",
		}),
	}
	gauge := func(name, help string, value func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, value)
	}
	for _, collector := range []prometheus.Collector{
		m.answers, m.took, m.again,
		gauge("join_gateway_requests_in_flight", "Requests that are being relayed.", func() float64 { return float64(len(h.inFlight)) }),
		gauge("join_gateway_large_bodies", "Bodies above 16 KiB that are in memory.", func() float64 { return float64(len(h.large)) }),
		gauge("join_gateway_refused_sources", "Sources that have refusals to their account, or had lately.", func() float64 { return float64(c.Refusals.Sources()) }),
		gauge("join_gateway_replicas", "Replicas of the join service that are known.", func() float64 { _, all := c.Upstreams.count(); return float64(all) }),
		gauge("join_gateway_replicas_ready", "Replicas of the join service that say they are ready.", func() float64 { ready, _ := c.Upstreams.count(); return float64(ready) }),
	} {
		if err := c.Metrics.Register(collector); err != nil {
			return nil, fmt.Errorf("metrics of the gateway: %w", err)
		}
	}
	return m, nil
}

// counted remembers the status of an answer.
type counted struct {
	http.ResponseWriter
	status int
}

func (c *counted) WriteHeader(status int) {
	c.status = status
	c.ResponseWriter.WriteHeader(status)
}

// Unwrap is for http.ResponseController.
func (c *counted) Unwrap() http.ResponseWriter { return c.ResponseWriter }
