package joinsvc

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// refusedEvent is the data of security.join.refused: hashes, never evidence.
type refusedEvent struct {
	Attestor          string `json:"attestor"`
	Reason            string `json:"reason"`
	CSRSHA256         string `json:"csrSHA256"`
	HardwareKeySHA256 string `json:"hardwareKeySHA256,omitempty"`
	TokenID           string `json:"tokenID,omitempty"`
	Detail            string `json:"detail,omitempty"`
}

// reclaimRefusedEvent is the data of node.reclaim-refused.
type reclaimRefusedEvent struct {
	Wanted Place `json:"wanted"`
	Has    Place `json:"has"`
}

const (
	// The window's row bounds what all replicas record together; what is beyond is
	// counted in it. Its lock is held for this one statement.
	recordRefusalSQL = `WITH admitted AS (
	  INSERT INTO refusal_windows AS w (attestor, reason, minute, recorded) VALUES ($1, $2, date_trunc('minute', join_now()), 1)
	  ON CONFLICT (attestor, reason, minute) DO UPDATE SET recorded = w.recorded + 1 WHERE w.recorded < $3
	  RETURNING 1
	), refused AS (
	  INSERT INTO events (type, tenant, data) SELECT 'security.join.refused', $4, $5::jsonb FROM admitted
	), reclaim AS (
	  INSERT INTO events (type, tenant, node_id, data) SELECT 'node.reclaim-refused', $6::text, $7::text, $8::jsonb FROM admitted WHERE $7 <> ''
	)
	SELECT count(*) > 0, extract(epoch FROM date_trunc('minute', join_now()) + interval '1 minute' - join_now())::float8 FROM admitted`

	dropRefusalsSQL = `INSERT INTO refusal_windows AS w (attestor, reason, minute, dropped) VALUES ($1, $2, date_trunc('minute', join_now()), $3)
	ON CONFLICT (attestor, reason, minute) DO UPDATE SET dropped = w.dropped + $3`
)

// refusalBuffer bounds the refusals that wait to be recorded.
const refusalBuffer = 1024

// refusalLog records refusals after their answers, in the background.
type refusalLog struct {
	queue chan *RefusedJoin
	mu    sync.Mutex
	full  map[refusalKey]*fullWindow
}

type refusalKey struct{ attestor, reason string }

// fullWindow is a minute in which enough of one kind was recorded.
type fullWindow struct {
	until   time.Time
	dropped int64
}

func (l *refusalLog) init() {
	l.queue = make(chan *RefusedJoin, refusalBuffer)
	l.full = map[refusalKey]*fullWindow{}
}

// RecordRefusal leaves a security.join.refused event, in the stream of the tenant
// that the evidence authenticated, else in the root tenant's; at most
// [Limits].RefusalsPerMinute a minute for one attestor and reason. It returns at
// once: [Service.Run] writes. Call it after the answer has left.
func (s *Service) RecordRefusal(ctx context.Context, r *RefusedJoin) {
	if s.refusals.isFull(r.key()) {
		s.metrics.dropped.Inc()
		return // of the log too: nobody fills it by asking
	}
	s.log.InfoContext(ctx, "join refused", "reason", r.Reason(), "detail", r.Refusal.Detail, "tenant", s.tenantOf(r),
		"csr_sha256", hex.EncodeToString(r.CSRSHA256[:]), "token_id", r.TokenID)
	select {
	case s.refusals.queue <- r:
	default:
		s.refusals.drop(r.key())
		s.metrics.dropped.Inc()
	}
}

func (r *RefusedJoin) key() refusalKey { return refusalKey{r.Attestor, r.Refusal.Reason} }

func (s *Service) tenantOf(r *RefusedJoin) string {
	if r.Refusal.Tenant != "" {
		return r.Refusal.Tenant
	}
	return s.cfg.RootTenant
}

// isFull counts a refusal that need not be written, without asking the database.
func (l *refusalLog) isFull(k refusalKey) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	w := l.full[k]
	if w == nil || !time.Now().Before(w.until) {
		return false
	}
	w.dropped++
	return true
}

func (l *refusalLog) drop(k refusalKey) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.full[k] == nil {
		l.full[k] = &fullWindow{}
	}
	l.full[k].dropped++
}

func (l *refusalLog) run(ctx context.Context, s *Service) error {
	tick := time.NewTicker(flushEvery)
	defer tick.Stop()
	for {
		select {
		case r := <-l.queue:
			l.write(ctx, s, r)
		case <-tick.C:
			l.writeDropped(ctx, s)
		case <-ctx.Done():
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTimeout)
			defer cancel()
			for {
				select {
				case r := <-l.queue:
					l.write(last, s, r)
					continue
				default:
				}
				l.writeDropped(last, s)
				return nil
			}
		}
	}
}

func (l *refusalLog) write(ctx context.Context, s *Service, r *RefusedJoin) {
	if l.isFull(r.key()) {
		s.metrics.dropped.Inc()
		return
	}
	recorded := false
	s.inBackground(ctx, "record a refusal", func(ctx context.Context) error {
		err := l.record(ctx, s, r)
		recorded = err == nil
		return err
	})
	if !recorded {
		l.drop(r.key())
		s.metrics.dropped.Inc()
	}
}

func (l *refusalLog) record(ctx context.Context, s *Service, r *RefusedJoin) error {
	data, err := json.Marshal(refusedEvent{
		Attestor: r.Attestor, Reason: r.Reason(), CSRSHA256: hex.EncodeToString(r.CSRSHA256[:]),
		HardwareKeySHA256: r.HardwareKeySHA256, TokenID: r.TokenID, Detail: r.Refusal.Detail,
	})
	if err != nil {
		return err
	}
	var reclaim ReclaimRefused
	if r.Reclaim != nil {
		reclaim = *r.Reclaim
	}
	reclaimData, err := json.Marshal(reclaimRefusedEvent{reclaim.Wanted, reclaim.Has})
	if err != nil {
		return err
	}
	var recorded bool
	var left float64
	err = s.db.QueryRow(ctx, recordRefusalSQL, r.Attestor, r.Refusal.Reason, s.limits.RefusalsPerMinute, s.tenantOf(r), string(data),
		reclaim.Tenant, reclaim.NodeID, string(reclaimData)).Scan(&recorded, &left)
	if err != nil {
		return err
	}
	if recorded {
		s.notifier.notify()
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	w := l.full[r.key()]
	if w == nil {
		w = &fullWindow{}
		l.full[r.key()] = w
	}
	w.until = time.Now().Add(time.Duration(left * float64(time.Second)))
	w.dropped++
	s.metrics.dropped.Inc()
	return nil
}

// writeDropped adds up what was not recorded.
func (l *refusalLog) writeDropped(ctx context.Context, s *Service) {
	l.mu.Lock()
	counts := map[refusalKey]int64{}
	for k, w := range l.full {
		if w.dropped > 0 {
			counts[k] = w.dropped
			w.dropped = 0
		}
		if !time.Now().Before(w.until) {
			delete(l.full, k)
		}
	}
	l.mu.Unlock()
	if len(counts) == 0 {
		return
	}
	s.inBackground(ctx, "count the refusals that were not recorded", func(ctx context.Context) error {
		var b pgx.Batch
		for k, n := range counts {
			b.Queue(dropRefusalsSQL, k.attestor, k.reason, n)
		}
		return s.db.SendBatch(ctx, &b).Close()
	})
}
