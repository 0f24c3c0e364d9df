package httpapi

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/better-compute/join-operator/joinsvc/pki"
)

const (
	// listFresh is for how long a revocation list is served from memory.
	listFresh = time.Second
	// maxLists bounds how many are.
	maxLists = 32
)

// Revocations serves the revocation lists that a keeper signs, and spares the
// database who asks often.
type Revocations struct {
	authority *pki.Authority
	keeper    *pki.Keeper

	mu    sync.Mutex
	lists map[string]cachedList // by SKI
}

type cachedList struct {
	der  []byte
	read time.Time
}

// NewRevocations serves what keeper keeps for authority.
func NewRevocations(a *pki.Authority, k *pki.Keeper) *Revocations {
	return &Revocations{authority: a, keeper: k, lists: map[string]cachedList{}}
}

// Newest implements Lists.
func (r *Revocations) Newest(ctx context.Context) ([]byte, error) {
	ski := r.authority.SigningSKI(time.Now())
	if ski == nil {
		return nil, pki.ErrNoIssuer
	}
	der, err := r.OfKey(ctx, ski)
	if errors.Is(err, pki.ErrNoCRL) {
		return nil, errors.New("the newest CA has no revocation list yet") // in seconds it has: no "not found"
	}
	return der, err
}

// OfKey implements Lists. What is kept in memory is served when the database is away.
func (r *Revocations) OfKey(ctx context.Context, ski []byte) ([]byte, error) {
	r.mu.Lock()
	known, ok := r.lists[string(ski)]
	r.mu.Unlock()
	if ok && time.Since(known.read) < listFresh {
		return known.der, nil
	}
	der, err := r.keeper.CRL(ctx, ski)
	switch {
	case errors.Is(err, pki.ErrNoCRL):
		return nil, err
	case err != nil && ok:
		return known.der, nil
	case err != nil:
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.lists) >= maxLists {
		clear(r.lists)
	}
	r.lists[string(ski)] = cachedList{der, time.Now()}
	return der, nil
}
