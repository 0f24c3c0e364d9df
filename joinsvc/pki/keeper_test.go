package pki

import (
	"bytes"
	"context"
	"crypto/elliptic"
	"crypto/sha256"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/better-compute/join-operator/joinsvc/secrets"
	"github.com/better-compute/join-operator/test/pgtest"
)

// kept is a database and a keeper of one replica.
type kept struct {
	*Keeper
	tb testing.TB
	db *pgtest.DB
}

func newKept(tb testing.TB, db *pgtest.DB, a *Authority) *kept {
	tb.Helper()
	k, err := NewKeeper(a, db.Pool(tb, pgtest.Service), slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	if err != nil {
		tb.Fatal(err)
	}
	return &kept{k, tb, db}
}

func (k *kept) keep() {
	k.tb.Helper()
	if err := k.look(k.tb.Context()); err != nil {
		k.tb.Fatal(err)
	}
}

func (k *kept) exec(sql string, args ...any) {
	k.tb.Helper()
	if _, err := k.db.Pool(k.tb, pgtest.Admin).Exec(k.tb.Context(), sql, args...); err != nil {
		k.tb.Fatal(err)
	}
}

// issue stores a certificate's row.
func (k *kept) issue(a *Authority, at time.Time, lifetime time.Duration) *Issued {
	k.tb.Helper()
	l := leafFor(ecKey(k.tb, elliptic.P256()).Public())
	l.Now, l.Lifetime = at, lifetime
	issued, err := a.Issue(l)
	if err != nil {
		k.tb.Fatal(err)
	}
	hash := sha256.Sum256(issued.DER)
	k.exec(`INSERT INTO node_certs (serial, node_id, generation, tenant, role, attestor_type, subject_sha256, csr_sha256, der, issuer_sha256, issuer_ski, first_seen_at, not_after)
	  VALUES ($1, 'n-' || encode($2, 'hex'), 1, 't', 'node', 'join-token', $2, $2, $3, $4, $5, now(), $6)`,
		issued.Serial, hash[:], issued.DER, issued.IssuerSHA256[:], issued.IssuerSKI, issued.NotAfter)
	return issued
}

func (k *kept) revoke(i *Issued, why string) {
	k.tb.Helper()
	k.exec(`UPDATE node_certs SET revoked_at = join_now(), revocation = $2 WHERE serial = $1`, i.Serial, why)
}

// list reads a CA's list and verifies it.
func (k *kept) list(c ca) *x509.RevocationList {
	k.tb.Helper()
	der, err := k.CRL(k.tb.Context(), c.cert.SubjectKeyId)
	if err != nil {
		k.tb.Fatal(err)
	}
	list, err := x509.ParseRevocationList(der)
	if err != nil {
		k.tb.Fatal(err)
	}
	if err := list.CheckSignatureFrom(c.cert); err != nil {
		k.tb.Fatal(err)
	}
	return list
}

func (k *kept) lists(c ca, want ...*Issued) *x509.RevocationList {
	k.tb.Helper()
	list := k.list(c)
	if len(list.RevokedCertificateEntries) != len(want) {
		k.tb.Fatalf("%d entries, want %d", len(list.RevokedCertificateEntries), len(want))
	}
	for _, w := range want {
		found := false
		for _, e := range list.RevokedCertificateEntries {
			found = found || e.SerialNumber.Cmp(new(big.Int).SetBytes(w.Serial)) == 0
		}
		if !found {
			k.tb.Errorf("serial %x is not listed", w.Serial)
		}
	}
	return list
}

func TestLoadedCAsAreRegistered(t *testing.T) {
	db := pgtest.New(t)
	first, second := aYear(t, "node-ca-1"), aYear(t, "node-ca-2")
	a := authority(t, secrets.Snapshot{"node-ca-1": first.secret(t)})
	k := newKept(t, db, a)
	k.keep()
	a.Load(secrets.Snapshot{"node-ca-1": first.secret(t), "node-ca-2": second.secret(t)})
	k.keep()
	newKept(t, db, a).keep() // another replica
	for _, c := range []ca{first, second} {
		sum := sha256.Sum256(c.cert.Raw)
		var der, ski []byte
		var name string
		var notAfter time.Time
		if err := db.Pool(t, pgtest.Admin).QueryRow(t.Context(), `SELECT der, ski, name, not_after FROM issuers WHERE cert_sha256 = $1`, sum[:]).Scan(&der, &ski, &name, &notAfter); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(der, c.cert.Raw) || !bytes.Equal(ski, c.cert.SubjectKeyId) || name != c.cert.Subject.CommonName || !notAfter.Equal(c.cert.NotAfter) {
			t.Errorf("registered as %s until %v", name, notAfter)
		}
	}
}

func TestRevokedCertificatesAreListedWithinALook(t *testing.T) {
	db := pgtest.New(t)
	signer := aYear(t, "node-ca-1")
	a := authority(t, secrets.Snapshot{"node-ca-1": signer.secret(t)})
	k := newKept(t, db, a)
	if _, err := k.CRL(t.Context(), signer.cert.SubjectKeyId); !errors.Is(err, ErrNoCRL) {
		t.Errorf("before the first list: %v", err)
	}
	k.keep()
	if list := k.lists(signer); list.Number.Int64() != 1 || !list.NextUpdate.After(time.Now().Add(23*time.Hour)) {
		t.Errorf("number %v, until %v", list.Number, list.NextUpdate)
	}
	one, two, three := k.issue(a, time.Now(), time.Hour), k.issue(a, time.Now(), time.Hour), k.issue(a, time.Now(), time.Hour)
	k.issue(a, time.Now(), time.Hour) // never revoked
	k.revoke(one, "retired")
	k.keep()
	k.lists(signer, one)
	k.revoke(two, "rekeyed")
	k.revoke(three, "something new")
	k.keep()
	list := k.lists(signer, one, two, three)
	reasons := map[string]int{}
	for _, e := range list.RevokedCertificateEntries {
		reasons[e.SerialNumber.String()] = e.ReasonCode
	}
	for serial, want := range map[*Issued]int{one: 5, two: 4, three: 0} {
		if got := reasons[new(big.Int).SetBytes(serial.Serial).String()]; got != want {
			t.Errorf("reason %d, want %d", got, want)
		}
	}
	if list.Number.Int64() != 3 {
		t.Errorf("number %v, want 3", list.Number)
	}
	k.keep()
	if again := k.list(signer); again.Number.Int64() != 3 {
		t.Errorf("signed again as number %v though nothing changed", again.Number)
	}
	openSSLRefuses(t, signer, list, one)
}

// openSSLRefuses asks another implementation about a revoked certificate.
func openSSLRefuses(t *testing.T, c ca, list *x509.RevocationList, revoked *Issued) {
	t.Helper()
	openssl, err := exec.LookPath("openssl")
	if err != nil {
		t.Log("no openssl here: not asked")
		return
	}
	dir := t.TempDir()
	for name, block := range map[string]*pem.Block{
		"leaf": {Type: "CERTIFICATE", Bytes: revoked.DER}, "ca": {Type: "CERTIFICATE", Bytes: c.cert.Raw}, "crl": {Type: "X509 CRL", Bytes: list.Raw},
	} {
		if err := os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	out, err := exec.CommandContext(t.Context(), openssl, "verify", "-crl_check", "-CRLfile", filepath.Join(dir, "crl"),
		"-CAfile", filepath.Join(dir, "ca"), filepath.Join(dir, "leaf")).CombinedOutput()
	if err == nil || !bytes.Contains(out, []byte("revoked")) {
		t.Errorf("openssl verify -crl_check: %v\n%s", err, out)
	}
}

// TestListsAreSignedAnewInTime moves the database's clock.
func TestListsAreSignedAnewInTime(t *testing.T) {
	db := pgtest.New(t)
	signer := aYear(t, "node-ca-1")
	a := authority(t, secrets.Snapshot{"node-ca-1": signer.secret(t)})
	k := newKept(t, db, a)
	db.SetNow(t, now)
	cert := k.issue(a, now, time.Hour)
	k.revoke(cert, "deleted")
	k.keep()
	db.Advance(t, crlRenew-backdate-time.Second)
	k.keep()
	if n := k.lists(signer, cert).Number.Int64(); n != 1 {
		t.Errorf("signed anew too soon: number %d", n)
	}
	db.Advance(t, 2*time.Second)
	k.keep()
	list := k.lists(signer, cert)
	if n := list.Number.Int64(); n != 2 {
		t.Errorf("number %d, want 2", n)
	}
	if left := list.NextUpdate.Sub(db.Now(t)); left < crlLifetime-time.Minute {
		t.Errorf("good for %v", left)
	}
	// A certificate that ran out leaves the list, but is in one signed after its end.
	db.Advance(t, time.Hour+crlKeepExpired)
	k.keep()
	k.lists(signer)
}

// TestEachCAKeyHasItsOwnList has a renewed CA, which shares its list, and a second one.
func TestEachCAKeyHasItsOwnList(t *testing.T) {
	db := pgtest.New(t)
	first := aYear(t, "node-ca-1")
	a := authority(t, secrets.Snapshot{"node-ca-1": first.secret(t)})
	k := newKept(t, db, a)
	one := k.issue(a, now, time.Hour)
	renewed := newCA(t, "node-ca-1", first.key, now.Add(-time.Hour), now.AddDate(2, 0, 0), nil)
	second := aYear(t, "node-ca-2")
	a.Load(secrets.Snapshot{"node-ca-1": renewed.secret(t), "node-ca-2": second.secret(t)})
	two := k.issue(a, now, time.Hour)
	k.revoke(one, "retired")
	k.revoke(two, "retired")
	k.keep()
	k.lists(first, one)
	k.lists(renewed, one)
	k.lists(second, two)
}

// TestReplicasShareTheSigning runs several at once: numbers only rise, one at a
// time, and nothing that was revoked is lost.
func TestReplicasShareTheSigning(t *testing.T) {
	db := pgtest.New(t)
	signer := aYear(t, "node-ca-1")
	a := authority(t, secrets.Snapshot{"node-ca-1": signer.secret(t)})
	var replicas []*kept
	for range 3 {
		replicas = append(replicas, newKept(t, db, a))
	}
	var revoked []*Issued
	for round := range 4 {
		cert := replicas[0].issue(a, time.Now(), time.Hour)
		replicas[0].revoke(cert, "retired")
		revoked = append(revoked, cert)
		var wg sync.WaitGroup
		errs := make(chan error, len(replicas))
		for _, r := range replicas {
			wg.Go(func() { errs <- r.look(t.Context()) })
		}
		wg.Wait()
		for range replicas {
			if err := <-errs; err != nil {
				t.Fatal(err)
			}
		}
		for range 2 { // nothing to do, whoever looks
			for _, r := range replicas {
				r.keep()
			}
		}
		if n := replicas[0].lists(signer, revoked...).Number.Int64(); n != int64(round+1) {
			t.Fatalf("number %d in round %d", n, round+1)
		}
	}
}

func TestACAThatMayNotSignListsStillIssues(t *testing.T) {
	db := pgtest.New(t)
	c := newCA(t, "node-ca-1", nil, now.Add(-time.Hour), now.AddDate(1, 0, 0), func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageCertSign })
	a := authority(t, secrets.Snapshot{"node-ca-1": c.secret(t)})
	k := newKept(t, db, a)
	k.keep()
	k.issue(a, now, time.Hour)
	if _, err := k.CRL(t.Context(), c.cert.SubjectKeyId); !errors.Is(err, ErrNoCRL) {
		t.Errorf("its list: %v", err)
	}
}

// TestACAThatRunsOutShows counts in lifetimes of the longest pool.
func TestACAThatRunsOutShows(t *testing.T) {
	db := pgtest.New(t)
	end := now.Add(3*24*time.Hour + time.Minute)
	a := authority(t, secrets.Snapshot{"node-ca-1": newCA(t, "node-ca-1", nil, now.Add(-time.Hour), end, nil).secret(t)})
	k := newKept(t, db, a)
	shows := func(want float64) {
		t.Helper()
		k.keep()
		if got := testutil.ToFloat64(k.runsOut); got != want {
			t.Errorf("join_node_ca_runs_out is %v, want %v", got, want)
		}
	}
	db.SetNow(t, now)
	shows(1) // no pools: 168 h
	for i, lifetime := range []string{"1 hour", "24 hours"} {
		k.exec(`INSERT INTO pools (tenant, name, lifetime, ramdisk_lifetime, on_conflict, require_approval, object_uid, object_generation)
		  VALUES ('t', $1, $2::interval, '1 hour', 'Hold', false, 'u', 1)`, fmt.Sprint(i), lifetime)
	}
	shows(0)
	db.Advance(t, 2*time.Minute)
	shows(1)
	if got := testutil.ToFloat64(k.notAfter.WithLabelValues("node-ca-1")); got != float64(end.Unix()) {
		t.Errorf("its end shows as %v", got)
	}
	a.Load(secrets.Snapshot{})
	shows(1)
}

// TestTheKeeperSeesChangesAtOnce does not wait for its next look.
func TestTheKeeperSeesChangesAtOnce(t *testing.T) {
	db := pgtest.New(t)
	a := authority(t, nil)
	k := newKept(t, db, a)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); k.Run(ctx) }()
	defer func() { cancel(); <-done }()
	c := aYear(t, "node-ca-1")
	begun := time.Now()
	a.Load(secrets.Snapshot{"node-ca-1": c.secret(t)})
	for {
		if _, err := k.CRL(t.Context(), c.cert.SubjectKeyId); err == nil {
			break
		}
		if time.Since(begun) > keepEvery-time.Second {
			t.Fatal("no list yet")
		}
		time.Sleep(10 * time.Millisecond)
	}
}
