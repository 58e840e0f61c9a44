-- The statements that launch (`launch`, `launch_unrestricted`, `settle`) share their first parameters: $1 is the time of the
-- decision, which limits are counted by and launches are stamped with; $2 is the worker that claims new runs (null: none), $3 its
-- lease in ms, $4 the definitions whose runs it can execute.

-- fragment: worker
-- Whether the worker claims new runs: not while runs of its definitions are among the 1,000 oldest that are due.
worker as materialized (
  select case when $2::text is not null then not exists (
           select from (select r.workflow_definition_id from tidegate.workflow_runs r
                         where r.status = 'pending' and r.next_attempt_at <= $1::timestamptz
                         order by r.next_attempt_at limit 1000) oldest
            where oldest.workflow_definition_id = any ($4::uuid[])) else false end as is_free, o.definitions, o.versions
    from (select) one left join tidegate.workers o on o.name = $2::text
)

-- fragment: create_runs
-- Creates the runs of the rows of `launched`. Those with `is_wanted` are claimed at once if the worker is free, and note the
-- version of its code. Returns the
-- deliveries, and the parameters, as they are stored, of the runs that are claimed.
insert into tidegate.workflow_runs
  (id, workflow_definition_id, delivery_id, event_id, trigger_id, concurrency_key, slot_key, is_probe, correlation_id, parameters,
   next_attempt_at, created_at, updated_at, status, attempts, claim_generation, claimed_by, claim_expires_at, started_at,
   version)
select run_id, workflow_definition_id, id, event_id, trigger_id, concurrency_key,
       case when concurrency_key is not null
                 and trigger_id = any (array(select t.id from tidegate.workflow_event_triggers t where t.holds = 'executing'))
            then concurrency_key end,
       is_probe, correlation_id,
       parameters::jsonb, $1::timestamptz, $1::timestamptz, $1::timestamptz,
       case when c.is_claimed then 'running' else 'pending' end, c.is_claimed::int, c.is_claimed::int,
       case when c.is_claimed then $2::text end,
       case when c.is_claimed then $1::timestamptz + $3::bigint * interval '1 ms' end,
       case when c.is_claimed then $1::timestamptz end,
       case when c.is_claimed then worker.versions[array_position(worker.definitions, workflow_definition_id)] end
  from launched, worker, lateral (select is_wanted and is_free as is_claimed) c
returning delivery_id, case when status = 'running' then parameters end as parameters

-- name: launch
-- Records decided deliveries and creates the runs of those that launch. A delivery that exists already, waiting or decided, creates
-- nothing, so an event launches a trigger at most once. An empty array means the default in every row: launched, no error, no key, no probe, no
-- reason, and a run with the id of its delivery. Returns the deliveries whose runs were created, and the parameters, as they are
-- stored, of those that are claimed.
with input as materialized (
  select u.id, u.trigger_id, u.event_id, u.trigger_version, coalesce(u.status, 'launched') as status, u.last_error,
         case when u.status <> 'launched' then u.run_id else coalesce(u.run_id, u.id) end as run_id,
         u.workflow_definition_id, u.correlation_id, u.parameters, u.dedupe_key, u.concurrency_key,
         coalesce(u.is_probe, false) as is_probe, u.is_wanted, u.reason
    from unnest($5::uuid[], $6::uuid[], $7::uuid[], $8::bigint[], $9::text[], $10::text[], $11::uuid[], $12::uuid[],
                $13::text[], $14::text[], $15::text[], $16::text[], $17::boolean[], $18::boolean[], $19::text[])
    as u (id, trigger_id, event_id, trigger_version, status, last_error, run_id, workflow_definition_id,
          correlation_id, parameters, dedupe_key, concurrency_key, is_probe, is_wanted, reason)
), {{worker}}, recorded as (
  insert into tidegate.workflow_trigger_deliveries
    (id, trigger_id, event_id, trigger_version, workflow_run_id, status, attempts, dedupe_key, last_error, launched_at,
     reason, created_at, updated_at)
  select id, trigger_id, event_id, trigger_version, run_id, status, 1, dedupe_key, last_error,
         case when status = 'launched' then $1::timestamptz end, reason, $1::timestamptz, $1::timestamptz
    from input i
   where not exists (select from tidegate.workflow_trigger_deliveries d where d.id = i.id offset 0)
  on conflict do nothing
  returning id
), launched as (
  select i.* from input i join recorded using (id) where i.status = 'launched'
)
{{create_runs}}

-- name: launch_unrestricted
-- Launches new deliveries that nothing limits, and adds what the batch saw to the totals of triggers ($15) and sources ($16): a
-- statement of its own would add about 4 % to the time. Nothing is written unless nothing can limit them: $13 is the current version of
-- the registry, none of the sources $14 (with `*`) has a state, no run waits for an event of one of the types $17, none of the triggers
-- is paused, closed or has a breaker that is not closed. That is read here, in a statement after the one that took the locks of `locks.share`, so it holds until the commit.
-- An array of one element means that value in every row. A delivery that exists already is not expected, and checking for it
-- would take as long as writing it: the statement fails by the unique key. Returns whether it wrote, with each delivery whose run
-- is claimed (null: none) and its parameters, as they are stored.
with checked as materialized (
  select $13::bigint = (select version from tidegate.registry_version)
         and not exists (select from tidegate.event_scheduler_sources s
                          where s.source = any ($14::text[]) and (s.source <> '*' or s.rate_limit is not null))
         and not exists (select from tidegate.event_scheduler_triggers g
                          where g.trigger_id = any ($6::uuid[])
                            and (g.paused_at is not null or g.breaker_state <> 'closed' or g.closed_until is not null))
         and not exists (select from tidegate.event_waits w where w.event_type = any ($17::text[]))
         as is_unrestricted
), launched as materialized (
  select u.id, u.id as run_id, coalesce(u.trigger_id, ($6::uuid[])[1]) as trigger_id, u.event_id,
         coalesce(u.trigger_version, ($8::bigint[])[1]) as trigger_version,
         coalesce(u.workflow_definition_id, ($9::uuid[])[1]) as workflow_definition_id, u.correlation_id, u.parameters,
         case when cardinality($18::text[]) = 1 then ($18::text[])[1] else u.concurrency_key end as concurrency_key,
         false as is_probe, coalesce(u.is_wanted, ($12::boolean[])[1]) as is_wanted
    from checked, unnest($5::uuid[], $6::uuid[], $7::uuid[], $8::bigint[], $9::uuid[], $10::text[], $11::text[],
                         $12::boolean[], $18::text[])
      as u (id, trigger_id, event_id, trigger_version, workflow_definition_id, correlation_id, parameters, is_wanted,
            concurrency_key)
   where checked.is_unrestricted
), {{worker}}, recorded as (
  insert into tidegate.workflow_trigger_deliveries
    (id, trigger_id, event_id, trigger_version, workflow_run_id, status, attempts, launched_at, created_at, updated_at)
  select id, trigger_id, event_id, trigger_version, id, 'launched', 1, $1::timestamptz, $1::timestamptz, $1::timestamptz
    from launched
), seen as materialized (
  select $15::text::json as triggers, $16::text::json as sources from checked where checked.is_unrestricted
), {{totals.count}}, created as (
{{create_runs}}
)
select c.is_unrestricted, r.delivery_id, r.parameters from checked c left join created r on r.parameters is not null

-- name: hold
-- Keeps deliveries that must wait, with their time, in the transaction that decided so ($16 is its time). One that exists
-- for the trigger and event stays. Returns the ids.
insert into tidegate.workflow_trigger_deliveries
  (id, trigger_id, event_id, trigger_version, status, attempts, dedupe_key, last_error, throttled_until, retry_state,
   next_attempt_at, retry_attempts, retry_metadata, reason, source, concurrency_key, ingress_sequence, plan_version,
   created_at, updated_at, budget, budget_key, budget_cost, backlog_key, stale_at)
select u.id, u.trigger_id, u.event_id, u.trigger_version, u.status, 1, u.dedupe_key, u.last_error,
       case when u.status = 'throttled' then u.next_attempt_at end, 'scheduled', u.next_attempt_at, u.retry_attempts,
       u.metadata::jsonb, u.reason, u.source, u.concurrency_key, u.ingress_sequence, u.plan_version, $16, $16, b.name, b.key,
       b.cost, u.metadata::jsonb #>> '{backlog,key}', (u.metadata::jsonb #>> '{backlog,until}')::timestamptz
  from unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::bigint[], $5::text[], $6::text[], $7::text[], $8::timestamptz[],
              $9::bigint[], $10::text[], $11::text[], $12::text[], $13::bigint[], $14::bigint[], $15::text[])
    as u (id, trigger_id, event_id, trigger_version, status, dedupe_key, last_error, next_attempt_at, retry_attempts,
          reason, source, concurrency_key, ingress_sequence, plan_version, metadata)
  left join lateral (select m ->> 'name' as name, m ->> 'key' as key, (m ->> 'cost')::bigint as cost
                       from (select u.metadata::jsonb #> '{waits_for,budget}' as m) held
                      where u.reason = 'budget') b on true
 where not exists (select from tidegate.workflow_trigger_deliveries d where d.id = u.id offset 0)
on conflict do nothing
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
select d.id, t.trigger_id, d.source, d.reason, d.budget, d.budget_key
  from unnest($1::uuid[]) as t (trigger_id),
       lateral (select d.id, d.source, d.reason, d.ingress_sequence, d.budget, d.budget_key from tidegate.workflow_trigger_deliveries d
                 where d.trigger_id = t.trigger_id and d.retry_state = 'scheduled'
                   and d.next_attempt_at <= coalesce($3::timestamptz, tidegate.now())
                 order by d.next_attempt_at, d.ingress_sequence limit $2) d
 order by d.ingress_sequence

-- name: take
-- Locks those of the given deliveries that are still due at $2, oldest event first. That is the time by which they are decided:
-- none is launched before its own, but the first in line of a budget, whose time is when it is expected to have room.
select d.id, d.trigger_id, d.event_id, d.status, d.reason, d.retry_attempts, d.next_attempt_at, d.source,
       d.concurrency_key, d.trigger_version, d.window_id, d.budget, d.stale_at, d.created_at
  from tidegate.workflow_trigger_deliveries d
 where d.id = any ($1::uuid[]) and d.retry_state = 'scheduled'
   and (d.next_attempt_at <= $2::timestamptz or d.reason = 'budget')
 order by d.ingress_sequence, d.id
   for update of d skip locked

-- name: settle
-- Writes what became of deliveries that this transaction has locked, and creates the runs of those that launch. Returns the
-- deliveries whose runs were created, and the parameters, as they are stored, of those that are claimed.
with input as materialized (
  select * from unnest($5::uuid[], $6::uuid[], $7::uuid[], $8::bigint[], $9::text[], $10::text[], $11::uuid[],
                       $12::uuid[], $13::text[], $14::text[], $15::text[], $16::text[], $17::boolean[], $18::text[],
                       $19::timestamptz[], $20::bigint[], $21::text[], $22::bigint[], $23::text[], $24::boolean[])
    as u (id, trigger_id, event_id, trigger_version, status, last_error, run_id, workflow_definition_id,
          correlation_id, parameters, dedupe_key, concurrency_key, is_probe, retry_state, next_attempt_at,
          retry_attempts, reason, plan_version, metadata, is_wanted)
), {{worker}}, settled as (
  update tidegate.workflow_trigger_deliveries d
     set status = u.status, retry_state = u.retry_state, trigger_version = u.trigger_version,
         workflow_run_id = u.run_id, launched_at = case when u.status = 'launched' then $1::timestamptz end,
         last_error = u.last_error, next_attempt_at = u.next_attempt_at,
         throttled_until = case when u.status = 'throttled' then u.next_attempt_at end,
         attempts = d.attempts + 1, retry_attempts = u.retry_attempts, retry_metadata = u.metadata::jsonb,
         reason = u.reason, dedupe_key = u.dedupe_key, concurrency_key = u.concurrency_key,
         plan_version = u.plan_version, claim_generation = d.claim_generation + 1, updated_at = $1::timestamptz,
         budget = case when u.reason = 'budget' then u.metadata::jsonb #>> '{waits_for,budget,name}' end,
         budget_key = case when u.reason = 'budget' then u.metadata::jsonb #>> '{waits_for,budget,key}' end,
         budget_cost = case when u.reason = 'budget' then (u.metadata::jsonb #>> '{waits_for,budget,cost}')::bigint end,
         backlog_key = coalesce(u.metadata::jsonb #>> '{backlog,key}', d.backlog_key),
         stale_at = coalesce((u.metadata::jsonb #>> '{backlog,until}')::timestamptz, d.stale_at)
    from input u
   where d.id = u.id and d.retry_state = 'scheduled'
  returning d.id
), launched as (
  select i.* from input i join settled using (id) where i.status = 'launched'
)
{{create_runs}}

-- name: stale_budgets
-- The budgets in whose lines those stand that `take_stale` locks.
select distinct w.budget
  from (select d.budget, d.reason from tidegate.workflow_trigger_deliveries d
         where d.trigger_id = $1 and d.retry_state = 'scheduled' and d.plan_version < $2 and d.ingress_sequence > $3
         order by d.ingress_sequence limit $4) w
 where w.reason = 'budget'

-- name: take_stale
-- Locks waiting deliveries of a trigger whose time belongs to an older plan, in the order of arrival, after a given one.
select d.id, d.event_id, d.retry_attempts, d.next_attempt_at, d.ingress_sequence, d.reason, d.concurrency_key,
       (select coalesce(e.replayed_at, greatest(e.received_at, e.deliver_at)) from tidegate.workflow_events e where e.id = d.event_id)
         as received_at, d.budget, d.budget_key
  from tidegate.workflow_trigger_deliveries d
 where d.trigger_id = $1 and d.retry_state = 'scheduled' and d.plan_version < $2 and d.ingress_sequence > $3
 order by d.ingress_sequence
 limit $4
   for update of d

-- name: move
-- Gives waiting deliveries that this transaction has locked a new time, or marks them as exhausted.
update tidegate.workflow_trigger_deliveries d
   set status = u.status, retry_state = u.retry_state, next_attempt_at = u.next_attempt_at,
       throttled_until = case when u.status = 'throttled' then u.next_attempt_at end,
       retry_attempts = u.retry_attempts, reason = u.reason, last_error = u.last_error,
       retry_metadata = u.metadata::jsonb, plan_version = u.plan_version, claim_generation = d.claim_generation + 1,
       updated_at = tidegate.now()
  from unnest($1::uuid[], $2::text[], $3::text[], $4::timestamptz[], $5::bigint[], $6::text[], $7::text[], $8::text[],
              $9::bigint[])
    as u (id, status, retry_state, next_attempt_at, retry_attempts, reason, last_error, metadata, plan_version)
 where d.id = u.id and d.retry_state = 'scheduled'

-- name: keep_waiting
-- Deliveries that keep their place and time in a new plan.
update tidegate.workflow_trigger_deliveries set plan_version = $2
 where id = any ($1::uuid[]) and retry_state = 'scheduled'

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
  from freed where d.id = freed.id and d.retry_state = 'scheduled'
returning d.id

-- name: next_due
-- Seconds until the next waiting delivery that is not due yet, or null.
select extract(epoch from min(next_attempt_at) - tidegate.now())::float8
  from tidegate.workflow_trigger_deliveries
 where retry_state = 'scheduled' and next_attempt_at > tidegate.now()

-- name: dead_letter
-- Dead letters for deliveries that are exhausted or failed for good.
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
 where d.id between tidegate.first_of($1) and tidegate.last_of($1) and d.event_id = $1
 order by d.created_at, d.trigger_id
