package joinsvc

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/attestors"
)

const (
	confirmReadSQL = `SELECT c.der, c.node_id, c.tenant, c.csr_sha256, c.revoked_at IS NOT NULL, c.not_after <= join_now(), c.used_at IS NOT NULL,
	  coalesce(n.state, ''), EXISTS (SELECT FROM node_certs newer WHERE newer.node_id = c.node_id AND newer.generation > c.generation)
	FROM node_certs c LEFT JOIN nodes n ON n.id = c.node_id WHERE c.serial = $1`

	// The node is locked first, as everywhere.
	confirmSQL = `WITH node AS (
	  SELECT id, tenant, state FROM nodes WHERE id = $1 AND state <> 'retired' FOR UPDATE
	), used AS (
	  UPDATE node_certs c SET used_at = coalesce(c.used_at, join_now()) FROM node
	  WHERE c.serial = $2 AND c.node_id = node.id AND c.revoked_at IS NULL RETURNING c.generation
	), active AS (
	  UPDATE nodes n SET state = 'active', changed_at = join_now(), last_seen_at = join_now() FROM node, used
	  WHERE n.id = node.id AND node.state = 'adopting'
	    AND used.generation = (SELECT max(generation) FROM node_certs WHERE node_id = $1) RETURNING n.id, n.tenant
	), event AS (
	  INSERT INTO events (type, tenant, node_id) SELECT 'node.active', tenant, id FROM active
	)
	SELECT (SELECT count(*) FROM used), (SELECT count(*) FROM active)`
)

// Confirm takes a machine's word that it stored its certificate: the node becomes
// active and the certificate counts as used. It may come again. The certificate
// is the one in the service's own row, never one that merely chains. Its errors
// are those of [Service.Join].
func (s *Service) Confirm(ctx context.Context, c *wire.Confirm) error {
	err := s.confirm(ctx, c)
	s.metrics.confirmed(err)
	return err
}

// confirmAttestor stands for the attestor in refusals of confirmations.
const confirmAttestor = "confirm"

func (s *Service) confirm(ctx context.Context, c *wire.Confirm) error {
	if err := s.health.err(); err != nil {
		return unavailable(err)
	}
	ctx, cancel := s.health.context(context.WithoutCancel(ctx), attemptTimeout)
	defer cancel()
	claimed, err := x509.ParseCertificate(c.Certificate)
	if err != nil {
		return &Problem{Code: wire.InvalidInput, Detail: "certificate: is not a DER certificate"}
	}
	refuse := func(reason string) *RefusedJoin {
		return &RefusedJoin{Refusal: attestors.Refuse(reason), Attestor: confirmAttestor, CSRSHA256: sha256.Sum256(nil)}
	}
	var der, csr []byte
	var nodeID, tenant, state string
	var revoked, expired, used, outdated bool
	err = s.db.QueryRow(ctx, confirmReadSQL, claimed.SerialNumber.Bytes()).Scan(&der, &nodeID, &tenant, &csr, &revoked, &expired, &used, &state, &outdated)
	if errors.Is(err, pgx.ErrNoRows) {
		return refuse("unknown")
	}
	if err != nil {
		return s.confirmFailed(err)
	}
	if !bytes.Equal(der, c.Certificate) {
		return refuse("unknown")
	}
	if wire.VerifyStatement(claimed.PublicKey, wire.ConfirmStatement(der), c.Signature) != nil {
		return refuse("signature")
	}
	authenticated := func(reason, format string, args ...any) error {
		r := refuse(reason)
		r.Refusal = r.Refusal.InTenant(tenant).Because(format, args...)
		copy(r.CSRSHA256[:], csr)
		return r
	}
	switch {
	case state == "":
		return authenticated("node-deleted", "node %s was deleted", nodeID)
	case state == retired:
		return authenticated("node-retired", "node %s is retired", nodeID)
	case revoked:
		return authenticated("revoked", "the certificate of node %s was revoked", nodeID)
	case expired:
		return authenticated("expired", "the certificate of node %s ran out", nodeID)
	case used && (state != "adopting" || outdated):
		return nil // said before
	}
	var confirmed, activated int
	if err := s.db.QueryRow(ctx, confirmSQL, nodeID, claimed.SerialNumber.Bytes()).Scan(&confirmed, &activated); err != nil {
		return s.confirmFailed(err)
	}
	if confirmed == 0 {
		return authenticated("revoked", "node %s or its certificate ended in this moment", nodeID)
	}
	if activated > 0 {
		s.notifier.notify()
	}
	return nil
}

func (s *Service) confirmFailed(err error) error {
	var pg *pgconn.PgError
	if errors.As(err, &pg) && !outage(err) && !retryable(err) {
		return fmt.Errorf("confirm: %w", err)
	}
	return unavailable(err) // everything else is the connection's
}
