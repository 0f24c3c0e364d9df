-- Run once, by a database administrator, in the database that join-operator
-- uses; it may be run again. Passwords are set apart (ALTER ROLE … PASSWORD), so
-- that this file holds no secret. Nobody logs in as the schema's owner: the
-- manager assumes that role for migrations alone.
DO $$
DECLARE r text;
BEGIN
  FOREACH r IN ARRAY ARRAY['join_schema', 'join_manager', 'join_service', 'join_keys'] LOOP
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = r) THEN
      EXECUTE format('CREATE ROLE %I %s', r, CASE r WHEN 'join_schema' THEN 'NOLOGIN' ELSE 'LOGIN NOINHERIT' END);
    END IF;
    EXECUTE format('ALTER ROLE %I SET search_path = "join"', r);
  END LOOP;
END $$;
GRANT join_schema TO join_manager;
CREATE SCHEMA IF NOT EXISTS "join" AUTHORIZATION join_schema;
GRANT USAGE ON SCHEMA "join" TO join_manager, join_service, join_keys;
