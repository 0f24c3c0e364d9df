package tenancy

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

type tenantRow struct{ uid, state string }

// readTenant returns the zero row where there is none.
func readTenant(ctx context.Context, db *pgxpool.Pool, name string) (tenantRow, error) {
	var r tenantRow
	err := db.QueryRow(ctx, `SELECT uid, state FROM tenants WHERE name = $1`, name).Scan(&r.uid, &r.state)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return tenantRow{}, fmt.Errorf("read tenant %s: %w", name, err)
	}
	return r, nil
}
