-- name: load
-- What was taken of triggers ($1) and keys ($2) with `skip_over`. The caller holds the triggers' locks.
select r.trigger_id, r.key, r.ring, r.ring_at, r.ring_width_us, r.spent_at
  from unnest($1::uuid[], $2::text[]) as u (trigger_id, key)
  join tidegate.trigger_rates r on r.trigger_id = u.trigger_id and r.key = u.key

-- name: save
-- Writes what was taken; each is forgotten after $7, in ms, from now, unless it is written again.
insert into tidegate.trigger_rates as r (trigger_id, key, ring, ring_at, ring_width_us, spent_at, forget_at)
select u.trigger_id, u.key, u.ring::bigint[], u.ring_at, u.ring_width_us, u.spent_at,
       u.spent_at + u.forget_ms * interval '1 ms'
  from unnest($1::uuid[], $2::text[], $3::text[], $4::bigint[], $5::bigint[], $6::timestamptz[], $7::bigint[])
    as u (trigger_id, key, ring, ring_at, ring_width_us, spent_at, forget_ms)
on conflict (trigger_id, key) do update
   set ring = excluded.ring, ring_at = excluded.ring_at, ring_width_us = excluded.ring_width_us, spent_at = excluded.spent_at,
       forget_at = excluded.forget_at

-- name: forget
-- Deletes what was taken so long ago that it no longer counts, at most $1.
delete from tidegate.trigger_rates r
 where (r.trigger_id, r.key) in (select o.trigger_id, o.key from tidegate.trigger_rates o where o.forget_at <= tidegate.now()
                                  order by o.forget_at limit $1 for update skip locked)

-- name: supersede
-- Skips the deliveries that wait for a slot of triggers ($1) and keys ($2) and came before the deliveries ($3) that take their place, with the
-- line of each event's story ($4 is the time). Returns them. The caller holds the triggers' locks.
with older as materialized (
  select d.id, n.id as by_id
    from unnest($1::uuid[], $2::text[], $3::uuid[]) as u (trigger_id, key, id)
    join tidegate.workflow_trigger_deliveries n on n.id = u.id and n.retry_state = 'scheduled'
    join tidegate.workflow_trigger_deliveries d
      on d.trigger_id = u.trigger_id and d.concurrency_key = u.key and d.retry_state = 'scheduled' and d.reason = 'concurrency'
     and d.ingress_sequence < n.ingress_sequence
), skipped as (
  update tidegate.workflow_trigger_deliveries d
     set status = 'skipped', retry_state = 'none', next_attempt_at = null, throttled_until = null, reason = 'superseded',
         last_error = 'delivery ' || o.by_id || ' came later and takes its place', claim_generation = d.claim_generation + 1,
         updated_at = $4
    from older o where d.id = o.id and d.retry_state = 'scheduled'
  returning d.id, d.event_id, d.trigger_id, d.last_error, d.retry_attempts
), told as (
  insert into tidegate.event_decisions (event_id, at, stage, decision, reason, attempt, trigger_id)
  select s.event_id, $4, 'deliver', 'skipped', s.last_error, s.retry_attempts, s.trigger_id from skipped s
)
select s.id, s.trigger_id from skipped s

-- name: running
-- The runs that hold, or wait for, a slot of triggers ($1) and keys ($2), with the event ($3) that replaces each.
select r.id, u.event_id
  from unnest($1::uuid[], $2::text[], $3::uuid[]) as u (trigger_id, key, event_id)
  join tidegate.workflow_runs r on r.trigger_id = u.trigger_id and r.concurrency_key = u.key and r.status in ('pending', 'running')
 where r.cancel_requested_at is null
union all
select r.id, u.event_id
  from unnest($1::uuid[], $2::text[], $3::uuid[]) as u (trigger_id, key, event_id)
  join tidegate.slot_waits q on q.trigger_id = u.trigger_id and q.key = u.key
  join tidegate.workflow_runs r on {{slot_lines.is_waiting}}
 where r.cancel_requested_at is null

-- name: cancel_running
-- Asks for the cancellation of locked runs ($1) by events ($2). Returns the ids.
update tidegate.workflow_runs r
   set cancel_requested_at = tidegate.now(), cancelled_by = 'event ' || u.event_id, updated_at = tidegate.now()
  from unnest($1::uuid[], $2::uuid[]) as u (id, event_id)
 where r.id = any ($1::uuid[]) and r.id = u.id and r.status in ('pending', 'running') and r.cancel_requested_at is null
returning r.id
