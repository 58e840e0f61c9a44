-- name: launch
-- Records decided deliveries and creates the runs of those that launch. A delivery that exists already creates
-- nothing, so an event launches a trigger at most once. Launches are stamped with the time of the decision ($15), which
-- limits are counted by. The runs marked in $14 are claimed by the worker $16 (null: by nobody) for $17 ms at once, unless
-- runs of its definitions $18 are among the oldest that are due. Of columns that have the same in every row, the array is
-- empty: launched, no error, no key, no probe, no reason ($19), and a run with the id of its delivery. Returns the
-- deliveries whose runs were created, and the parameters, as they are kept, of those that are claimed.
with input as materialized (
  select u.id, u.trigger_id, u.event_id, u.trigger_version, coalesce(u.status, 'launched') as status, u.last_error,
         case when u.status <> 'launched' then u.run_id else coalesce(u.run_id, u.id) end as run_id,
         u.workflow_definition_id, u.correlation_id, u.parameters, u.dedupe_key, u.concurrency_key,
         coalesce(u.is_probe, false) as is_probe, u.is_wanted, u.reason
    from unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::bigint[], $5::text[], $6::text[], $7::uuid[], $8::uuid[],
                $9::text[], $10::text[], $11::text[], $12::text[], $13::boolean[], $14::boolean[], $19::text[])
    as u (id, trigger_id, event_id, trigger_version, status, last_error, run_id, workflow_definition_id,
          correlation_id, parameters, dedupe_key, concurrency_key, is_probe, is_wanted, reason)
), clock as materialized (
  select $15::timestamptz as now
), worker as materialized (
  select case when $16::text is not null then not exists (
           select from (select r.workflow_definition_id from tidegate.workflow_runs r
                         where r.status = 'pending' and r.next_attempt_at <= $15 order by r.next_attempt_at limit 1000) oldest
            where oldest.workflow_definition_id = any ($18::uuid[])) else false end as is_free
), recorded as (
  insert into tidegate.workflow_trigger_deliveries
    (id, trigger_id, event_id, trigger_version, workflow_run_id, status, attempts, dedupe_key, last_error, launched_at,
     reason, created_at, updated_at)
  select id, trigger_id, event_id, trigger_version, run_id, status, 1, dedupe_key, last_error,
         case when status = 'launched' then now end, reason, now, now
    from input, clock
  on conflict (event_id, trigger_id) do nothing
  returning id
)
insert into tidegate.workflow_runs
  (id, workflow_definition_id, delivery_id, event_id, trigger_id, concurrency_key, is_probe, correlation_id, parameters,
   next_attempt_at, created_at, updated_at, status, attempts, claim_generation, claimed_by, claim_expires_at, started_at)
select run_id, workflow_definition_id, id, event_id, trigger_id, concurrency_key, is_probe, correlation_id,
       parameters::jsonb, now, now, now, case when c.is_claimed then 'running' else 'pending' end, c.is_claimed::int,
       c.is_claimed::int, case when c.is_claimed then $16 end,
       case when c.is_claimed then now + $17::bigint * interval '1 ms' end, case when c.is_claimed then now end
  from input join recorded using (id), clock, worker, lateral (select is_wanted and is_free as is_claimed) c
 where status = 'launched'
returning delivery_id, case when status = 'running' then parameters end as parameters

-- name: launch_calm
-- Launches new deliveries that nothing limits, and adds what the batch saw to the totals of triggers ($13 and on) and
-- sources ($23 and on). Many transactions share those rows: they are written last, the triggers before the sources (hence
-- `after_triggers`), each in a fixed order.
-- When $33 is a version of the registry, nothing at all is written unless all is calm: that version is current, none of the
-- sources $34 (with `*`) has a state, none of the triggers is paused, closed or its breaker not closed. That is read here, in
-- a statement after the one that took the locks of `sources.share`, so it holds until the commit, as if read on its own.
-- Launches are stamped with $9; those marked in $8 are claimed as by `launch` ($10 to $12). What all rows have in common is
-- given once. A delivery that exists already is not expected, and looking for it would take as long as writing it: it fails
-- by its unique key. Returns whether it was calm, with each delivery whose run is claimed (null: none) and its parameters, as
-- they are kept.
with calm as materialized (
  select $33::bigint is null or (
           $33 = (select version from tidegate.registry_version)
           and not exists (select from tidegate.event_scheduler_sources s
                            where s.source = any ($34::text[]) and (s.source <> '*' or s.rate_limit is not null))
           and not exists (select from tidegate.event_scheduler_triggers g
                            where g.trigger_id = any ($2::uuid[])
                              and (g.paused_at is not null or g.breaker_state <> 'closed' or g.closed_until is not null))
         ) as is_calm
), input as materialized (
  select u.id, coalesce(u.trigger_id, ($2::uuid[])[1]) as trigger_id, u.event_id,
         coalesce(u.trigger_version, ($4::bigint[])[1]) as trigger_version,
         coalesce(u.workflow_definition_id, ($5::uuid[])[1]) as workflow_definition_id, u.correlation_id, u.parameters,
         coalesce(u.is_wanted, ($8::boolean[])[1]) as is_wanted
    from calm, unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::bigint[], $5::uuid[], $6::text[], $7::text[], $8::boolean[])
      as u (id, trigger_id, event_id, trigger_version, workflow_definition_id, correlation_id, parameters, is_wanted)
   where calm.is_calm
), clock as materialized (
  select $9::timestamptz as now
), worker as materialized (
  select case when $10::text is not null then not exists (
           select from (select r.workflow_definition_id from tidegate.workflow_runs r
                         where r.status = 'pending' and r.next_attempt_at <= $9 order by r.next_attempt_at limit 1000) oldest
            where oldest.workflow_definition_id = any ($12::uuid[])) else false end as is_free
), recorded as (
  insert into tidegate.workflow_trigger_deliveries
    (id, trigger_id, event_id, trigger_version, workflow_run_id, status, attempts, launched_at, created_at, updated_at)
  select id, trigger_id, event_id, trigger_version, id, 'launched', 1, now, now, now from input, clock
), counted_triggers as (
  insert into tidegate.event_scheduler_trigger_metrics as m
    (trigger_id, filtered, matched, launched, throttled, skipped, failed, paused, last_status, last_error, updated_at)
  select u.trigger_id, u.filtered, u.matched, u.launched, u.throttled, u.skipped, u.failed, u.paused, u.last_status,
         u.last_error, tidegate.now()
    from calm,
         unnest($13::uuid[], $14::bigint[], $15::bigint[], $16::bigint[], $17::bigint[], $18::bigint[], $19::bigint[],
                $20::bigint[], $21::text[], $22::text[])
      as u (trigger_id, filtered, matched, launched, throttled, skipped, failed, paused, last_status, last_error)
   where calm.is_calm
   order by u.trigger_id
  on conflict (trigger_id) do update
     set filtered = m.filtered + excluded.filtered, matched = m.matched + excluded.matched,
         launched = m.launched + excluded.launched, throttled = m.throttled + excluded.throttled,
         skipped = m.skipped + excluded.skipped, failed = m.failed + excluded.failed,
         paused = m.paused + excluded.paused, last_status = excluded.last_status,
         last_error = coalesce(excluded.last_error, m.last_error), updated_at = excluded.updated_at
  returning 1
), counted_sources as (
  insert into tidegate.event_scheduler_source_metrics as m
    (source, total, passed, throttled, dropped, failures, total_lag_ms, last_lag_ms, max_lag_ms, last_event_at, updated_at)
  select u.source, u.total, u.passed, u.throttled, u.dropped, u.failures, u.total_lag_ms, u.last_lag_ms, u.max_lag_ms,
         u.last_event_at, tidegate.now()
    from calm, (select count(*) from counted_triggers) as after_triggers,
         unnest($23::text[], $24::bigint[], $25::bigint[], $26::bigint[], $27::bigint[], $28::bigint[], $29::bigint[],
                $30::bigint[], $31::bigint[], $32::timestamptz[])
      as u (source, total, passed, throttled, dropped, failures, total_lag_ms, last_lag_ms, max_lag_ms, last_event_at)
   where calm.is_calm
   order by u.source
  on conflict (source) do update
     set total = m.total + excluded.total, passed = m.passed + excluded.passed,
         throttled = m.throttled + excluded.throttled, dropped = m.dropped + excluded.dropped,
         failures = m.failures + excluded.failures, total_lag_ms = m.total_lag_ms + excluded.total_lag_ms,
         last_lag_ms = excluded.last_lag_ms, max_lag_ms = greatest(m.max_lag_ms, excluded.max_lag_ms),
         last_event_at = greatest(m.last_event_at, excluded.last_event_at), updated_at = excluded.updated_at
), created as (
  insert into tidegate.workflow_runs
    (id, workflow_definition_id, delivery_id, event_id, trigger_id, correlation_id, parameters, next_attempt_at,
     created_at, updated_at, status, attempts, claim_generation, claimed_by, claim_expires_at, started_at)
  select id, workflow_definition_id, id, event_id, trigger_id, correlation_id, parameters::jsonb, now, now, now,
         case when c.is_claimed then 'running' else 'pending' end, c.is_claimed::int, c.is_claimed::int,
         case when c.is_claimed then $10 end, case when c.is_claimed then now + $11::bigint * interval '1 ms' end,
         case when c.is_claimed then now end
    from input, clock, worker, lateral (select is_wanted and is_free as is_claimed) c
  returning delivery_id, case when status = 'running' then parameters end as parameters
)
select c.is_calm, r.delivery_id, r.parameters from calm c left join created r on r.parameters is not null

-- name: hold
-- Keeps deliveries that must wait, with their time, in the transaction that decided so ($16 is its time). One that exists
-- for the trigger and event stays. Returns the ids.
insert into tidegate.workflow_trigger_deliveries
  (id, trigger_id, event_id, trigger_version, status, attempts, dedupe_key, last_error, throttled_until, retry_state,
   next_attempt_at, retry_attempts, retry_metadata, reason, source, concurrency_key, ingress_sequence, plan_version,
   created_at, updated_at)
select u.id, u.trigger_id, u.event_id, u.trigger_version, u.status, 1, u.dedupe_key, u.last_error,
       case when u.status = 'throttled' then u.next_attempt_at end, 'scheduled', u.next_attempt_at, u.retry_attempts,
       u.metadata::jsonb, u.reason, u.source, u.concurrency_key, u.ingress_sequence, u.plan_version, $16, $16
  from unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::bigint[], $5::text[], $6::text[], $7::text[], $8::timestamptz[],
              $9::bigint[], $10::text[], $11::text[], $12::text[], $13::bigint[], $14::bigint[], $15::text[])
    as u (id, trigger_id, event_id, trigger_version, status, dedupe_key, last_error, next_attempt_at, retry_attempts,
          reason, source, concurrency_key, ingress_sequence, plan_version, metadata)
on conflict (event_id, trigger_id) do nothing
returning id

-- name: due_triggers
-- Triggers with due deliveries, the longest due first. The index is walked from trigger to trigger, so that a backlog
-- costs no more than a single delivery.
with recursive waiting (trigger_id) as (
  (select d.trigger_id from tidegate.workflow_trigger_deliveries d
    where d.retry_state = 'scheduled' order by d.trigger_id limit 1)
  union all
  select (select d.trigger_id from tidegate.workflow_trigger_deliveries d
           where d.retry_state = 'scheduled' and d.trigger_id > w.trigger_id order by d.trigger_id limit 1)
    from waiting w where w.trigger_id is not null
)
select w.trigger_id
  from waiting w,
       lateral (select d.next_attempt_at from tidegate.workflow_trigger_deliveries d
                 where d.trigger_id = w.trigger_id and d.retry_state = 'scheduled'
                 order by d.next_attempt_at, d.ingress_sequence limit 1) first
 where first.next_attempt_at <= tidegate.now()
   and not exists (select 1 from tidegate.event_scheduler_triggers g
                    where g.trigger_id = w.trigger_id and g.is_replanning)
 order by first.next_attempt_at
 limit $1

-- name: list_due
-- Deliveries of each of the triggers that are due at $3 (null: by now), at most $2 of each, those that are longest due, in
-- the order of arrival; not locked.
select d.id, t.trigger_id, d.source, d.reason
  from unnest($1::uuid[]) as t (trigger_id),
       lateral (select d.id, d.source, d.reason, d.ingress_sequence from tidegate.workflow_trigger_deliveries d
                 where d.trigger_id = t.trigger_id and d.retry_state = 'scheduled'
                   and d.next_attempt_at <= coalesce($3::timestamptz, tidegate.now())
                 order by d.next_attempt_at, d.ingress_sequence limit $2) d
 order by d.ingress_sequence

-- name: take
-- Locks those of the given deliveries that are still due at $2, oldest event first. That is the time by which they are decided:
-- none is launched before its own.
select d.id, d.trigger_id, d.event_id, d.status, d.reason, d.retry_attempts, d.next_attempt_at, d.source,
       d.concurrency_key, d.trigger_version
  from tidegate.workflow_trigger_deliveries d
 where d.id = any ($1::uuid[]) and d.retry_state = 'scheduled' and d.next_attempt_at <= $2::timestamptz
 order by d.ingress_sequence, d.id
   for update of d skip locked

-- name: settle
-- Writes what became of deliveries that this transaction has locked, and creates the runs of those that launch, stamped
-- with the time of the decision ($20). Up to $24 runs of the definitions $23 are claimed by the worker $21 for $22 ms at
-- once, unless older runs of these wait for it. Returns the deliveries whose runs were created, and of those that are claimed the
-- parameters.
with input as materialized (
  select * from unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::bigint[], $5::text[], $6::text[], $7::uuid[],
                       $8::uuid[], $9::text[], $10::text[], $11::text[], $12::text[], $13::boolean[], $14::text[],
                       $15::timestamptz[], $16::bigint[], $17::text[], $18::bigint[], $19::text[])
    as u (id, trigger_id, event_id, trigger_version, status, last_error, run_id, workflow_definition_id,
          correlation_id, parameters, dedupe_key, concurrency_key, is_probe, retry_state, next_attempt_at,
          retry_attempts, reason, plan_version, metadata)
), clock as materialized (
  select $20::timestamptz as now
), settled as (
  update tidegate.workflow_trigger_deliveries d
     set status = u.status, retry_state = u.retry_state, trigger_version = u.trigger_version,
         workflow_run_id = u.run_id, launched_at = case when u.status = 'launched' then now end,
         last_error = u.last_error, next_attempt_at = u.next_attempt_at,
         throttled_until = case when u.status = 'throttled' then u.next_attempt_at end,
         attempts = d.attempts + 1, retry_attempts = u.retry_attempts, retry_metadata = u.metadata::jsonb,
         reason = u.reason, dedupe_key = u.dedupe_key, concurrency_key = u.concurrency_key,
         plan_version = u.plan_version, claim_generation = d.claim_generation + 1, updated_at = now
    from input u, clock
   where d.id = u.id and d.retry_state = 'scheduled'
  returning d.id
), launched as (
  select i.*, i.workflow_definition_id = any ($23::uuid[]) and row_number() over () <= $24::bigint
              and not exists (
                    select from (select r.workflow_definition_id from tidegate.workflow_runs r
                                  where r.status = 'pending' and r.next_attempt_at <= (select now from clock)
                                  order by r.next_attempt_at limit 1000) oldest
                     where oldest.workflow_definition_id = any ($23::uuid[])) as is_claimed
    from input i join settled using (id) where i.status = 'launched'
)
insert into tidegate.workflow_runs
  (id, workflow_definition_id, delivery_id, event_id, trigger_id, concurrency_key, is_probe, correlation_id, parameters,
   next_attempt_at, created_at, updated_at, status, attempts, claim_generation, claimed_by, claim_expires_at, started_at)
select run_id, workflow_definition_id, id, event_id, trigger_id, concurrency_key, is_probe, correlation_id,
       parameters::jsonb, now, now, now, case when is_claimed then 'running' else 'pending' end, is_claimed::int,
       is_claimed::int, case when is_claimed then $21 end,
       case when is_claimed then now + $22::bigint * interval '1 ms' end, case when is_claimed then now end
  from launched, clock
returning delivery_id, case when status = 'running' then parameters end

-- name: take_stale
-- Locks waiting deliveries of a trigger whose time belongs to an older plan, in the order of arrival, after a given one.
select d.id, d.event_id, d.retry_attempts, d.next_attempt_at, d.ingress_sequence, d.reason, d.concurrency_key,
       (select coalesce(e.replayed_at, e.received_at) from tidegate.workflow_events e where e.id = d.event_id) as received_at
  from tidegate.workflow_trigger_deliveries d
 where d.trigger_id = $1 and d.retry_state = 'scheduled' and d.plan_version < $2 and d.ingress_sequence > $3
 order by d.ingress_sequence
 limit $4
   for update of d

-- name: move
-- Gives waiting deliveries that this transaction has locked a new time, or gives them up.
update tidegate.workflow_trigger_deliveries d
   set status = u.status, retry_state = u.retry_state, next_attempt_at = u.next_attempt_at,
       throttled_until = case when u.status = 'throttled' then u.next_attempt_at end,
       retry_attempts = u.retry_attempts, reason = u.reason, last_error = u.last_error,
       retry_metadata = u.metadata::jsonb, plan_version = u.plan_version, claim_generation = d.claim_generation + 1,
       updated_at = tidegate.now()
  from unnest($1::uuid[], $2::text[], $3::text[], $4::timestamptz[], $5::bigint[], $6::text[], $7::text[], $8::text[],
              $9::bigint[])
    as u (id, status, retry_state, next_attempt_at, retry_attempts, reason, last_error, metadata, plan_version)
 where d.id = u.id

-- name: keep_waiting
-- Deliveries that keep their place and time in a new plan.
update tidegate.workflow_trigger_deliveries set plan_version = $2 where id = any ($1::uuid[])

-- name: release_sources
-- Makes deliveries due now that waited for their source to be resumed, once it is. Returns them. The index is walked from
-- source to source, so that a large backlog of a source that stays paused costs no more than a single delivery.
with recursive names (source) as (
  (select d.source from tidegate.workflow_trigger_deliveries d
    where d.retry_state = 'scheduled' and d.reason = 'source_paused' order by d.source limit 1)
  union all
  select (select d.source from tidegate.workflow_trigger_deliveries d
           where d.retry_state = 'scheduled' and d.reason = 'source_paused' and d.source > n.source
           order by d.source limit 1)
    from names n where n.source is not null
), freed as materialized (
  select w.id
    from names n
   cross join lateral (
     select d.id from tidegate.workflow_trigger_deliveries d
      where d.retry_state = 'scheduled' and d.reason = 'source_paused' and d.source = n.source
        and d.next_attempt_at > tidegate.now()
      limit $1 for update of d skip locked) w
   where not exists (select 1 from tidegate.event_scheduler_sources s
                      where s.source = n.source and s.paused_at is not null
                        and (s.paused_until is null or s.paused_until > tidegate.now()))
)
update tidegate.workflow_trigger_deliveries d
   set next_attempt_at = tidegate.now(), claim_generation = d.claim_generation + 1, updated_at = tidegate.now()
  from freed where d.id = freed.id
returning d.id

-- name: next_due
-- Seconds until the next waiting delivery that is not due yet, or null.
select extract(epoch from min(next_attempt_at) - tidegate.now())::float8
  from tidegate.workflow_trigger_deliveries
 where retry_state = 'scheduled' and next_attempt_at > tidegate.now()

-- name: bury
-- Dead letters for deliveries that were given up.
insert into tidegate.dead_letters (id, kind, subject_id, event_id, reason, detail)
select tidegate.uuid7(), 'delivery', u.id, u.event_id, u.reason, u.detail::jsonb
  from unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[]) as u (id, event_id, reason, detail)
on conflict (kind, subject_id) where replayed_at is null do nothing

-- name: list_scheduled
-- Waiting rows in the order in which they become due, after a given place; a null place means from the first.
select r.* from tidegate.workflow_trigger_deliveries r
 where r.retry_state = 'scheduled'
   and ($1::timestamptz is null or (r.next_attempt_at, r.id) > ($1, $2::uuid))
 order by r.next_attempt_at, r.id
 limit $3

-- name: list_of_event
-- The deliveries of one event with what they launched, in order.
select d.*, t.name as trigger_name, w.slug as workflow
  from tidegate.workflow_trigger_deliveries d
  join tidegate.workflow_event_triggers t on t.id = d.trigger_id
  join tidegate.workflow_definitions w on w.id = t.workflow_definition_id
 where d.event_id = $1
 order by d.created_at, d.id
