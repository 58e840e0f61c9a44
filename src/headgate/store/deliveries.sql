-- name: launch
-- Records decided deliveries and creates the runs of those that launch. A delivery that exists already creates
-- nothing, so an event launches a trigger at most once. Launches are stamped with the time of the decision ($11), which
-- limits are counted by. Returns the runs created.
with input as materialized (
  select * from unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::bigint[], $5::text[], $6::text[], $7::uuid[],
                       $8::uuid[], $9::text[], $10::text[])
    as u (id, trigger_id, event_id, trigger_version, status, last_error, run_id, workflow_definition_id,
          correlation_id, parameters)
), clock as materialized (
  select $11::timestamptz as now
), recorded as (
  insert into headgate.workflow_trigger_deliveries
    (id, trigger_id, event_id, trigger_version, workflow_run_id, status, attempts, last_error, launched_at,
     created_at, updated_at)
  select id, trigger_id, event_id, trigger_version, case when status = 'launched' then run_id end, status, 1,
         last_error, case when status = 'launched' then now end, now, now
    from input, clock
  on conflict (event_id, trigger_id) do nothing
  returning id
)
insert into headgate.workflow_runs
  (id, workflow_definition_id, delivery_id, event_id, correlation_id, parameters, next_attempt_at, created_at,
   updated_at)
select run_id, workflow_definition_id, id, event_id, correlation_id, parameters::jsonb, now, now, now
  from input join recorded using (id), clock
 where status = 'launched'
returning id

-- name: insert
-- Records deliveries as given, retry state included; one that exists for the trigger and event stays. Returns the ids.
insert into headgate.workflow_trigger_deliveries
  (id, trigger_id, event_id, trigger_version, workflow_run_id, status, attempts, dedupe_key, launched_at, last_error,
   throttled_until, retry_state, next_attempt_at, retry_attempts, retry_metadata)
select u.id, u.trigger_id, u.event_id, u.trigger_version, u.workflow_run_id, u.status, u.attempts, u.dedupe_key,
       u.launched_at, u.last_error, u.throttled_until, u.retry_state, u.next_attempt_at, u.retry_attempts,
       u.retry_metadata::jsonb
  from unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::bigint[], $5::uuid[], $6::text[], $7::bigint[], $8::text[],
              $9::timestamptz[], $10::text[], $11::timestamptz[], $12::text[], $13::timestamptz[], $14::bigint[],
              $15::text[])
    as u (id, trigger_id, event_id, trigger_version, workflow_run_id, status, attempts, dedupe_key, launched_at,
          last_error, throttled_until, retry_state, next_attempt_at, retry_attempts, retry_metadata)
 order by u.event_id, u.trigger_id
on conflict (event_id, trigger_id) do nothing
returning id

-- name: update
-- Compare-and-set on state and generation: a worker that lost its claim changes nothing. Returns the ids changed.
update headgate.workflow_trigger_deliveries r
   set retry_state = u.retry_state, retry_attempts = greatest(r.retry_attempts, u.attempts),
       next_attempt_at = u.next_attempt_at, last_error = u.last_error, retry_metadata = u.metadata::jsonb,
       status = coalesce(u.status, r.status), claim_generation = r.claim_generation + 1, claimed_by = null,
       claim_expires_at = null, updated_at = headgate.now()
  from unnest($1::uuid[], $2::text[], $3::bigint[], $4::text[], $5::bigint[], $6::timestamptz[], $7::text[], $8::text[],
              $9::text[])
    as u (id, expected_state, claim_generation, retry_state, attempts, next_attempt_at, last_error, metadata, status)
 where r.id = u.id and r.retry_state = u.expected_state and r.claim_generation = u.claim_generation
returning r.id

-- name: claim_due
-- Claims due rows for a worker until its lease ends, oldest first. Whoever claimed a row before is fenced off.
with due as materialized (
  select id from headgate.workflow_trigger_deliveries
   where retry_state = 'scheduled' and next_attempt_at <= headgate.now()
   order by next_attempt_at, id limit $1 for update skip locked
)
update headgate.workflow_trigger_deliveries r
   set retry_state = 'running', claim_generation = r.claim_generation + 1, claimed_by = $2,
       claim_expires_at = headgate.now() + $3::bigint * interval '1 ms', updated_at = headgate.now()
  from due
 where r.id = due.id
returning r.*

-- name: release_expired
-- Rows whose worker let the lease run out are due again; its late writes are fenced off. Returns the ids.
with expired as materialized (
  select id from headgate.workflow_trigger_deliveries
   where retry_state = 'running' and claim_expires_at <= headgate.now()
   order by claim_expires_at limit $1 for update skip locked
)
update headgate.workflow_trigger_deliveries r
   set retry_state = 'scheduled', next_attempt_at = headgate.now(), claim_generation = r.claim_generation + 1,
       claimed_by = null, claim_expires_at = null, updated_at = headgate.now()
  from expired
 where r.id = expired.id
returning r.id

-- name: list_scheduled
-- Waiting rows in the order in which they become due, after a given place; a null trigger means all.
select r.* from headgate.workflow_trigger_deliveries r
 where r.retry_state = 'scheduled'
   and ($1::uuid is null or r.trigger_id = $1)
   and ($2::timestamptz is null or (r.next_attempt_at, r.id) > ($2, $3::uuid))
 order by r.next_attempt_at, r.id
 limit $4

-- name: list_of_event
-- The deliveries of one event with what they launched, in order.
select d.*, t.name as trigger_name, w.slug as workflow
  from headgate.workflow_trigger_deliveries d
  join headgate.workflow_event_triggers t on t.id = d.trigger_id
  join headgate.workflow_definitions w on w.id = t.workflow_definition_id
 where d.event_id = $1
 order by d.created_at, d.id
