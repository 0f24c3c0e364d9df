package outbox

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"k8s.io/apimachinery/pkg/types"
)

// TokenRef is the JoinToken that a token id belongs to.
type TokenRef struct {
	types.NamespacedName
	UID types.UID
}

const tokensSQL = `SELECT id, tenant, name, object_uid FROM join_tokens WHERE id = ANY($1)`

// TokenID is the token that an event names, or empty.
func (e Event) TokenID() string {
	var d struct {
		TokenID string `json:"tokenID"`
	}
	if json.Unmarshal(e.Data, &d) != nil {
		return ""
	}
	return d.TokenID
}

// Tokens returns the JoinTokens that events name, by token id. An event of one
// tenant never leads to a token of another: what a machine merely says it has is
// in the root tenant's stream.
func Tokens(ctx context.Context, db *pgxpool.Pool, events []Event) (map[string]TokenRef, error) {
	tenants := map[string]map[string]bool{}
	var ids []string
	for _, e := range events {
		id := e.TokenID()
		if id == "" {
			continue
		}
		if tenants[id] == nil {
			tenants[id] = map[string]bool{}
			ids = append(ids, id)
		}
		tenants[id][e.Tenant] = true
	}
	if len(ids) == 0 {
		return nil, nil
	}
	rows, err := db.Query(ctx, tokensSQL, ids)
	if err != nil {
		return nil, fmt.Errorf("find the tokens of events: %w", err)
	}
	found := make(map[string]TokenRef, len(ids))
	var id string
	var ref TokenRef
	_, err = pgx.ForEachRow(rows, []any{&id, &ref.Namespace, &ref.Name, (*string)(&ref.UID)}, func() error {
		if tenants[id][ref.Namespace] {
			found[id] = ref
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("find the tokens of events: %w", err)
	}
	return found, nil
}
