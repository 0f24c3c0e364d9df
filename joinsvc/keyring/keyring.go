package keyring

import (
	"crypto/cipher"
	"crypto/hpke"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/joinsvc/secrets"
)

var (
	// ErrNoKey is returned while no key of the kind is in use: an outage.
	ErrNoKey = errors.New("no key of this kind is in use")
	// ErrUnknownKey is returned for a key id that is not, or no longer, loaded.
	ErrUnknownKey = errors.New("no such key")
	// ErrSealed is returned for what does not open; it does not say why.
	ErrSealed = errors.New("does not open")
)

// Keyring is a replica's live keys. All methods may be called by many goroutines.
type Keyring struct {
	log *slog.Logger
	now func() time.Time

	signing, sealing, challenge atomic.Pointer[list]

	mu     sync.Mutex // held by Load
	broken map[string]string
	// changed has room for one: the ids that are loaded are others than before.
	changed chan struct{}
}

// New makes an empty keyring. now is the clock by which keys come into use and are
// dropped; nil takes the system's.
func New(log *slog.Logger, now func() time.Time) *Keyring {
	if now == nil {
		now = time.Now
	}
	return &Keyring{log: log, now: now, broken: map[string]string{}, changed: make(chan struct{}, 1)}
}

// list is the keys of one kind. It does not change.
type list struct{ keys []*held }

// held is a key, ready for use.
type held struct {
	Key
	open    hpke.PrivateKey // of a sealing key
	state   cipher.AEAD     // of a challenge key
	signers sync.Map        // of a signing key: *Signer by typ
}

func hold(k Key) (*held, error) {
	h := &held{Key: k}
	var err error
	switch k.Algorithm {
	case MLKEM768X25519:
		h.open, err = k.hpkePrivate()
	case AES256GCM:
		h.state, err = k.aead()
	}
	return h, err
}

func (l *list) all() []*held {
	if l == nil {
		return nil
	}
	return l.keys
}

// current is the key that signs or seals now, or nil.
func (l *list) current(now time.Time) *held {
	var best *held
	for _, h := range l.all() {
		if h.InUse(now) && (best == nil || h.UseFrom.After(best.UseFrom)) {
			best = h
		}
	}
	return best
}

// find is the key with that id, or nil; also one that is not in use yet.
func (l *list) find(kid string, now time.Time) *held {
	for _, h := range l.all() {
		if h.KeyID == kid && !h.Dropped(now) {
			return h
		}
	}
	return nil
}

// Load takes the keys' namespace as it is now. A Secret that is gone or cannot be
// read keeps what was loaded last: keys are taken away by leaving them out of their
// file, never by removing it.
func (r *Keyring) Load(snapshot secrets.Snapshot) {
	r.mu.Lock()
	defer r.mu.Unlock()
	before := r.KeyIDs()
	for _, kind := range []struct {
		secret    string
		algorithm Algorithm
		into      *atomic.Pointer[list]
	}{
		{SigningSecret, Ed25519, &r.signing},
		{SealingSecret, MLKEM768X25519, &r.sealing},
		{ChallengeSecret, AES256GCM, &r.challenge},
	} {
		l, err := loadList(snapshot, kind.secret, kind.algorithm)
		if err == nil {
			kind.into.Store(l)
			delete(r.broken, kind.secret)
			continue
		}
		if r.broken[kind.secret] != err.Error() {
			r.broken[kind.secret] = err.Error()
			r.log.Error("a Secret of keys cannot be used; what was loaded last stays", "secret", kind.secret, "error", err, "loaded", len(kind.into.Load().all()))
		}
	}
	if after := r.KeyIDs(); !slices.Equal(before, after) {
		r.log.Info("loaded keys", "kids", after)
		select {
		case r.changed <- struct{}{}:
		default:
		}
	}
}

func loadList(snapshot secrets.Snapshot, secret string, a Algorithm) (*list, error) {
	data, ok := snapshot[secret]
	if !ok {
		return nil, errors.New("there is no such Secret; the keys job makes it")
	}
	f, err := ParseFile(data[Item], a)
	if err != nil {
		return nil, fmt.Errorf("%s %w", Item, err)
	}
	if len(f.Keys) == 0 {
		return nil, fmt.Errorf("%s holds no key", Item)
	}
	l := &list{}
	for _, k := range f.Keys {
		h, err := hold(k)
		if err != nil {
			return nil, fmt.Errorf("key %s: %w", k.KeyID, err)
		}
		l.keys = append(l.keys, h)
	}
	return l, nil
}

// Ready reports whether there is a key of each kind to work with.
func (r *Keyring) Ready() bool {
	now := r.now()
	return r.signing.Load().current(now) != nil && r.sealing.Load().current(now) != nil && r.challenge.Load().current(now) != nil
}

// KeyIDs lists the ids of all loaded keys, in order.
func (r *Keyring) KeyIDs() []string {
	now := r.now()
	ids := []string{}
	for _, l := range []*list{r.signing.Load(), r.sealing.Load(), r.challenge.Load()} {
		for _, h := range l.all() {
			if !h.Dropped(now) {
				ids = append(ids, h.KeyID)
			}
		}
	}
	slices.Sort(ids)
	return ids
}

// Knows reports whether a sealing key with that id is loaded.
func (r *Keyring) Knows(kid string) bool { return r.sealing.Load().find(kid, r.now()) != nil }

// encSize is the size of an encapsulated key of MLKEM768-X25519, in bytes.
const encSize = 1120

// Open opens a sealed part: enc || ciphertext of HPKE in base mode (RFC 9180), with
// the protocol's info string. It returns ErrUnknownKey for a key that is not
// loaded, and ErrSealed for whatever else is wrong.
func (r *Keyring) Open(kid string, aad, sealed []byte) ([]byte, error) {
	h := r.sealing.Load().find(kid, r.now())
	if h == nil {
		return nil, ErrUnknownKey
	}
	if len(sealed) < encSize {
		return nil, ErrSealed
	}
	recipient, err := hpke.NewRecipient(sealed[:encSize], h.open, hpke.HKDFSHA256(), hpke.ChaCha20Poly1305(), []byte(wire.SealInfo))
	if err != nil {
		return nil, ErrSealed
	}
	plaintext, err := recipient.Open(aad, sealed[encSize:])
	if err != nil {
		return nil, ErrSealed
	}
	return plaintext, nil
}
