package gateway

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"
)

const (
	// probeEvery is how soon a replica that is not ready, or is again, is known.
	probeEvery = time.Second
	// resolveEvery is how soon a new address of a name is used.
	resolveEvery = 5 * time.Second
	probeTimeout = time.Second
)

// Run follows the addresses of the replicas' names, and asks each replica whether
// it is ready, until ctx ends.
func (u *Upstreams) Run(ctx context.Context) {
	probe, resolve := time.NewTicker(probeEvery), time.NewTicker(resolveEvery)
	defer probe.Stop()
	defer resolve.Stop()
	u.resolve(ctx, net.DefaultResolver.LookupNetIP)
	u.probe(ctx)
	for {
		select {
		case <-ctx.Done():
			return
		case <-resolve.C:
			u.resolve(ctx, net.DefaultResolver.LookupNetIP)
		case <-probe.C:
			u.probe(ctx)
		}
	}
}

// lookup is net.Resolver.LookupNetIP.
type lookup func(ctx context.Context, network, host string) ([]netip.Addr, error)

// resolve makes a replica of each address of each name, and keeps those it had. A
// name that cannot be resolved keeps its last addresses.
func (u *Upstreams) resolve(ctx context.Context, find lookup) {
	old := *u.replicas.Load()
	var next []*replica
	for _, t := range u.targets {
		addresses := u.addresses(ctx, t, find)
		if addresses == nil {
			for _, r := range old {
				if r.target == t && !slices.Contains(next, r) {
					next = append(next, r)
				}
			}
			continue
		}
		for _, address := range addresses {
			same := func(r *replica) bool { return r.target == t && r.address == address }
			if slices.ContainsFunc(next, same) {
				continue
			}
			if i := slices.IndexFunc(old, same); i >= 0 {
				next = append(next, old[i])
			} else {
				next = append(next, u.newReplica(t, address))
			}
		}
	}
	u.replicas.Store(&next)
	for _, r := range old {
		if !slices.Contains(next, r) {
			r.transport.CloseIdleConnections()
		}
	}
	if !slices.Equal(old, next) {
		u.log.InfoContext(ctx, "the replicas of the join service changed", "before", len(old), "now", len(next))
	}
}

// addresses of a target, or nil where nothing is known.
func (u *Upstreams) addresses(ctx context.Context, t target, find lookup) []string {
	if _, err := netip.ParseAddr(t.host); err == nil {
		return []string{net.JoinHostPort(t.host, t.port)}
	}
	ctx, cancel := context.WithTimeout(ctx, resolveEvery)
	defer cancel()
	found, err := find(ctx, "ip", t.host)
	if err != nil || len(found) == 0 {
		u.log.WarnContext(ctx, "the join service's name has no address", "host", t.host, "error", err)
		return nil
	}
	var addresses []string
	for _, a := range found {
		addresses = append(addresses, net.JoinHostPort(a.Unmap().String(), t.port))
	}
	return addresses
}

// probe asks all replicas at once.
func (u *Upstreams) probe(ctx context.Context) {
	var wg sync.WaitGroup
	for _, r := range *u.replicas.Load() {
		wg.Go(func() {
			err := r.probe(ctx)
			state := ready
			if err != nil {
				state = unready
			} else {
				r.restUntil.Store(0)
			}
			if before := r.health.Swap(state); before != state && ctx.Err() == nil {
				u.log.InfoContext(ctx, "a replica of the join service", "address", r.address, "ready", state == ready, "error", err)
			}
		})
	}
	wg.Wait()
}

func (r *replica) probe(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	o := &outgoing{method: http.MethodGet, path: pathReadyz, header: http.Header{"User-Agent": {"join-gateway"}}}
	resp, err := r.transport.RoundTrip(o.to(ctx, r))
	if err != nil {
		r.transport.CloseIdleConnections()
		return err
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 4<<10)) // so that the connection is kept
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("status %d", resp.StatusCode)
	}
	return nil
}
