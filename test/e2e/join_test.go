package e2e

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/test/machine"
)

func TestR08_TokenJoinEntersNodeCertificateEventAndAuditTogether(t *testing.T) {
	ns := tenant(t)
	pool(t, ns, "general", false)
	text := token(t, ns, "one", "general", 1)
	target, m := sys.target(t), newMachine(t)

	a, err := target.JoinToken(t.Context(), m, text)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := machine.Leaf(a)
	if err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("spiffe://%s/tenant/%s/node/%s", target.Bundle.TrustDomain, ns, a.NodeID)
	if len(leaf.URIs) != 1 || leaf.URIs[0].String() != want {
		t.Errorf("leaf names %v, want %s", leaf.URIs, want)
	}
	for what, sql := range map[string]string{
		"node in adopting": `SELECT count(*) FROM nodes WHERE id = $1 AND state = 'adopting'`,
		"certificate":      `SELECT count(*) FROM node_certs WHERE node_id = $1 AND revoked_at IS NULL`,
		"event":            `SELECT count(*) FROM events WHERE node_id = $1 AND type = 'node.joined' AND data->>'attestor' = 'join-token' AND data->>'nodeKey' = 'unattested'`,
		"audit row":        `SELECT count(*) FROM audit_log WHERE node_id = $1 AND action = 'node.join'`,
	} {
		if n := count(t, sql, a.NodeID); n != 1 {
			t.Errorf("%s: %d rows, want 1", what, n)
		}
	}
	var node v1alpha1.FleetNode
	key := client.ObjectKey{Namespace: ns, Name: a.NodeID}
	eventually(t, 15*time.Second, "the node is shown", func() error {
		if err := sys.kube.Get(t.Context(), key, &node); err != nil {
			return err
		}
		if node.Status.State != v1alpha1.NodeAdopting {
			return fmt.Errorf("state %q", node.Status.State)
		}
		return nil
	})
	confirmation, err := m.Confirmation(leaf.Raw)
	if err != nil {
		t.Fatal(err)
	}
	body, err := confirmation.MarshalJSON()
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		resp, err := target.Post(t.Context(), wire.PathConfirm, body)
		if err != nil || resp.Status != 204 {
			t.Fatalf("confirm: %v %+v", err, resp)
		}
	}
	eventually(t, 15*time.Second, "the node is active", func() error {
		if err := sys.kube.Get(t.Context(), key, &node); err != nil {
			return err
		}
		if node.Status.State != v1alpha1.NodeActive {
			return fmt.Errorf("state %q", node.Status.State)
		}
		return nil
	})
}

func TestR11_SpentTokenIsRefusedAndOnlyTheOperatorLearnsWhy(t *testing.T) {
	ns := tenant(t)
	pool(t, ns, "general", false)
	text := token(t, ns, "once", "general", 1)
	target := sys.target(t)
	if _, err := target.JoinToken(t.Context(), newMachine(t), text); err != nil {
		t.Fatal(err)
	}
	_, err := target.JoinToken(t.Context(), newMachine(t), text)
	wantRefused(t, err)
	eventually(t, 15*time.Second, "an Event on the JoinToken", func() error {
		var events corev1.EventList
		if err := sys.kube.List(t.Context(), &events, client.InNamespace(ns)); err != nil {
			return err
		}
		for _, e := range events.Items {
			if e.InvolvedObject.Kind == "JoinToken" && e.InvolvedObject.Name == "once" && strings.Contains(e.Message, "join-token:spent") {
				return nil
			}
		}
		return fmt.Errorf("%d events, none says join-token:spent of it", len(events.Items))
	})
}

func wantRefused(t *testing.T, err error) {
	t.Helper()
	p, ok := errors.AsType[*machine.ProblemError](err)
	if !ok || p.Code != wire.AccessDenied || p.Detail != "" {
		t.Fatalf("got %v, want ACCESS_DENIED without a detail", err)
	}
}

func TestInvariant1_OneUseTokenRacedByFortyMachinesAdmitsOne(t *testing.T) {
	ns := tenant(t)
	pool(t, ns, "general", false)
	target := sys.target(t)
	rounds := 50
	if testing.Short() {
		rounds = 5
	}
	for round := range rounds {
		text := token(t, ns, fmt.Sprintf("race-%d", round), "general", 1)
		var joined, refused atomic.Int32
		var wg sync.WaitGroup
		for range 40 {
			m := newMachine(t)
			wg.Go(func() {
				_, err := joinPatiently(t.Context(), target, m, text)
				var p *machine.ProblemError
				switch {
				case err == nil:
					joined.Add(1)
				case errors.As(err, &p) && p.Code == wire.AccessDenied:
					refused.Add(1)
				default:
					t.Errorf("round %d: %v", round, err)
				}
			})
		}
		wg.Wait()
		if joined.Load() != 1 || refused.Load() != 39 {
			t.Fatalf("round %d: %d joined and %d were refused, want 1 and 39", round, joined.Load(), refused.Load())
		}
	}
	if n := count(t, `SELECT count(*) FROM nodes WHERE tenant = $1`, ns); n != rounds {
		t.Errorf("%d nodes, want %d", n, rounds)
	}
}

// joinPatiently does what a machine does about UNAVAILABLE and broken
// connections: the same request again.
func joinPatiently(ctx context.Context, target *machine.Target, m *machine.Machine, text string) (*wire.Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, 60*time.Second)
	defer cancel()
	for {
		a, err := target.JoinToken(ctx, m, text)
		var p *machine.ProblemError
		if err == nil || (errors.As(err, &p) && p.Code != wire.Unavailable && p.Code != wire.RateLimited && p.Code != wire.Internal) {
			return a, err
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("gave up after %w", err)
		case <-time.After(200 * time.Millisecond):
		}
	}
}

func TestInvariant9_LostAnswerCostsNothing(t *testing.T) {
	ns := tenant(t)
	pool(t, ns, "general", false)
	text := token(t, ns, "lost", "general", 1)
	target, m := sys.target(t), newMachine(t)

	// Both copies are in flight at once; the machine heard neither.
	answers := make([]*wire.Answer, 8)
	var wg sync.WaitGroup
	for i := range answers {
		wg.Go(func() {
			a, err := joinPatiently(t.Context(), target, m, text)
			if err != nil {
				t.Errorf("copy %d: %v", i, err)
				return
			}
			answers[i] = a
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	for i, a := range answers[1:] {
		if a.NodeID != answers[0].NodeID || a.Certificates[0] != answers[0].Certificates[0] {
			t.Errorf("copy %d got another certificate", i+1)
		}
	}
	if n := count(t, `SELECT count(*) FROM node_certs WHERE tenant = $1`, ns); n != 1 {
		t.Errorf("%d certificates, want 1", n)
	}
	_, err := target.JoinToken(t.Context(), newMachine(t), text)
	wantRefused(t, err)
}
