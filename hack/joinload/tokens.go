package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/jackc/pgx/v5"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/attestors/jointoken"
)

// minter makes JoinTokens whose secrets it brings itself, and knows from the
// database when they are in force.
type minter struct {
	kube client.Client
	db   *pgx.Conn
}

func openMinter(ctx context.Context, kubeconfig, url string) (*minter, error) {
	cfg, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("kubeconfig (source .dev/env first): %w", err)
	}
	cfg.QPS = -1
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	kube, err := client.New(cfg, client.Options{Scheme: scheme})
	if err != nil {
		return nil, err
	}
	db, err := pgx.Connect(ctx, url)
	if err != nil {
		return nil, fmt.Errorf("connect to the database (source .dev/env first): %w", err)
	}
	if _, err := db.Exec(ctx, `SET search_path = "join"`); err != nil {
		return nil, err
	}
	return &minter{kube: kube, db: db}, nil
}

func (m *minter) close() { m.db.Close(context.Background()) }

// mint makes tokens that admit a number of joins together, and returns when all
// are in force.
func (m *minter) mint(ctx context.Context, namespace, pool string, tokens, joins int) ([]string, error) {
	texts := make([]string, tokens)
	ids := make([]string, tokens)
	var g errgroup.Group
	g.SetLimit(16)
	for i := range texts {
		t := jointoken.Generate()
		texts[i], ids[i] = t.Text(), t.ID
		hash := t.SecretSHA256(namespace)
		g.Go(func() error {
			return m.kube.Create(ctx, &v1alpha1.JoinToken{
				ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "load-" + t.ID},
				Spec: v1alpha1.JoinTokenSpec{
					Pool: pool, Uses: int32((joins + tokens - 1) / tokens), TokenID: t.ID, SecretSHA256: hex.EncodeToString(hash[:]),
				},
			})
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	return texts, m.await(ctx, ids)
}

// await waits until all tokens are in force.
func (m *minter) await(ctx context.Context, ids []string) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		var n int
		err := m.db.QueryRow(ctx, `SELECT count(*) FROM join_tokens WHERE id = ANY($1)`, ids).Scan(&n)
		if err != nil {
			return err
		}
		if n == len(ids) {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("only %d of %d tokens came into force: kubectl get jointokens says why", n, len(ids)), ctx.Err())
		}
	}
}

// drop deletes the tokens of the namespace, so that the next round's controller
// has no more to look after.
func (m *minter) drop(ctx context.Context, namespace string) error {
	return m.kube.DeleteAllOf(ctx, &v1alpha1.JoinToken{}, client.InNamespace(namespace))
}
