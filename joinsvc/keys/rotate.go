package keys

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/joinsvc/keyring"
)

// Config is what a run needs.
type Config struct {
	// DB connects as join_keys, through rows.Open.
	DB *pgxpool.Pool
	// Secrets may get and update the four Secrets of keys by their names, and create.
	Secrets                                        corev1client.SecretsGetter
	KeysNamespace, TrustNamespace, SystemNamespace string

	TrustDomain string
	// Endpoints are the gateways' https URLs.
	Endpoints []string
	// TLSCA is the PEM of the CAs that vouch for the endpoints.
	TLSCA []byte

	// Overlap is between a key's publication and its use, and again between its use
	// and the end of the key before.
	Overlap time.Duration
	// MaxAge is when a signing, sealing or challenge key is followed by the next;
	// BundleMaxAge the same for bundle keys.
	MaxAge, BundleMaxAge time.Duration
	// Force names kinds to rotate whatever their age.
	Force []Kind
	// KeysOnly leaves the bundle alone.
	KeysOnly bool
	// Wait is for how long replicas are given to load new keys, and the first CA. What
	// takes longer is left to the next run.
	Wait   time.Duration
	Logger *slog.Logger
}

// ErrNoNodeCA is returned while no replica has loaded a node CA: without one a
// bundle would be of no use.
var ErrNoNodeCA = errors.New("no node CA is registered: is a join service running, and is the Secret node-ca-1 there?")

// pollReplicas is how often replicas are looked at while they are waited for.
const pollReplicas = 250 * time.Millisecond

// Result is what a run left.
type Result struct {
	// Generation is the newest of the bundle; 0 where there is none.
	Generation int
	// Published says that this run made it.
	Published bool
	// Added, Activated and Dropped are key ids.
	Added, Activated, Dropped []string
	// Waiting is the new keys that not all replicas had yet.
	Waiting []string
}

// Rotate runs the job once. It fails without having changed what works: a key that
// was added is taken up by the next run.
func Rotate(ctx context.Context, cfg Config) (Result, error) {
	if err := cfg.check(); err != nil {
		return Result{}, err
	}
	unlock, err := lock(ctx, cfg.DB)
	if err != nil {
		return Result{}, err
	}
	defer unlock()
	r := &run{Config: cfg, store: secretStore{cfg.Secrets, cfg.KeysNamespace, cfg.TrustNamespace}, kinds: map[Kind]*stored{}}
	err = r.rotate(ctx)
	return r.result, err
}

func (c Config) check() error {
	if !trustDomainPattern.MatchString(c.TrustDomain) {
		return fmt.Errorf("trust domain %q is not the name of one", c.TrustDomain)
	}
	if c.Overlap < 0 {
		return errors.New("the overlap is negative")
	}
	for _, k := range c.Force {
		if !slices.Contains(Kinds, k) {
			return fmt.Errorf("%q is not a kind of key; the kinds are %q", k, Kinds)
		}
	}
	if c.KeysOnly {
		return nil
	}
	if _, err := decodePEM(string(c.TLSCA)); err != nil {
		return fmt.Errorf("the file of the TLS CA %w", err)
	}
	return checkEndpoints(c.Endpoints)
}

// run is one run's state.
type run struct {
	Config
	store   secretStore
	kinds   map[Kind]*stored
	history []generation
	result  Result
}

func (r *run) rotate(ctx context.Context) error {
	var err error
	if r.history, err = readHistory(ctx, r.DB); err != nil {
		return err
	}
	if len(r.history) > 0 {
		r.result.Generation = r.history[0].bundle.Generation
	}
	for _, kind := range Kinds {
		if r.kinds[kind], err = r.store.load(ctx, kind); err != nil {
			return err
		}
	}
	if err := r.consistent(); err != nil {
		return err
	}
	if err := r.beginAll(ctx); err != nil {
		return err
	}
	if r.KeysOnly {
		return nil
	}
	ready, err := r.await(ctx)
	if err != nil {
		return err
	}
	if err := r.publish(ctx, ready); err != nil {
		return err
	}
	return r.activateAll(ctx, ready)
}

// consistent refuses to go on from what cannot be: machines follow one chain of
// bundles in one trust domain.
func (r *run) consistent() error {
	if len(r.history) == 0 {
		return nil
	}
	newest := r.history[0].bundle
	if newest.TrustDomain != r.TrustDomain {
		return fmt.Errorf("the bundle that machines trust is of the trust domain %q, not %q: a trust domain cannot be renamed", newest.TrustDomain, r.TrustDomain)
	}
	if len(r.kinds[Bundle].keys) == 0 {
		return fmt.Errorf("the bundle keys are gone (Secret %s/%s), but generation %d was published: machines adopt nothing that those keys did not sign. Restore the Secret from a backup",
			r.TrustNamespace, keyring.BundleSecret, newest.Generation)
	}
	return nil
}

// beginAll drops keys that are over, and makes first and next ones.
func (r *run) beginAll(ctx context.Context) error {
	now, err := databaseTime(ctx, r.DB)
	if err != nil {
		return err
	}
	for _, kind := range Kinds {
		st := r.kinds[kind]
		maxAge := r.MaxAge
		if kind == Bundle {
			maxAge = r.BundleMaxAge
		}
		next, added, dropped, err := begin(kind, st.keys, now, maxAge, slices.Contains(r.Force, kind))
		if err != nil {
			return fmt.Errorf("make a %s key: %w", kind, err)
		}
		if len(added)+len(dropped) == 0 {
			continue
		}
		if err := r.store.save(ctx, st, next); err != nil {
			return err
		}
		r.result.Added = append(r.result.Added, added...)
		r.result.Dropped = append(r.result.Dropped, dropped...)
		r.Logger.InfoContext(ctx, "keys changed", "kind", string(kind), "added", added, "dropped", dropped)
		if err := audit(ctx, r.DB, r.SystemNamespace, map[string]any{"kind": kind, "added": added, "dropped": dropped}); err != nil {
			return err
		}
	}
	return nil
}

// await is the pending keys of each kind that may be published: all of a kind that
// replicas do not load, and of the others those that every running replica has. It
// also waits for the first CA.
func (r *run) await(ctx context.Context) (map[Kind][]string, error) {
	deadline := time.Now().Add(r.Wait)
	tick := time.NewTicker(pollReplicas)
	defer tick.Stop()
	for {
		ready := map[Kind][]string{}
		var waiting []string
		for kind, st := range r.kinds {
			kids := pending(st.keys)
			if len(kids) == 0 {
				continue
			}
			if kind.replicated() {
				behind, err := lacking(ctx, r.DB, kids)
				if err != nil {
					return nil, err
				}
				if len(behind) > 0 {
					waiting = append(waiting, kids...)
					r.Logger.DebugContext(ctx, "replicas have not loaded a new key yet", "kind", string(kind), "replicas", behind)
					continue
				}
			}
			ready[kind] = kids
		}
		cas, err := nodeCAs(ctx, r.DB)
		if err != nil {
			return nil, err
		}
		done := len(waiting) == 0 && len(cas) > 0
		if !done && time.Now().Before(deadline) {
			select {
			case <-ctx.Done():
				return nil, ctx.Err()
			case <-tick.C:
				continue
			}
		}
		slices.Sort(waiting)
		r.result.Waiting = waiting
		if len(waiting) > 0 {
			r.Logger.WarnContext(ctx, "not all replicas have loaded the new keys; they are published by a later run", "kids", waiting)
		}
		if len(cas) == 0 {
			return nil, ErrNoNodeCA
		}
		return ready, nil
	}
}

// publish makes the next generation of the bundle if it would say something new.
func (r *run) publish(ctx context.Context, ready map[Kind][]string) error {
	now, err := databaseTime(ctx, r.DB)
	if err != nil {
		return err
	}
	next, err := r.compose(ctx, ready, now)
	if err != nil {
		return err
	}
	if len(r.history) > 0 {
		unchanged, err := same(next, &r.history[0].bundle)
		if err != nil || unchanged {
			return err
		}
	}
	by, err := r.signer(now)
	if err != nil {
		return err
	}
	payload, err := json.Marshal(next)
	if err != nil {
		return fmt.Errorf("encode the bundle: %w", err)
	}
	jws, err := by.Sign(payload)
	if err != nil {
		return fmt.Errorf("sign the bundle: %w", err)
	}
	if err := publish(ctx, r.DB, r.SystemNamespace, next.Generation, payload, jws); err != nil {
		return err
	}
	r.history = slices.Insert(r.history, 0, generation{*next, now})
	r.result.Generation, r.result.Published = next.Generation, true
	r.Logger.InfoContext(ctx, "published the join bundle", "generation", next.Generation)
	return nil
}

func (r *run) compose(ctx context.Context, ready map[Kind][]string, now time.Time) (*wire.Bundle, error) {
	c := content{
		trustDomain: r.TrustDomain, endpoints: r.Endpoints,
		signing: r.visible(Signing, ready), sealing: r.visible(Sealing, ready), bundle: r.visible(Bundle, ready),
	}
	var err error
	if c.nodeCAs, err = nodeCAs(ctx, r.DB); err != nil {
		return nil, err
	}
	file, err := decodePEM(string(r.TLSCA))
	if err != nil {
		return nil, err
	}
	if c.tlsCAs, err = tlsCAs(file, r.history, now, r.Overlap); err != nil {
		return nil, err
	}
	return c.compose(r.result.Generation+1, now)
}

// visible is the keys of a kind that machines may know of. A key that was published
// stays so, also where a new replica is only about to load it.
func (r *run) visible(kind Kind, ready map[Kind][]string) []keyring.Key {
	var out []keyring.Key
	for _, k := range r.kinds[kind].keys {
		shown := !k.UseFrom.IsZero() || slices.Contains(ready[kind], k.KeyID)
		if !shown && len(r.history) > 0 {
			shown, _ = published(&r.history[0].bundle, kind, k.KeyID)
		}
		if shown {
			out = append(out, k)
		}
	}
	return out
}

// signer signs the next generation: with a bundle key that the newest one lists;
// the first is signed by its own.
func (r *run) signer(now time.Time) (*keyring.Signer, error) {
	usable := r.kinds[Bundle].keys
	if len(r.history) > 0 {
		listed, err := keyIDs(r.history[0].bundle.BundleKeys)
		if err != nil {
			return nil, fmt.Errorf("bundle keys of generation %d: %w", r.result.Generation, err)
		}
		usable = slices.DeleteFunc(slices.Clone(usable), func(k keyring.Key) bool { return !slices.Contains(listed, k.KeyID) })
	}
	k := keyring.Current(usable, now)
	if k == nil {
		return nil, fmt.Errorf("none of the bundle keys that generation %d lists is in use here: machines would not follow. Restore the Secret %s/%s from a backup",
			r.result.Generation, r.TrustNamespace, keyring.BundleSecret)
	}
	return keyring.NewSigner(*k, wire.TypeBundle)
}

// activateAll gives keys that are published, or that nobody needs to know of, the
// time from which they are used.
func (r *run) activateAll(ctx context.Context, ready map[Kind][]string) error {
	now, err := databaseTime(ctx, r.DB)
	if err != nil {
		return err
	}
	for _, kind := range Kinds {
		from, kids := now.Add(r.Overlap), ready[kind]
		if kind == Challenge {
			from = now // every replica opens it, and machines never see it
		}
		st := r.kinds[kind]
		next, activated := activate(st.keys, kids, from, r.Overlap)
		if len(activated) == 0 {
			continue
		}
		if err := r.store.save(ctx, st, next); err != nil {
			return err
		}
		r.result.Activated = append(r.result.Activated, activated...)
		r.Logger.InfoContext(ctx, "new keys are used from now on or soon", "kind", string(kind), "kids", activated, "from", from)
		if err := audit(ctx, r.DB, r.SystemNamespace, map[string]any{"kind": kind, "activated": activated, "from": from}); err != nil {
			return err
		}
	}
	return nil
}
