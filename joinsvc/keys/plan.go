package keys

import (
	"slices"
	"time"

	"github.com/better-compute/join-operator/joinsvc/keyring"
)

// Kind is a kind of key, as the command line names it.
type Kind string

// The kinds.
const (
	Signing   Kind = "signing"
	Sealing   Kind = "sealing"
	Challenge Kind = "challenge"
	Bundle    Kind = "bundle"
)

// Kinds lists all kinds.
var Kinds = []Kind{Signing, Sealing, Challenge, Bundle}

func (k Kind) algorithm() keyring.Algorithm {
	switch k {
	case Sealing:
		return keyring.MLKEM768X25519
	case Challenge:
		return keyring.AES256GCM
	default:
		return keyring.Ed25519
	}
}

func (k Kind) secret() string {
	switch k {
	case Signing:
		return keyring.SigningSecret
	case Sealing:
		return keyring.SealingSecret
	case Challenge:
		return keyring.ChallengeSecret
	default:
		return keyring.BundleSecret
	}
}

// replicated reports whether replicas load keys of the kind.
func (k Kind) replicated() bool { return k != Bundle }

// pending is the keys that are not in use yet and have no time from which they are.
func pending(list []keyring.Key) []string {
	var ids []string
	for _, k := range list {
		if k.UseFrom.IsZero() {
			ids = append(ids, k.KeyID)
		}
	}
	return ids
}

// begin is the first half of a run: it drops what is over, makes the first key,
// which is used at once, and adds the next one where the newest is older than
// maxAge or force asks for it. It returns a new list and the ids of keys that were
// added and dropped.
func begin(kind Kind, list []keyring.Key, now time.Time, maxAge time.Duration, force bool) (out []keyring.Key, added, dropped []string, err error) {
	for _, k := range list {
		if k.Dropped(now) {
			dropped = append(dropped, k.KeyID)
			continue
		}
		out = append(out, k)
	}
	first := len(out) == 0
	newest := time.Time{}
	for _, k := range out {
		if k.CreatedAt.After(newest) {
			newest = k.CreatedAt
		}
	}
	if !first && (len(pending(out)) > 0 || !force && now.Sub(newest) < maxAge) {
		return out, nil, dropped, nil
	}
	k, err := keyring.NewKey(kind.algorithm(), now)
	if err != nil {
		return nil, nil, nil, err
	}
	if first {
		k.UseFrom = k.CreatedAt
	}
	return append(out, k), []string{k.KeyID}, dropped, nil
}

// activate is the second half: the pending keys that ready names begin to be used
// at from, and the keys before them are dropped an overlap later. It returns a new
// list and the ids of the keys that were given a time.
func activate(list []keyring.Key, ready []string, from time.Time, overlap time.Duration) (out []keyring.Key, activated []string) {
	from = from.UTC().Truncate(time.Second)
	out = slices.Clone(list)
	for i := range out {
		if k := &out[i]; k.UseFrom.IsZero() && slices.Contains(ready, k.KeyID) {
			k.UseFrom = from
			activated = append(activated, k.KeyID)
		}
	}
	if len(activated) == 0 {
		return out, nil
	}
	for i := range out {
		if k := &out[i]; !k.UseFrom.IsZero() && k.UseFrom.Before(from) && k.DropAfter.IsZero() {
			k.DropAfter = from.Add(overlap)
		}
	}
	return out, activated
}
