package httpapi

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"log/slog"
	"math/big"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/joinsvc/pki"
	"github.com/better-compute/join-operator/joinsvc/secrets"
	"github.com/better-compute/join-operator/test/pgtest"
)

func get(h *Handler, path string, headers ...string) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	r := httptest.NewRequest(http.MethodGet, path, nil)
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	h.ServeHTTP(w, r)
	return w
}

// publish adds generations up to n, whose payload and link tell their number.
func publish(tb testing.TB, db *pgtest.DB, from, to int) {
	tb.Helper()
	_, err := db.Pool(tb, pgtest.Keys).Exec(tb.Context(), `INSERT INTO bundles (generation, payload, jws)
	  SELECT g, convert_to(format('{"generation":%s}', g), 'UTF8'), 'link-' || g FROM generate_series($1::integer, $2::integer) g`, from, to)
	must(tb, err)
}

// TestBundlesAndRotationsAreServedAsTheyArePublished follows some generations, more
// than a page and more than a reading.
func TestBundlesAndRotationsAreServedAsTheyArePublished(t *testing.T) {
	db := pgtest.New(t)
	h := scripted(t, script{}, nil)
	h.cfg.Bundles.db = db.Pool(t, pgtest.Service)
	must(t, h.cfg.Bundles.refresh(t.Context()))
	if w := get(h, wire.PathBundle); w.Code != http.StatusServiceUnavailable || w.Header().Get("Retry-After") == "" {
		t.Errorf("without a bundle: %d %s", w.Code, w.Body)
	}
	if got := links(t, h, 0); len(got) > 0 || h.cfg.Bundles.SHA256() != "" {
		t.Errorf("links %v, hash %q", got, h.cfg.Bundles.SHA256())
	}
	const last = bundlesAtOnce*2 + 7
	publish(t, db, 1, 3)
	must(t, h.cfg.Bundles.refresh(t.Context()))
	publish(t, db, 4, last)
	must(t, h.cfg.Bundles.refresh(t.Context()))
	w := get(h, wire.PathBundle)
	want := fmt.Sprintf(`{"generation":%d}`, last)
	sum := sha256.Sum256([]byte(want))
	if w.Code != http.StatusOK || w.Body.String() != want || w.Header().Get("Content-Type") != wire.MediaTypeJSON || h.cfg.Bundles.SHA256() != hex.EncodeToString(sum[:]) {
		t.Errorf("%d %s, hash %s", w.Code, w.Body, h.cfg.Bundles.SHA256())
	}
	if again := get(h, wire.PathBundle, "If-None-Match", w.Header().Get("ETag")); again.Code != http.StatusNotModified || again.Body.Len() > 0 {
		t.Errorf("asked again: %d", again.Code)
	}
	walked := 0
	for {
		page := links(t, h, walked)
		if len(page) == 0 {
			break
		}
		if len(page) > wire.MaxRotations {
			t.Fatalf("%d links at once", len(page))
		}
		for _, link := range page {
			walked++
			if link != fmt.Sprintf("link-%d", walked) {
				t.Fatalf("link %d is %s", walked, link)
			}
		}
	}
	if walked != last {
		t.Errorf("walked to %d", walked)
	}
	if got := links(t, h, last+100); len(got) > 0 {
		t.Errorf("from the future: %v", got)
	}
}

func links(t *testing.T, h *Handler, after int) []string {
	t.Helper()
	w := get(h, fmt.Sprintf("%s?after=%d", wire.PathRotations, after))
	var page wire.Rotations
	must(t, json.Unmarshal(w.Body.Bytes(), &page))
	if w.Code != http.StatusOK || page.Protocol != wire.Protocol || page.Rotations == nil {
		t.Fatalf("%d %s", w.Code, w.Body)
	}
	return page.Rotations
}

// TestAGapInTheGenerationsIsNotServed keeps machines from links that lead nowhere.
func TestAGapInTheGenerationsIsNotServed(t *testing.T) {
	db := pgtest.New(t)
	b := NewBundles(db.Pool(t, pgtest.Service), slog.New(slog.DiscardHandler))
	publish(t, db, 1, 1)
	must(t, b.refresh(t.Context()))
	publish(t, db, 3, 3)
	if err := b.refresh(t.Context()); err == nil {
		t.Error("no error")
	}
	if got := b.after(0); len(got) != 1 {
		t.Errorf("serves %v", got)
	}
	publish(t, db, 2, 2)
	must(t, b.refresh(t.Context()))
	if got := b.after(1); len(got) != 2 || got[0] != "link-2" || got[1] != "link-3" {
		t.Errorf("serves %v", got)
	}
}

func newCA(tb testing.TB) map[string][]byte {
	tb.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(tb, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "node-ca"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(1, 0, 0),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	must(tb, err)
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	must(tb, err)
	return map[string][]byte{
		"tls.crt": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), "tls.key": pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8}),
	}
}

// TestListsAreServedByKeyAndOfTheNewestCA also takes the database away.
func TestListsAreServedByKeyAndOfTheNewestCA(t *testing.T) {
	db := pgtest.New(t)
	log := slog.New(slog.DiscardHandler)
	a := pki.NewAuthority(log)
	pool := db.Pool(t, pgtest.Service)
	keeper, err := pki.NewKeeper(a, pool, log, prometheus.NewRegistry())
	must(t, err)
	h := scripted(t, script{}, nil)
	h.cfg.Lists = NewRevocations(a, keeper)
	if w := get(h, wire.PathCRL); w.Code != http.StatusServiceUnavailable {
		t.Errorf("without a CA: %d %s", w.Code, w.Body)
	}
	if w := get(h, wire.PathCRL+"/"+strings.Repeat("ab", 20)); w.Code != http.StatusNotFound {
		t.Errorf("of no CA: %d %s", w.Code, w.Body)
	}
	one, two := newCA(t), newCA(t)
	a.Load(secrets.Snapshot{"node-ca-1": one})
	first := a.SigningSKI(time.Now())
	if w := get(h, wire.PathCRL); w.Code != http.StatusServiceUnavailable {
		t.Errorf("before its first list: %d %s", w.Code, w.Body)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go keeper.Run(ctx)
	listed := awaitLists(t, pool, 1)
	if w := get(h, wire.PathCRL); w.Code != http.StatusOK || w.Body.String() != string(listed[string(first)]) || w.Header().Get("Content-Type") != "application/pkix-crl" {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	a.Load(secrets.Snapshot{"node-ca-1": one, "node-ca-2": two})
	second := a.SigningSKI(time.Now())
	listed = awaitLists(t, pool, 2)
	for path, want := range map[string][]byte{
		wire.PathCRL: listed[string(second)], wire.PathCRL + "/" + hex.EncodeToString(first): listed[string(first)], wire.PathCRL + "/" + hex.EncodeToString(second): listed[string(second)],
	} {
		if w := get(h, path); w.Code != http.StatusOK || w.Body.String() != string(want) {
			t.Errorf("%s: %d, %d bytes", path, w.Code, w.Body.Len())
		}
	}
	// The database goes: what was read is served on.
	cancel()
	pool.Close()
	lists := h.cfg.Lists.(*Revocations).lists
	for ski, l := range lists {
		lists[ski] = cachedList{l.der, l.read.Add(-time.Hour)}
	}
	if w := get(h, wire.PathCRL); w.Code != http.StatusOK {
		t.Errorf("without the database: %d %s", w.Code, w.Body)
	}
	if w := get(h, wire.PathCRL+"/"+strings.Repeat("ab", 20)); w.Code != http.StatusServiceUnavailable {
		t.Errorf("of no CA, without the database: %d %s", w.Code, w.Body)
	}
}

// awaitLists waits until n lists are stored.
func awaitLists(t *testing.T, db *pgxpool.Pool, n int) map[string][]byte {
	t.Helper()
	for begun := time.Now(); time.Since(begun) < 20*time.Second; time.Sleep(5 * time.Millisecond) {
		rows, err := db.Query(t.Context(), `SELECT ski, der FROM crls`)
		must(t, err)
		lists := map[string][]byte{}
		for rows.Next() {
			var ski, der []byte
			must(t, rows.Scan(&ski, &der))
			lists[string(ski)] = der
		}
		must(t, rows.Err())
		if len(lists) == n {
			return lists
		}
	}
	t.Fatalf("there are not %d lists", n)
	return nil
}
