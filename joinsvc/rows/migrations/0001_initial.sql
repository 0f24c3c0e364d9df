-- +goose Up

-- The oldest release that may read and write this schema: a binary whose own
-- version is lower refuses to start. Migrations only expand; contraction comes a
-- release later.
CREATE TABLE schema_compat (
  singleton  boolean PRIMARY KEY DEFAULT true CHECK (singleton),
  min_reader integer NOT NULL
);
INSERT INTO schema_compat (min_reader) VALUES (1);

-- The one clock that decides expiries: the transaction's time. Tests replace it.
CREATE FUNCTION join_now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE
  RETURN transaction_timestamp();

-- A tenant is a namespace by name and uid, so that a namespace made again by
-- somebody else does not inherit the machines of the first.
CREATE TABLE tenants (
  name       text PRIMARY KEY CHECK (length(name) BETWEEN 1 AND 63),
  uid        text NOT NULL,
  state      text NOT NULL CHECK (state IN ('active', 'unlabelled', 'blocked', 'gone')),
  root       boolean NOT NULL DEFAULT false,
  changed_at timestamptz NOT NULL DEFAULT join_now()
);

CREATE TABLE pools (
  tenant            text NOT NULL,
  name              text NOT NULL,
  lifetime          interval NOT NULL,
  ramdisk_lifetime  interval NOT NULL,
  on_conflict       text NOT NULL CHECK (on_conflict IN ('Hold', 'RevokeAll')),
  allowed_kinds     text[],
  require_approval  boolean NOT NULL,
  object_uid        text NOT NULL,
  object_generation bigint NOT NULL,
  published_at      timestamptz NOT NULL DEFAULT join_now(),
  PRIMARY KEY (tenant, name)
);

CREATE TABLE join_tokens (
  id            text PRIMARY KEY CHECK (id ~ '^[a-z2-7]{12}$'),
  tenant        text NOT NULL,
  name          text NOT NULL,
  object_uid    text NOT NULL,
  secret_sha256 bytea NOT NULL CHECK (length(secret_sha256) = 32),
  role          text NOT NULL CHECK (role IN ('node', 'site', 'ramdisk')),
  pool          text NOT NULL,
  site          text NOT NULL DEFAULT '',
  uses          integer NOT NULL CHECK (uses >= 1),
  expires_at    timestamptz,
  expect        jsonb,
  allow_reclaim boolean NOT NULL DEFAULT false,
  created_at    timestamptz NOT NULL DEFAULT join_now(),
  revoked_at    timestamptz
);
CREATE UNIQUE INDEX join_tokens_object ON join_tokens (object_uid);
CREATE INDEX join_tokens_tenant ON join_tokens (tenant, name);

-- A token's uses lie in up to 64 rows, so that many machines spend side by side.
-- Half-empty pages let each spend be an update in place (HOT).
CREATE TABLE join_token_slots (
  token_id     text NOT NULL,
  slot         smallint NOT NULL CHECK (slot BETWEEN 0 AND 63),
  uses_left    integer NOT NULL CHECK (uses_left >= 0),
  last_used_at timestamptz,
  PRIMARY KEY (token_id, slot)
) WITH (fillfactor = 20, autovacuum_vacuum_scale_factor = 0.05);

CREATE TABLE nodes (
  id            text PRIMARY KEY,
  tenant        text NOT NULL,
  role          text NOT NULL,
  pool          text NOT NULL,
  site          text NOT NULL DEFAULT '',
  state         text NOT NULL,
  attestor      text NOT NULL,
  attestor_type text NOT NULL,
  hardware_key  bytea,
  node_key_uri  text,
  facts         jsonb NOT NULL DEFAULT '{}',
  conflicted_at timestamptz,
  created_at    timestamptz NOT NULL DEFAULT join_now(),
  changed_at    timestamptz NOT NULL DEFAULT join_now(),
  last_seen_at  timestamptz,
  retired_at    timestamptz
);
CREATE INDEX nodes_tenant_pool ON nodes (tenant, pool, state);
CREATE UNIQUE INDEX nodes_hardware_key ON nodes (hardware_key) WHERE hardware_key IS NOT NULL;

-- A certificate outlives its node here: the CSRs of a deleted node stay refused.
CREATE TABLE node_certs (
  serial           bytea PRIMARY KEY,
  node_id          text NOT NULL,
  generation       integer NOT NULL,
  tenant           text NOT NULL,
  role             text NOT NULL,
  attestor_type    text NOT NULL,
  subject_sha256   bytea NOT NULL,
  token_id         text,
  csr_sha256       bytea NOT NULL,
  der              bytea NOT NULL,
  issuer_sha256    bytea NOT NULL,
  issuer_ski       bytea NOT NULL,
  allowed_kinds    text[],
  node_key_uri     text,
  first_seen_at    timestamptz NOT NULL,
  issued_at        timestamptz NOT NULL DEFAULT join_now(),
  not_after        timestamptz NOT NULL,
  used_at          timestamptz,
  revoked_at       timestamptz,
  revocation       text
);
CREATE UNIQUE INDEX node_certs_csr ON node_certs (csr_sha256);
CREATE UNIQUE INDEX node_certs_generation ON node_certs (node_id, generation);
CREATE INDEX node_certs_revoked ON node_certs (issuer_ski, not_after) WHERE revoked_at IS NOT NULL;
CREATE INDEX node_certs_not_after ON node_certs (not_after);

CREATE TABLE node_bindings (
  attestor_type text NOT NULL,
  subject       bytea NOT NULL CHECK (length(subject) = 32),
  node_id       text NOT NULL,
  bound_at      timestamptz NOT NULL DEFAULT join_now(),
  PRIMARY KEY (attestor_type, subject)
);
CREATE INDEX node_bindings_node ON node_bindings (node_id);

CREATE TABLE attestation_uses (
  attestor   text NOT NULL,
  subject    bytea NOT NULL CHECK (length(subject) = 32),
  node_id    text,
  used_at    timestamptz NOT NULL DEFAULT join_now(),
  expires_at timestamptz,
  PRIMARY KEY (attestor, subject)
);
CREATE INDEX attestation_uses_expiry ON attestation_uses (expires_at) WHERE expires_at IS NOT NULL;

-- A pending join. The service writes what was asked and what became of it; the
-- decision's columns are the manager's alone (see roles.sql).
CREATE TABLE join_requests (
  id                text PRIMARY KEY CHECK (id ~ '^[a-z2-7]{16}$'),
  attestor_type     text NOT NULL,
  attestor          text NOT NULL,
  subject_sha256    bytea NOT NULL CHECK (length(subject_sha256) = 32),
  subject_proved    boolean NOT NULL,
  csr_sha256        bytea NOT NULL CHECK (length(csr_sha256) = 32),
  role              text NOT NULL,
  namespace         text NOT NULL,
  tenant            text,
  pool              text NOT NULL DEFAULT '',
  site              text NOT NULL DEFAULT '',
  facts_sha256      bytea NOT NULL CHECK (length(facts_sha256) = 32),
  token_id          text,
  source            text NOT NULL DEFAULT '',
  spec              jsonb NOT NULL,
  spec_sha256       bytea NOT NULL CHECK (length(spec_sha256) = 32),
  capped            boolean NOT NULL DEFAULT false,
  first_seen_at     timestamptz NOT NULL DEFAULT join_now(),
  last_asked_at     timestamptz NOT NULL DEFAULT join_now(),

  object_uid        text,

  verdict           text CHECK (verdict IN ('Approved', 'Rejected')),
  decided_by        jsonb,
  decision_message  text,
  decided_pool      text,
  decided_tenant    text,
  decided_at        timestamptz,

  ended             text CHECK (ended IN ('Joined', 'Expired', 'Superseded')),
  ended_at          timestamptz,
  node_id           text,

  CHECK ((verdict IS NULL) = (decided_at IS NULL)),
  CHECK ((ended IS NULL) = (ended_at IS NULL)),
  CHECK (ended IS DISTINCT FROM 'Joined' OR (verdict = 'Approved' AND node_id IS NOT NULL))
);
CREATE UNIQUE INDEX join_requests_live ON join_requests (csr_sha256, attestor_type, subject_sha256) WHERE ended IS NULL;
CREATE INDEX join_requests_subject ON join_requests (attestor_type, subject_sha256) WHERE ended IS NULL;
CREATE INDEX join_requests_undecided ON join_requests (namespace, first_seen_at) WHERE verdict IS NULL AND ended IS NULL;
CREATE INDEX join_requests_token ON join_requests (token_id) WHERE verdict IS NULL AND ended IS NULL;
CREATE INDEX join_requests_source ON join_requests (source) WHERE verdict IS NULL AND ended IS NULL;
CREATE INDEX join_requests_sweep ON join_requests (last_asked_at) WHERE ended IS NULL;
CREATE INDEX join_requests_ended ON join_requests (ended_at) WHERE ended IS NOT NULL;

CREATE TABLE bundles (
  generation integer PRIMARY KEY CHECK (generation >= 1),
  payload    bytea NOT NULL,  -- the bundle's JSON, as served and pinned
  jws        text NOT NULL,   -- the same, signed by a key of the generation before
  created_at timestamptz NOT NULL DEFAULT join_now()
);

-- CA certificates that a replica has loaded with their keys.
CREATE TABLE issuers (
  cert_sha256 bytea PRIMARY KEY CHECK (length(cert_sha256) = 32),
  name        text NOT NULL,
  ski         bytea NOT NULL,
  der         bytea NOT NULL,
  not_after   timestamptz NOT NULL,
  loaded_at   timestamptz NOT NULL DEFAULT join_now()
);
CREATE INDEX issuers_ski ON issuers (ski);

CREATE TABLE crls (
  ski         bytea PRIMARY KEY,
  number      bigint NOT NULL,
  der         bytea NOT NULL,
  this_update timestamptz NOT NULL,
  next_update timestamptz NOT NULL
);

-- Which replica has which keys, so that a new key is used only when all have it.
CREATE TABLE replicas (
  id      text PRIMARY KEY,
  keys    text[] NOT NULL,
  seen_at timestamptz NOT NULL DEFAULT join_now()
);

-- The outbox that controllers follow. A sequence alone would skip rows that
-- commit late, so the cursor is (xid, id) below the oldest running transaction.
CREATE TABLE events (
  id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  xid     xid8 NOT NULL DEFAULT pg_current_xact_id(),
  at      timestamptz NOT NULL DEFAULT join_now(),
  type    text NOT NULL,
  tenant  text NOT NULL,
  node_id text,
  data    jsonb NOT NULL DEFAULT '{}'
);
CREATE INDEX events_cursor ON events (xid, id);
CREATE INDEX events_reclaim_refused ON events (node_id, id) WHERE type = 'node.reclaim-refused';

CREATE TABLE cursors (
  name   text PRIMARY KEY,
  system text NOT NULL, -- pg_control_system().system_identifier
  xid    xid8 NOT NULL,
  id     bigint NOT NULL
);

CREATE TABLE audit_log (
  id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  at      timestamptz NOT NULL DEFAULT join_now(),
  actor   text NOT NULL,
  action  text NOT NULL,
  tenant  text NOT NULL,
  node_id text,
  detail  jsonb NOT NULL DEFAULT '{}'
);
CREATE INDEX audit_log_at ON audit_log USING brin (at);
CREATE INDEX audit_log_removals ON audit_log (tenant, at) WHERE action IN ('node.retire', 'node.delete');

-- A tenant whose burst of deletions or retirements is held. An annotation on the
-- namespace answers it once the namespace was seen without one (armed).
CREATE TABLE node_brakes (
  tenant     text PRIMARY KEY,
  armed      boolean NOT NULL,
  tripped_at timestamptz NOT NULL DEFAULT join_now()
);

-- Refusal events are bounded per attestor and reason and minute over all replicas.
CREATE TABLE refusal_windows (
  attestor text NOT NULL,
  reason   text NOT NULL,
  minute   timestamptz NOT NULL,
  recorded integer NOT NULL DEFAULT 0,
  dropped  bigint NOT NULL DEFAULT 0,
  PRIMARY KEY (attestor, reason, minute)
);

GRANT SELECT ON schema_compat TO join_manager, join_service, join_keys;

GRANT SELECT ON tenants, pools, join_tokens, issuers, crls, replicas, bundles, nodes, node_certs, node_bindings, attestation_uses, join_requests, refusal_windows TO join_service;
GRANT UPDATE (uses_left, last_used_at) ON join_token_slots TO join_service;
GRANT SELECT ON join_token_slots TO join_service;
GRANT INSERT ON nodes, node_certs, node_bindings, attestation_uses, events, audit_log TO join_service;
GRANT UPDATE (state, attestor, attestor_type, hardware_key, node_key_uri, facts, conflicted_at, changed_at, last_seen_at) ON nodes TO join_service;
GRANT UPDATE (used_at, revoked_at, revocation) ON node_certs TO join_service;
GRANT UPDATE (node_id, bound_at) ON node_bindings TO join_service;
GRANT INSERT (id, attestor_type, attestor, subject_sha256, subject_proved, csr_sha256, role, namespace, tenant, pool, site, facts_sha256, token_id, source, spec, spec_sha256, capped, first_seen_at) ON join_requests TO join_service;
GRANT UPDATE (last_asked_at, capped, ended, ended_at, node_id) ON join_requests TO join_service;
GRANT INSERT, UPDATE ON issuers, crls, replicas, refusal_windows TO join_service;
GRANT DELETE ON replicas TO join_service;

GRANT SELECT, INSERT, UPDATE, DELETE ON tenants, pools, join_tokens, join_token_slots, nodes, node_certs, node_bindings, attestation_uses, join_requests, cursors, events, refusal_windows, node_brakes TO join_manager;
GRANT SELECT, INSERT ON audit_log TO join_manager;
GRANT SELECT ON bundles, issuers, crls, replicas TO join_manager;
GRANT SELECT, DELETE ON replicas TO join_manager;

GRANT SELECT ON issuers, replicas TO join_keys;
GRANT SELECT, INSERT ON bundles TO join_keys;
GRANT INSERT ON events, audit_log TO join_keys;
