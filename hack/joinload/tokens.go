package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/better-compute/join-operator/attestors/jointoken"
)

// minter makes tokens as rows, as the JoinToken controller would leave them:
// ten thousand objects would measure the API server.
type minter struct {
	db *pgx.Conn
}

func openMinter(ctx context.Context, url string) (*minter, error) {
	db, err := pgx.Connect(ctx, url)
	if err != nil {
		return nil, fmt.Errorf("connect to the database (source .dev/env first): %w", err)
	}
	if _, err := db.Exec(ctx, `SET search_path = "join"`); err != nil {
		return nil, err
	}
	return &minter{db: db}, nil
}

func (m *minter) close() { m.db.Close(context.Background()) }

// mint makes tokens that admit a number of joins together.
func (m *minter) mint(ctx context.Context, namespace, pool string, tokens, joins int) ([]string, error) {
	var ok bool
	err := m.db.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pools p JOIN tenants t ON t.name = p.tenant
		WHERE p.tenant = $1 AND p.name = $2 AND t.state = 'active' AND NOT p.require_approval)`, namespace, pool).Scan(&ok)
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, fmt.Errorf("namespace %s is no tenant with a FleetPool %s that admits without approval", namespace, pool)
	}
	uses := (joins + tokens - 1) / tokens
	slots := min(uses, 64)
	texts := make([]string, tokens)
	var tokenRows, slotRows [][]any
	for i := range texts {
		t := jointoken.Generate()
		texts[i] = t.Text()
		hash := t.SecretSHA256(namespace)
		tokenRows = append(tokenRows, []any{t.ID, namespace, "load-" + t.ID, "load-" + t.ID, hash[:], "node", pool, uses})
		for s := range slots {
			left := uses / slots
			if s < uses%slots {
				left++
			}
			slotRows = append(slotRows, []any{t.ID, int16(s), left})
		}
	}
	return texts, pgx.BeginFunc(ctx, m.db, func(tx pgx.Tx) error {
		_, err := tx.CopyFrom(ctx, pgx.Identifier{"join_tokens"},
			[]string{"id", "tenant", "name", "object_uid", "secret_sha256", "role", "pool", "uses"}, pgx.CopyFromRows(tokenRows))
		if err != nil {
			return err
		}
		_, err = tx.CopyFrom(ctx, pgx.Identifier{"join_token_slots"}, []string{"token_id", "slot", "uses_left"}, pgx.CopyFromRows(slotRows))
		return err
	})
}
