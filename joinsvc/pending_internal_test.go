package joinsvc

import (
	"testing"
	"time"
)

// However many machines wait, and however long, all their polls stay below 200/s.
func TestAllPollsTogetherStayBelow200PerSecond(t *testing.T) {
	previous := time.Duration(0)
	for _, waiting := range []int64{0, 1, 100, 2000, 5000, 20_000, 100_000} {
		d := retryAfter(0, waiting)
		if d < 15*time.Second || d > 10*time.Minute {
			t.Errorf("%d wait: %s", waiting, d)
		}
		if rate := float64(waiting) / d.Seconds(); rate >= 200 {
			t.Errorf("%d wait: %.0f polls/s", waiting, rate)
		}
		if d < previous {
			t.Errorf("%d wait: %s, sooner than with fewer", waiting, d)
		}
		previous = d
	}
	if retryAfter(0, 0) != 15*time.Second || retryAfter(time.Hour, 0) <= retryAfter(time.Minute, 0) || retryAfter(7*24*time.Hour, 0) != 10*time.Minute {
		t.Error("it does not grow with age from 15 s to 10 min")
	}
}

func TestCapsAreThoseOfTheDesign(t *testing.T) {
	l := Limits{}.withDefaults()
	room := caps{tenant: 499, source: 499, token: 3, usesLeft: 2, total: 4999}
	if l.capped(room, true) {
		t.Error("there was room")
	}
	for name, c := range map[string]caps{
		"the tenant": {tenant: 500, usesLeft: 1},
		"the source": {source: 500, usesLeft: 1},
		"the token":  {token: 4, usesLeft: 2},
		"all":        {total: 5000, tenant: 50, usesLeft: 1},
	} {
		if !l.capped(c, true) {
			t.Errorf("%s is full and yet there was room", name)
		}
	}
	if l.capped(caps{total: 5000, tenant: 49, usesLeft: 1}, true) {
		t.Error("a tenant has not its own 50")
	}
	if l.capped(caps{token: 4, usesLeft: 0}, false) {
		t.Error("a join without a token is held against one")
	}
}
