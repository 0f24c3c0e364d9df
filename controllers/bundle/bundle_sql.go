package bundle

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"
)

const newestSQL = `SELECT generation, payload FROM bundles ORDER BY generation DESC LIMIT 1`

// newest returns pgx.ErrNoRows where there is no bundle yet.
func newest(ctx context.Context, db *pgxpool.Pool) (generation int, payload []byte, err error) {
	if err := db.QueryRow(ctx, newestSQL).Scan(&generation, &payload); err != nil {
		return 0, nil, fmt.Errorf("read the newest bundle: %w", err)
	}
	return generation, payload, nil
}
