package joinsvc

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/better-compute/join-operator/test/pgtest"
)

// statements are all that a join, a confirmation and a refusal may run.
var statements = map[string]string{
	"read": readSQL, "answered": answeredSQL, "requests": requestsSQL, "token": tokenSQL, "destination": destinationSQL, "candidates": candidatesSQL, "used": usedSQL,
	"lockRequest": lockRequestSQL, "lockSlot": lockSlotSQL, "awaitSlot": awaitSlotSQL, "lockNode": lockNodeSQL,
	"spendAndEnter": spendAndEnterSQL, "enter": enterSQL, "rekey": rekeySQL, "consumeRequest": consumeRequestSQL, "spendSlot": spendSlotSQL,
	"releaseKey": releaseKeySQL, "bind": bindSQL, "rebind": rebindSQL, "use": useSQL, "endCerts": endCertsSQL, "issuer": issuerSQL,
	"caps": capsSQL, "endRequest": endRequestSQL, "supersede": supersedeSQL, "insertRequest": insertRequestSQL, "pendingEvent": pendingEventSQL,
	"asked": askedSQL, "confirmRead": confirmReadSQL, "confirm": confirmSQL, "recordRefusal": recordRefusalSQL, "dropRefusals": dropRefusalsSQL,
	"liveRows": liveRowsSQL, "waiting": waitingSQL,
}

const fillSQL = `
INSERT INTO tenants SELECT 'tenant-' || i, 'uid', 'active', false FROM generate_series(1, 3000) i;
INSERT INTO pools SELECT 'tenant-' || i, 'general', '168h', '24h', 'Hold', NULL, false, 'uid', 1 FROM generate_series(1, 3000) i;
INSERT INTO join_tokens (id, tenant, name, object_uid, secret_sha256, role, pool, uses)
  SELECT translate(lpad(i::text, 12, 'a'), '0189', 'wxyz'), 'tenant-' || i % 3000 + 1, 't' || i, 'uid' || i, sha256(i::text::bytea), 'node', 'general', 64 FROM generate_series(1, 5000) i;
INSERT INTO join_token_slots SELECT id, s, 1 FROM join_tokens, generate_series(0, 3) s;
INSERT INTO nodes (id, tenant, role, pool, state, attestor, attestor_type, hardware_key)
  SELECT 'n-' || i, 'tenant-' || i % 3000 + 1, 'node', 'general', 'active', 'join-token', 'join-token', CASE WHEN i % 3 = 0 THEN sha256(i::text::bytea) END FROM generate_series(1, 30000) i;
INSERT INTO node_certs (serial, node_id, generation, tenant, role, attestor_type, subject_sha256, csr_sha256, der, issuer_sha256, issuer_ski, first_seen_at, not_after)
  SELECT substr(sha256(i::text::bytea), 1, 16), 'n-' || i, 1, 'tenant-1', 'node', 'join-token', sha256(i::text::bytea), sha256(i::text::bytea), '', sha256('ca'), '', now(), now() + i * interval '1 second' FROM generate_series(1, 30000) i;
INSERT INTO issuers SELECT sha256(i::text::bytea), 'node-ca-' || i, '', '', now() FROM generate_series(1, 1000) i;
INSERT INTO node_bindings SELECT 'tpm', sha256(i::text::bytea), 'n-' || i FROM generate_series(1, 20000) i;
INSERT INTO attestation_uses SELECT 'cloud-iid', sha256(i::text::bytea), 'n-' || i FROM generate_series(1, 20000) i;
INSERT INTO join_requests (id, attestor_type, attestor, subject_sha256, subject_proved, csr_sha256, role, namespace, facts_sha256, token_id, source, spec, spec_sha256, ended, ended_at, verdict, decided_at, node_id)
  SELECT translate(lpad(i::text, 16, 'a'), '0189', 'wxyz'), 'join-token', 'join-token', sha256(i::text::bytea), i % 2 = 0, sha256(i::text::bytea), 'node', 'tenant-' || i % 3000 + 1, sha256(''), 'aaaaaaaaaaa' || 2 + i % 6, '192.0.2.' || i % 200, '{}', sha256(''),
    CASE WHEN i > 1000 THEN 'Joined' END, CASE WHEN i > 1000 THEN now() END, CASE WHEN i > 900 THEN 'Approved' END, CASE WHEN i > 900 THEN now() END, CASE WHEN i > 1000 THEN 'n-1' END FROM generate_series(1, 30000) i;
INSERT INTO refusal_windows SELECT 'join-token', 'reason-' || i, now() FROM generate_series(1, 2000) i;
ANALYZE;
SET plan_cache_mode = force_generic_plan;
`

// With tables as they grow in production, no statement reads one from end to end.
func TestEveryStatementUsesAnIndex(t *testing.T) {
	db := pgtest.New(t)
	conn, err := pgx.Connect(t.Context(), db.URL(pgtest.Admin))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	if _, err := conn.Exec(t.Context(), `SET search_path = "join";`+fillSQL); err != nil {
		t.Fatal(err)
	}
	parameter := regexp.MustCompile(`\$(\d+)`)
	for name, sql := range statements {
		highest := 0
		for _, m := range parameter.FindAllStringSubmatch(sql, -1) {
			var n int
			fmt.Sscan(m[1], &n)
			highest = max(highest, n)
		}
		args := ""
		if highest > 0 {
			args = "(" + strings.TrimSuffix(strings.Repeat("NULL, ", highest), ", ") + ")"
		}
		if _, err := conn.Exec(t.Context(), fmt.Sprintf("PREPARE %q AS %s", name, sql)); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		rows, err := conn.Query(t.Context(), fmt.Sprintf("EXPLAIN (COSTS OFF) EXECUTE %q%s", name, args), pgx.QueryExecModeSimpleProtocol)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if text := strings.Join(plan, "\n"); strings.Contains(text, "Seq Scan on") {
			t.Errorf("%s reads a table from end to end:\n%s", name, text)
		}
	}
}
