package prune

import "time"

// query deletes a batch of one table; its parameters are how long to keep and
// how many rows at most. What is locked is in use: it is skipped.
type query struct {
	table string
	keep  time.Duration
	sql   string
}

const (
	usesSQL = `DELETE FROM attestation_uses WHERE (attestor, subject) IN (
	  SELECT attestor, subject FROM attestation_uses WHERE expires_at < join_now() - $1::interval
	  ORDER BY expires_at LIMIT $2 FOR UPDATE SKIP LOCKED)`

	// The oldest events stand first in the cursors' order. What a follower has not
	// read stays, and so does everything while there is no follower.
	eventsSQL = `DELETE FROM events WHERE id IN (
	  SELECT e.id FROM (SELECT id, at FROM events
	    WHERE (xid, id) <= (SELECT xid, id FROM cursors ORDER BY xid, id LIMIT 1)
	    ORDER BY xid, id LIMIT $2 FOR UPDATE SKIP LOCKED) e
	  WHERE e.at < join_now() - $1::interval)`

	refusalsSQL = `DELETE FROM refusal_windows WHERE (attestor, reason, minute) IN (
	  SELECT attestor, reason, minute FROM refusal_windows WHERE minute < join_now() - $1::interval
	  LIMIT $2 FOR UPDATE SKIP LOCKED)`

	requestsSQL = `DELETE FROM join_requests WHERE id IN (
	  SELECT id FROM join_requests WHERE ended IS NOT NULL AND ended_at < join_now() - $1::interval
	  ORDER BY ended_at LIMIT $2 FOR UPDATE SKIP LOCKED)`

	replicasSQL = `DELETE FROM replicas WHERE id IN (
	  SELECT id FROM replicas WHERE seen_at < join_now() - $1::interval LIMIT $2)`

	// Only what was replaced goes: a node's newest certificate stays, a deleted
	// node's too, so that its CSR stays refused. The lower bound keeps those that
	// stay from being read again in every round.
	certsSQL = `DELETE FROM node_certs WHERE serial IN (
	  SELECT c.serial FROM node_certs c
	  WHERE c.not_after < join_now() - $1::interval AND c.not_after > join_now() - $1::interval - interval '30 days'
	    AND EXISTS (SELECT FROM node_certs newer WHERE newer.node_id = c.node_id AND newer.generation > c.generation)
	  ORDER BY c.not_after LIMIT $2 FOR UPDATE SKIP LOCKED)`
)

func (p *Pruner) queries() []query {
	return []query{
		{"attestation_uses", 0, usesSQL},
		{"events", p.opts.Events, eventsSQL},
		{"refusal_windows", p.opts.Refusals, refusalsSQL},
		{"join_requests", p.opts.Requests, requestsSQL},
		{"replicas", p.opts.Replicas, replicasSQL},
		{"node_certs", p.opts.Certificates, certsSQL},
	}
}
