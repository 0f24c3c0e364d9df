package pki

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
)

const (
	// keepEvery is how often the keeper looks: a revocation is in the list this much
	// later at most.
	keepEvery = 5 * time.Second
	// keepTimeout bounds one look.
	keepTimeout = 30 * time.Second
	// warnEvery is how often it is said again that a CA runs out.
	warnEvery = time.Hour
	// enoughLifetimes is how many lifetimes of a certificate a CA should have left;
	// with less than one, certificates begin to run out together with their CA.
	enoughLifetimes = 3
	// defaultLifetime is that of a pool that says nothing.
	defaultLifetime = 168 * time.Hour
)

const (
	registerSQL = `INSERT INTO issuers (cert_sha256, name, ski, der, not_after) VALUES ($1, $2, $3, $4, $5) ON CONFLICT DO NOTHING`
	nowSQL      = `SELECT join_now(), (SELECT extract(epoch FROM max(lifetime)) FROM pools)::float8`
)

// Keeper keeps the database in step with an Authority: it registers the CAs that
// are loaded, keeps their revocation lists signed, and warns of a CA that runs out.
type Keeper struct {
	authority *Authority
	db        *pgxpool.Pool
	log       *slog.Logger

	registered map[[32]byte]bool
	crls       map[string]crlState // by SKI
	warned     time.Time

	notAfter *prometheus.GaugeVec
	signing  *prometheus.GaugeVec
	runsOut  prometheus.Gauge
	crlAge   *prometheus.GaugeVec
	failures prometheus.Counter
}

// NewKeeper makes a keeper with metrics in reg. db connects as join_service.
func NewKeeper(a *Authority, db *pgxpool.Pool, log *slog.Logger, reg prometheus.Registerer) (*Keeper, error) {
	k := &Keeper{
		authority: a, db: db, log: log, registered: map[[32]byte]bool{}, crls: map[string]crlState{},
		notAfter: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "join_node_ca_not_after_timestamp_seconds", Help: "End of each loaded node CA's certificate."}, []string{"ca"}),
		signing: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "join_node_ca_signing", Help: "1 for the node CA that signs new certificates."}, []string{"ca"}),
		runsOut: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "join_node_ca_runs_out", Help: "1 while the CA that signs has less than three of the longest certificate lifetime left, or there is none."}),
		crlAge: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "join_crl_next_update_timestamp_seconds", Help: "When each node CA's revocation list, as last seen, runs out."}, []string{"ca"}),
		failures: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "join_pki_failures_total", Help: "Times that CAs could not be registered or revocation lists not be signed."}),
	}
	for _, c := range []prometheus.Collector{k.notAfter, k.signing, k.runsOut, k.crlAge, k.failures} {
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("metrics of the PKI: %w", err)
		}
	}
	return k, nil
}

// Run keeps until ctx ends. An outage of the database is waited out.
func (k *Keeper) Run(ctx context.Context) {
	tick := time.NewTicker(keepEvery)
	defer tick.Stop()
	failing := false
	for {
		err := k.look(ctx)
		if err != nil && ctx.Err() == nil {
			k.failures.Inc()
			if !failing {
				k.log.Error("the node CAs' rows and revocation lists could not be kept", "error", err)
			}
		}
		failing = err != nil
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-k.authority.changed:
		}
	}
}

func (k *Keeper) look(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, keepTimeout)
	defer cancel()
	loaded := k.authority.current.Load()
	if err := k.register(ctx, loaded); err != nil {
		return err
	}
	var now time.Time
	var longest *float64
	if err := k.db.QueryRow(ctx, nowSQL).Scan(&now, &longest); err != nil {
		return fmt.Errorf("read the lifetimes of pools: %w", err)
	}
	lifetime := defaultLifetime
	if longest != nil {
		lifetime = time.Duration(*longest * float64(time.Second))
	}
	k.watchEnds(loaded, now, lifetime)
	return k.signLists(ctx, loaded)
}

// register lets the keys job publish the CAs that are loaded.
func (k *Keeper) register(ctx context.Context, loaded *set) error {
	for _, i := range loaded.all() {
		if k.registered[i.sha256] {
			continue
		}
		if _, err := k.db.Exec(ctx, registerSQL, i.sha256[:], i.name, i.cert.SubjectKeyId, i.cert.Raw, i.cert.NotAfter); err != nil {
			return fmt.Errorf("register node CA %s: %w", i.name, err)
		}
		k.registered[i.sha256] = true
	}
	return nil
}

// watchEnds shows when CAs end, and warns of one that signs and runs out: else a
// whole fleet would run out in one second.
func (k *Keeper) watchEnds(loaded *set, now time.Time, lifetime time.Duration) {
	if loaded == nil {
		return // the Secrets were not read yet
	}
	k.notAfter.Reset()
	k.signing.Reset()
	by := loaded.signing(now)
	for _, i := range loaded.all() {
		k.notAfter.WithLabelValues(i.name).Set(float64(i.cert.NotAfter.Unix()))
		signs := 0.0
		if i == by {
			signs = 1
		}
		k.signing.WithLabelValues(i.name).Set(signs)
	}
	if by != nil && by.cert.NotAfter.Sub(now) >= enoughLifetimes*lifetime {
		k.runsOut.Set(0)
		return
	}
	k.runsOut.Set(1)
	if now.Sub(k.warned) < warnEvery {
		return
	}
	k.warned = now
	if by == nil {
		k.log.Error("no node CA that is valid is loaded: no machine can join")
		return
	}
	k.log.Warn("the node CA that signs runs out: renew it, or add the next one", "secret", by.name, "notAfter", by.cert.NotAfter, "longestCertificateLifetime", lifetime)
}
