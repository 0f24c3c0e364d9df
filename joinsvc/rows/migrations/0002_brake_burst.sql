-- +goose Up

-- What answers a held burst names it, so that an old answer never answers a new
-- burst, however quickly annotations come and go. "armed" is no longer read and
-- goes in a later release.
ALTER TABLE node_brakes ADD COLUMN burst text NOT NULL DEFAULT substr(md5(random()::text), 1, 6);
ALTER TABLE node_brakes ALTER COLUMN armed SET DEFAULT false;
