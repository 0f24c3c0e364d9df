package keyring

import (
	"context"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/better-compute/join-operator/joinsvc/secrets"
	"github.com/better-compute/join-operator/test/pgtest"
)

// TestAReplicaSaysWhichKeysItHas follows the row from the first keys to the end.
func TestAReplicaSaysWhichKeysItHas(t *testing.T) {
	db := pgtest.New(t)
	admin := db.Pool(t, pgtest.Admin)
	if _, err := admin.Exec(t.Context(), `INSERT INTO replicas (id, keys, seen_at) VALUES ('long-gone', '{}', now() - interval '2 hours'), ('other', '{}', now() - interval '30 minutes')`); err != nil {
		t.Fatal(err)
	}
	keys := func() []string {
		var out []string
		if err := admin.QueryRow(t.Context(), `SELECT coalesce((SELECT keys FROM replicas WHERE id = 'r1'), '{none}')`).Scan(&out); err != nil {
			t.Fatal(err)
		}
		return out
	}
	eventually := func(what string, done func() bool) {
		t.Helper()
		for begun := time.Now(); !done(); time.Sleep(5 * time.Millisecond) {
			if time.Since(begun) > heartbeat-2*time.Second { // sooner than the next beat
				t.Fatalf("%s: not in time; the row says %v", what, keys())
			}
		}
	}
	r := New(slog.New(slog.DiscardHandler), nil)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); r.Report(ctx, db.Pool(t, pgtest.Service), "r1") }()
	eventually("the empty keyring", func() bool { return len(keys()) == 0 })
	k := newKey(t, MLKEM768X25519, time.Now())
	r.Load(secrets.Snapshot{SealingSecret: file(t, k)})
	eventually("a new key", func() bool { return slices.Equal(keys(), []string{k.KeyID}) })
	var others []string
	rows, err := admin.Query(t.Context(), `SELECT id FROM replicas WHERE id <> 'r1'`)
	if err != nil {
		t.Fatal(err)
	}
	for rows.Next() {
		var id string
		if err := rows.Scan(&id); err != nil {
			t.Fatal(err)
		}
		others = append(others, id)
	}
	if !slices.Equal(others, []string{"other"}) {
		t.Errorf("others are %v", others)
	}
	cancel()
	<-done
	if got := keys(); !slices.Equal(got, []string{"none"}) {
		t.Errorf("after the end: %v", got)
	}
}
