package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/better-compute/join-operator/agent/state"
	"github.com/better-compute/join-operator/api/wire"
)

// RunOptions is how a machine keeps its identity.
type RunOptions struct {
	// Join is how to join where the machine has not joined yet. With Once, Run
	// does what is due now and ends; WaitLimit limits the first join alone.
	Join JoinOptions
	// Prover may be nil where no certificate states anything about the node's key.
	Prover Prover
	// Reload is run after a certificate was handed over, so that programs load it;
	// nil runs nothing. An error keeps nothing from being renewed.
	Reload func(ctx context.Context, id *state.Identity) error
}

// Run joins, and from then on renews the certificate in time, for ever: it ends
// when the context does, or where this machine's own state is damaged. A
// certificate that ran out while the machine was off is replaced by a join with
// it (x509pop). Nothing that an endpoint says ends it.
//
// With Once it returns after what is due now, with the error that the exchange
// or the hand-over brought.
func (m *Machine) Run(ctx context.Context, o RunOptions) error {
	id, err := m.identityOrJoin(ctx, o.Join)
	if err != nil {
		return err
	}
	l := life{m: m, o: o, id: id, renewing: m.newBackOff(), settling: m.newBackOff()}
	return l.run(ctx)
}

func (m *Machine) identityOrJoin(ctx context.Context, o JoinOptions) (*state.Identity, error) {
	id, err := m.state.Identity()
	if err == nil {
		return id, sameRole(id, o.Role)
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	j, err := m.untilJoined(ctx, o, func() (*Joined, error) { return m.attempt(ctx, o) })
	if err != nil {
		return nil, err
	}
	m.observe(Admitted{j.Identity, ByJoin})
	m.settled()
	return j.Identity, nil
}

// sameRole keeps a directory from being used for two things.
func sameRole(id *state.Identity, role wire.Role) error {
	if id.Role != role {
		return &LocalError{fmt.Errorf("this machine has joined as %s already, not as %s: use another state directory", id.Role, role)}
	}
	return nil
}

// life is a machine that has joined. Its times are those of Clock.Elapsed.
type life struct {
	m  *Machine
	o  RunOptions
	id *state.Identity

	renewing backOff
	// askAt is when the next exchange may begin, where one failed or was late.
	askAt time.Duration
	// foreseen is true once the end of the wait for a renewal was in sight.
	foreseen bool
	// planned is the certificate whose renewal was told of, and probed the one that
	// an exchange was too early for.
	planned, probed string
	// turn takes the two ways in turn while it is in doubt whether the certificate
	// ran out.
	turn bool

	settling backOff
	// settleAt is when to go on with what a stored certificate leaves to do.
	settleAt time.Duration
	settled  bool
	// reloaded is the certificate that this process ran the reload command for.
	reloaded string
}

func (l *life) run(ctx context.Context) error {
	exchanges := 0
	for ctx.Err() == nil {
		settleErr := l.settleDue(ctx)
		// A second exchange follows one whose answer had been lost for too long.
		if l.o.Join.Once && (!l.due() || exchanges == 2) {
			return settleErr
		}
		wait := l.untilRenewal()
		if wait > 0 && !l.o.Join.Once {
			if err := l.sleep(ctx, wait); err != nil {
				return err
			}
			continue
		}
		exchanges++
		if err := l.renew(ctx); err != nil {
			return err
		}
	}
	return ctx.Err()
}

func (l *life) sleep(ctx context.Context, wait time.Duration) error {
	wait = min(wait, lookAgain)
	if !l.settled {
		wait = min(wait, max(l.settleAt-l.m.clock.Elapsed(), 0))
	}
	return l.m.clock.Sleep(ctx, wait)
}

// due is when the plan says so. Where the clock has stepped and by it the time has
// come, one exchange finds out which of the two is right; so it does where a
// clock that was wrong may be right by now and says that the certificate ran out.
func (l *life) due() bool {
	if !l.m.now().Before(l.id.RenewAt) {
		return true
	}
	limit := l.id.NotAfter
	if l.m.time.fresh {
		limit = l.id.RenewAt
	}
	return l.probed != l.id.CertificateSHA256 && !l.m.time.otherwise().Before(limit)
}

// untilRenewal is how long to wait for the next exchange; not positive says now.
func (l *life) untilRenewal() time.Duration {
	now := l.m.now()
	if in := l.id.RenewAt.Sub(now); !l.due() {
		if l.planned != l.id.CertificateSHA256 {
			l.planned = l.id.CertificateSHA256
			l.m.observe(RenewalPlanned{At: l.id.RenewAt, In: in})
		}
		l.foreseen = in <= lookAgain
		return in
	}
	if late := now.Sub(l.id.RenewAt); !l.foreseen || late > lookAgain+punctual {
		l.foreseen = true
		// What was waited for already counts: nobody waits twice for one renewal.
		if l.askAt == 0 {
			l.putOff(spreadLate(l.id.NotAfter.Sub(now), l.m.random))
		}
	}
	return l.askAt - l.m.clock.Elapsed()
}

func (l *life) putOff(d time.Duration) { l.askAt = l.m.clock.Elapsed() + d }

// renew makes one exchange. The error is one that ends Run.
func (l *life) renew(ctx context.Context) error {
	m := l.m
	j, way, err := l.exchange(ctx)
	if ctx.Err() != nil && err != nil {
		return ctx.Err()
	}
	if err == nil {
		l.id, l.askAt, l.foreseen, l.settled, l.turn = j.Identity, 0, false, false, false
		l.renewing.reset()
		l.settling.reset()
		l.settleAt = 0
		m.settled()
		m.observe(Admitted{j.Identity, way})
		return nil
	}
	if _, damaged := errors.AsType[*state.DamagedError](err); damaged {
		return err
	}
	wait := l.failed(err)
	m.recordFailure(err, wait)
	if l.o.Join.Once {
		return err
	}
	m.observe(Waiting{Reason: err, For: wait, Identity: l.id})
	m.log.Info("waiting", "for", wait.Round(time.Second).String(), "reason", Summary(err))
	return nil
}

// failed plans the next exchange after one that brought nothing.
func (l *life) failed(err error) time.Duration {
	if IsRefused(err) {
		l.turn = !l.turn
	}
	if p, ok := errors.AsType[*ProblemError](err); ok && p.Code == wire.RateLimited {
		l.probed = l.id.CertificateSHA256
	}
	wait := waitAfter(err, &l.renewing)
	l.putOff(wait)
	return wait
}

func (l *life) exchange(ctx context.Context) (*Joined, Way, error) {
	m := l.m
	request, err := m.state.NextRequest(l.id, m.keyType)
	if err != nil {
		if _, damaged := errors.AsType[*state.DamagedError](err); !damaged {
			err = &LocalError{err}
		}
		return nil, "", err
	}
	m.request = request
	if l.inForce() {
		j, err := m.obtain(ctx, &renewQuestion{request: request, id: l.id, prover: l.o.Prover})
		return j, ByRenewal, err
	}
	j, err := m.obtain(ctx, &joinQuestion{
		request: request, producer: &certificateProducer{request: request, id: l.id, prover: l.o.Prover},
		role: l.id.Role, claims: l.o.Join.Claims, again: l.id,
	})
	return j, ByRejoin, err
}

// inForce reports whether to renew the certificate rather than to join again by
// it. Where it is in doubt whether it ran out, both ways are tried in turn. A
// ramdisk's certificate opens no second way.
func (l *life) inForce() bool {
	if l.id.Role == wire.RoleRamdisk {
		return true
	}
	one, other := l.m.now().Before(l.id.NotAfter), l.m.time.otherwise().Before(l.id.NotAfter)
	if one == other {
		return one
	}
	return one != l.turn
}

// settleDue does what a stored certificate leaves to do: hand it over, confirm it,
// have it loaded. What failed is tried again later, beside the renewals.
func (l *life) settleDue(ctx context.Context) error {
	if l.settled || l.m.clock.Elapsed() < l.settleAt {
		return nil
	}
	err := l.settle(ctx)
	if err == nil {
		l.settled = true
		return nil
	}
	if ctx.Err() == nil {
		wait := waitAfter(err, &l.settling)
		l.settleAt = l.m.clock.Elapsed() + wait
		l.m.log.Warn("a stored certificate is not handed over or confirmed yet; it stands", "again", wait.Round(time.Second).String(), "error", err)
	}
	return err
}

func (l *life) settle(ctx context.Context) error {
	m := l.m
	if err := m.state.WriteOutputs(l.o.Join.Outputs); err != nil {
		return &LocalError{err}
	}
	var confirmErr error
	if p := m.progress(); p.ConfirmedSHA256 != l.id.CertificateSHA256 {
		if confirmErr = m.confirm(ctx, l.id, true); confirmErr == nil {
			p.ConfirmedSHA256 = l.id.CertificateSHA256
			m.storeProgress(p)
			m.observe(Confirmed{})
		}
	}
	l.reload(ctx)
	return confirmErr
}

// reload runs the command once for each certificate, and again where it failed or
// was cut short before this process began. That it ran is stored after it ended.
func (l *life) reload(ctx context.Context) {
	sha := l.id.CertificateSHA256
	if l.o.Reload == nil || l.reloaded == sha || ctx.Err() != nil {
		return
	}
	if r := l.m.progress().Reload; r != nil && r.CertificateSHA256 == sha && r.Problem == "" {
		l.reloaded = sha
		return
	}
	err := l.o.Reload(ctx, l.id)
	if ctx.Err() != nil {
		return
	}
	l.reloaded = sha
	r := &state.Reload{CertificateSHA256: sha, At: l.m.clock.Now().UTC().Truncate(time.Second)}
	if err != nil {
		r.Problem = printable(Summary(err), 500)
		l.m.log.Info("the reload command failed; it is run again at the next start and for the next certificate", "error", err)
	}
	p := l.m.progress()
	p.Reload = r
	l.m.storeProgress(p)
	l.m.observe(Reloaded{Err: err})
}

// settled keeps that nothing stands in the way any more.
func (m *Machine) settled() {
	p := m.progress()
	p.Settled()
	m.storeProgress(p)
}
