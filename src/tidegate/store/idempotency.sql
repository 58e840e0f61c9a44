-- name: claim
-- Takes each free or expired key for this transaction; another transaction that wants the same key waits for this one.
-- In a fixed order, so that two batches cannot wait for each other. Returns the keys taken.
insert into tidegate.trigger_idempotency_keys as k (trigger_id, dedupe_key, created_at)
select u.trigger_id, u.dedupe_key, tidegate.now()
  from unnest($1::uuid[], $2::text[]) as u (trigger_id, dedupe_key)
 order by u.trigger_id, u.dedupe_key
on conflict (trigger_id, dedupe_key) do update
   set delivery_id = null, run_id = null, expires_at = null, created_at = excluded.created_at
 where k.expires_at <= tidegate.now()
returning k.trigger_id, k.dedupe_key

-- name: holders
-- The runs that hold the given keys. A statement of its own, after the claim: it sees what the claim waited for.
select k.trigger_id, k.dedupe_key, k.run_id
  from unnest($1::uuid[], $2::text[]) as u (trigger_id, dedupe_key)
  join tidegate.trigger_idempotency_keys k using (trigger_id, dedupe_key)

-- name: keep
-- The launched deliveries keep the keys that this transaction has taken, until their window ends (0 ms: for ever).
update tidegate.trigger_idempotency_keys k
   set delivery_id = u.delivery_id, run_id = u.run_id,
       expires_at = $6::timestamptz + nullif(u.window_ms, 0) * interval '1 ms', created_at = $6
  from unnest($1::uuid[], $2::text[], $3::uuid[], $4::uuid[], $5::bigint[])
    as u (trigger_id, dedupe_key, delivery_id, run_id, window_ms)
 where k.trigger_id = u.trigger_id and k.dedupe_key = u.dedupe_key

-- name: forget
-- Removes keys that have expired, a few at a time.
delete from tidegate.trigger_idempotency_keys k
 using (select trigger_id, dedupe_key from tidegate.trigger_idempotency_keys
         where expires_at <= tidegate.now() order by expires_at limit $1 for update skip locked) expired
 where k.trigger_id = expired.trigger_id and k.dedupe_key = expired.dedupe_key

-- name: release
-- Gives back keys that were taken and not used.
delete from tidegate.trigger_idempotency_keys k
 using unnest($1::uuid[], $2::text[]) as u (trigger_id, dedupe_key)
 where k.trigger_id = u.trigger_id and k.dedupe_key = u.dedupe_key
