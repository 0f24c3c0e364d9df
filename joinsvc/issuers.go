package joinsvc

import (
	"sync"

	"github.com/jackc/pgx/v5"

	"github.com/better-compute/join-operator/joinsvc/pki"
)

// issuerRows makes sure that an issuer's row is committed with the first
// certificate that it signs: lost answers are found with it.
type issuerRows struct{ known sync.Map } // [32]byte → struct{}

// queue adds the issuer's row to a transaction where it may be missing. It comes
// after all locks that joins could quarrel about.
func (i *issuerRows) queue(b *pgx.Batch, leaf *pki.Issued) {
	if _, ok := i.known.Load(leaf.IssuerSHA256); !ok {
		b.Queue(issuerSQL, leaf.IssuerSHA256[:], leaf.IssuerName, leaf.IssuerSKI, leaf.IssuerDER, leaf.IssuerNotAfter)
	}
}

// committed says that the row is there.
func (i *issuerRows) committed(leaf *pki.Issued) { i.known.LoadOrStore(leaf.IssuerSHA256, struct{}{}) }
