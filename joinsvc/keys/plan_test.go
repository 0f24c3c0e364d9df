package keys

import (
	"slices"
	"testing"
	"time"

	"github.com/better-compute/join-operator/joinsvc/keyring"
)

var start = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

const (
	day     = 24 * time.Hour
	overlap = day
	maxAge  = 90 * day
)

// TestAKeysWholeLife runs the plan by hand, without Kubernetes and a database.
func TestAKeysWholeLife(t *testing.T) {
	for _, kind := range Kinds {
		t.Run(string(kind), func(t *testing.T) {
			var list []keyring.Key
			step := func(at time.Duration, force bool) (added, dropped []string) {
				t.Helper()
				var err error
				list, added, dropped, err = begin(kind, list, start.Add(at), maxAge, force)
				if err != nil {
					t.Fatal(err)
				}
				return added, dropped
			}
			current := func(at time.Duration) string {
				t.Helper()
				k := keyring.Current(list, start.Add(at))
				if k == nil {
					t.Fatalf("no key is in use after %v", at)
				}
				return k.KeyID
			}
			first, dropped := step(0, false)
			if len(first) != 1 || len(dropped) != 0 || current(0) != first[0] {
				t.Fatalf("first: added %v, dropped %v", first, dropped)
			}
			if again, _ := step(0, false); len(again) > 0 {
				t.Errorf("a second run added %v", again)
			}
			if early, _ := step(maxAge-time.Second, false); len(early) > 0 {
				t.Errorf("too early: %v", early)
			}
			second, _ := step(maxAge, false)
			if len(second) != 1 || current(maxAge+365*day) != first[0] {
				t.Fatalf("second: %v; in use: %s", second, current(maxAge+365*day))
			}
			if third, _ := step(maxAge+overlap, true); len(third) > 0 {
				t.Errorf("a third while the second waits: %v", third)
			}
			// Only what is ready is activated.
			if _, none := activate(list, []string{"other"}, start.Add(maxAge), overlap); len(none) > 0 {
				t.Errorf("activated %v", none)
			}
			use := maxAge + 2*overlap
			var activated []string
			list, activated = activate(list, second, start.Add(use), overlap)
			if !slices.Equal(activated, second) {
				t.Errorf("activated %v", activated)
			}
			for at, want := range map[time.Duration]string{use - time.Second: first[0], use: second[0], use + overlap: second[0]} {
				if got := current(at); got != want {
					t.Errorf("after %v: %s, want %s", at, got, want)
				}
			}
			if _, dropped := step(use+overlap-time.Second, false); len(dropped) > 0 {
				t.Errorf("dropped too early: %v", dropped)
			}
			if _, dropped := step(use+overlap, false); !slices.Equal(dropped, first) {
				t.Errorf("dropped %v, want %v", dropped, first)
			}
			if len(list) != 1 {
				t.Errorf("%d keys left", len(list))
			}
			if forced, _ := step(use+overlap, true); len(forced) != 1 {
				t.Errorf("forced: %v", forced)
			}
		})
	}
}

func TestSealingKeysAreOrderedForMachines(t *testing.T) {
	key := func(id string, use, drop time.Duration) keyring.Key {
		k := keyring.Key{KeyID: id}
		if use >= 0 {
			k.UseFrom = start.Add(use)
		}
		if drop > 0 {
			k.DropAfter = start.Add(drop)
		}
		return k
	}
	list := []keyring.Key{key("old", 0, 3*day), key("next", 2*day, 0), key("pending", -1, 0), key("used", day, 0)}
	for at, want := range map[time.Duration][]string{
		day:     {"used", "old", "next", "pending"},
		2 * day: {"next", "used", "old", "pending"},
		3 * day: {"next", "used", "old", "pending"},
	} {
		var got []string
		for _, k := range inOrder(list, start.Add(at)) {
			got = append(got, k.KeyID)
		}
		if !slices.Equal(got, want) {
			t.Errorf("after %v: %v, want %v", at, got, want)
		}
	}
}
