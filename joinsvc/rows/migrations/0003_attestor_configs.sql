-- +goose Up

-- Published AttestorConfigs, by which every replica decides. A version is never
-- given twice, also where a name goes and comes again: what was handed out under
-- one configuration is not finished under another.
CREATE SEQUENCE attestor_config_versions;
CREATE TABLE attestor_configs (
  name              text PRIMARY KEY CHECK (name ~ '^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$'),
  version           bigint NOT NULL UNIQUE DEFAULT nextval('attestor_config_versions'),
  spec              jsonb NOT NULL, -- the object's, with every reference resolved
  object_uid        text NOT NULL,
  object_generation bigint NOT NULL,
  published_at      timestamptz NOT NULL DEFAULT join_now()
);

-- By what each replica decides: {"name": {"version": 7}}, with "error" where it could
-- not build the newest.
ALTER TABLE replicas ADD COLUMN attestors jsonb NOT NULL DEFAULT '{}';

GRANT USAGE ON SEQUENCE attestor_config_versions TO join_manager;
GRANT SELECT, INSERT, UPDATE, DELETE ON attestor_configs TO join_manager;
GRANT SELECT ON attestor_configs TO join_service;
