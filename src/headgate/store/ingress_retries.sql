-- name: upsert
-- Schedules events for a retry; a row that is running or final stays as it is. Returns the ids written.
insert into headgate.event_ingress_retries as r
  (event_id, source, retry_state, attempts, next_attempt_at, last_error, metadata)
select u.event_id, u.source, 'scheduled', u.attempts, u.next_attempt_at, u.last_error, u.metadata::jsonb
  from unnest($1::uuid[], $2::text[], $3::bigint[], $4::timestamptz[], $5::text[], $6::text[])
    as u (event_id, source, attempts, next_attempt_at, last_error, metadata)
 order by u.event_id
on conflict (event_id) do update
   set retry_state = 'scheduled', attempts = greatest(r.attempts, excluded.attempts),
       next_attempt_at = excluded.next_attempt_at, last_error = excluded.last_error, metadata = excluded.metadata,
       claim_generation = r.claim_generation + 1, updated_at = headgate.now()
 where r.retry_state in ('none', 'scheduled')
returning event_id

-- name: update
-- Compare-and-set on state and generation: a worker that lost its claim changes nothing. Returns the ids changed.
update headgate.event_ingress_retries r
   set retry_state = u.retry_state, attempts = greatest(r.attempts, u.attempts), next_attempt_at = u.next_attempt_at,
       last_error = u.last_error, metadata = u.metadata::jsonb, claim_generation = r.claim_generation + 1,
       claimed_by = null, claim_expires_at = null, updated_at = headgate.now()
  from unnest($1::uuid[], $2::text[], $3::bigint[], $4::text[], $5::bigint[], $6::timestamptz[], $7::text[], $8::text[])
    as u (id, expected_state, claim_generation, retry_state, attempts, next_attempt_at, last_error, metadata)
 where r.event_id = u.id and r.retry_state = u.expected_state and r.claim_generation = u.claim_generation
returning r.event_id

-- name: delete
-- Removes rows that are still in the state and generation that the caller knew. Returns the ids removed.
delete from headgate.event_ingress_retries r
 using unnest($1::uuid[], $2::text[], $3::bigint[]) as u (id, expected_state, claim_generation)
 where r.event_id = u.id and r.retry_state = u.expected_state and r.claim_generation = u.claim_generation
returning r.event_id

-- name: claim_due
-- Claims due rows for a worker until its lease ends, oldest first. Whoever claimed a row before is fenced off.
with due as materialized (
  select event_id from headgate.event_ingress_retries
   where retry_state = 'scheduled' and next_attempt_at <= headgate.now()
   order by next_attempt_at, event_id limit $1 for update skip locked
)
update headgate.event_ingress_retries r
   set retry_state = 'running', claim_generation = r.claim_generation + 1, claimed_by = $2,
       claim_expires_at = headgate.now() + $3::bigint * interval '1 ms', updated_at = headgate.now()
  from due
 where r.event_id = due.event_id
returning r.*

-- name: release_expired
-- Rows whose worker let the lease run out are due again; its late writes are fenced off. Returns the ids.
with expired as materialized (
  select event_id from headgate.event_ingress_retries
   where retry_state = 'running' and claim_expires_at <= headgate.now()
   order by claim_expires_at limit $1 for update skip locked
)
update headgate.event_ingress_retries r
   set retry_state = 'scheduled', next_attempt_at = headgate.now(), claim_generation = r.claim_generation + 1,
       claimed_by = null, claim_expires_at = null, updated_at = headgate.now()
  from expired
 where r.event_id = expired.event_id
returning r.event_id

-- name: list_scheduled
-- Waiting rows in the order in which they become due, after a given place; a null source means all.
select r.* from headgate.event_ingress_retries r
 where r.retry_state = 'scheduled'
   and ($1::text is null or r.source = $1)
   and ($2::timestamptz is null or (r.next_attempt_at, r.event_id) > ($2, $3::uuid))
 order by r.next_attempt_at, r.event_id
 limit $4
