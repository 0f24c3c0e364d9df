package joinsvc

const (
	lockSubjectSQL = `SELECT pg_advisory_xact_lock($1)`

	// What caps a new request, each count no longer than its limit.
	capsSQL = `SELECT
	  (SELECT count(*) FROM (SELECT FROM join_requests WHERE namespace = $1 AND verdict IS NULL AND ended IS NULL AND NOT capped LIMIT $2) AS q),
	  (SELECT count(*) FROM (SELECT FROM join_requests WHERE source = $3 AND verdict IS NULL AND ended IS NULL AND NOT capped LIMIT $4) AS q),
	  (SELECT count(*) FROM (SELECT FROM join_requests WHERE token_id = $5 AND verdict IS NULL AND ended IS NULL AND NOT capped) AS q),
	  (SELECT coalesce(sum(uses_left), 0) FROM join_token_slots WHERE token_id = $5),
	  (SELECT count(*) FROM (SELECT FROM join_requests WHERE verdict IS NULL AND ended IS NULL AND NOT capped LIMIT $6) AS q),
	  EXISTS (SELECT FROM join_requests WHERE $7 AND attestor_type = $8 AND subject_sha256 = $9 AND ended IS NULL AND subject_proved
	    AND verdict = 'Rejected' AND decided_at > join_now() - $10::interval)`

	liveRowsSQL = `SELECT count(*) FROM (SELECT FROM join_requests WHERE ended IS NULL LIMIT $1) AS q`

	// How many machines wait, and how many rows live.
	waitingSQL = `SELECT count(*) FILTER (WHERE verdict IS NULL), count(*) FROM join_requests WHERE ended IS NULL`

	endRequestSQL = `UPDATE join_requests SET ended = $2, ended_at = join_now() WHERE id = $1 AND ended IS NULL`

	supersedeSQL = `UPDATE join_requests SET ended = 'Superseded', ended_at = join_now()
	WHERE attestor_type = $1 AND subject_sha256 = $2 AND csr_sha256 <> $3 AND subject_proved AND verdict IS NULL AND ended IS NULL`

	insertRequestSQL = `INSERT INTO join_requests (id, attestor_type, attestor, subject_sha256, subject_proved, csr_sha256, role, namespace, tenant, pool, site,
	  facts_sha256, token_id, source, spec, spec_sha256, capped, first_seen_at)
	VALUES ($1, $2, $3, $4, $5, $6, $7, $8, nullif($9, ''), $10, $11, $12, nullif($13, ''), $14, $15, $16, $17, $18)`

	pendingEventSQL = `INSERT INTO events (type, tenant, data) VALUES ('join.pending', $1, jsonb_build_object('id', $2::text))`

	// last_asked_at is coarse, so that most polls of a week write nothing at all.
	askedSQL = `UPDATE join_requests SET last_asked_at = join_now()
	WHERE id = ANY($1) AND ended IS NULL AND last_asked_at < join_now() - $2::interval`
)
