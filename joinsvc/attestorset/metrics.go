package attestorset

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are labelled by the names of AttestorConfigs, which administrators give.
type metrics struct {
	version, failed *prometheus.GaugeVec
}

func (m *metrics) register(reg prometheus.Registerer) error {
	m.version = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "join_attestor_config_version", Help: "The version of each AttestorConfig that this replica decides by; 0 where it could build none.",
	}, []string{"attestor"})
	m.failed = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "join_attestor_config_failed", Help: "1 where this replica could not build the newest version of an AttestorConfig.",
	}, []string{"attestor"})
	if reg == nil {
		return nil
	}
	for _, c := range []prometheus.Collector{m.version, m.failed} {
		if err := reg.Register(c); err != nil {
			return fmt.Errorf("register metrics: %w", err)
		}
	}
	return nil
}

func (m *metrics) set(name string, e entry) {
	failed := 0.0
	if e.err != "" {
		failed = 1
	}
	m.version.WithLabelValues(name).Set(float64(e.inForce))
	m.failed.WithLabelValues(name).Set(failed)
}

func (m *metrics) drop(name string) {
	m.version.DeleteLabelValues(name)
	m.failed.DeleteLabelValues(name)
}
