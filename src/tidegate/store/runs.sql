-- A run is running exactly while it has a lease (`workflow_runs_claim_check`). Statements that are given ids ask for the lease, and
-- for both states of the live partition: by `status = 'running'` alone the planner, which expects next to no running rows, would
-- read the whole index of leases, with the entries of all runs that have ended since the last vacuum, rather than look up the ids.

-- fragment: is_held
-- A worker holds the run.
r.status in ('pending', 'running') and r.claim_expires_at is not null

-- fragment: run
-- A run as operators see it.
r.id, w.slug as workflow, r.workflow_definition_id, r.delivery_id, r.event_id, r.correlation_id, r.status,
       r.parameters, r.output, r.error, r.warning, r.attempts, r.crashes, r.next_attempt_at, r.cancel_requested_at,
       r.cancelled_by, r.replayed_from, r.rerun_of, r.window_id, r.created_at, r.started_at, r.finished_at, r.version, r.version_held_at,
       coalesce(r.tags, '{}') as tags
  from tidegate.workflow_runs r join tidegate.workflow_definitions w on w.id = r.workflow_definition_id

-- fragment: claimed
-- The columns of a run that was just claimed, in the order of `model.run.ClaimedRun`.
r.id, w.slug as workflow, r.event_id, r.correlation_id, r.parameters, r.attempts, r.claim_generation,
          r.trigger_id, r.concurrency_key, r.slot_key, r.is_probe, now, r.started_at, r.retry_attempts,
          r.cancel_requested_at is not null as cancel_requested, r.wakes, r.version, r.version_since,
          r.misfits is not null as has_misfit, r.window_id

-- fragment: ended
-- What the caller must know of a run that has ended; with the key of the slot that it held, or would have held when it resumed.
r.id, r.status, r.trigger_id, coalesce(r.concurrency_key, r.slot_key), r.is_probe, r.event_id, r.correlation_id,
          r.status = any ((select v.run_ends from tidegate.registry_version v)::text[]) as is_asked_for

-- fragment: open_at
-- When the run's trigger and its key are open again, each null if it is not closed.
(select g.closed_until from tidegate.event_scheduler_triggers g where g.trigger_id = r.trigger_id),
         (select h.until from tidegate.trigger_key_holds h
           where h.trigger_id = r.trigger_id and h.concurrency_key = r.concurrency_key)

-- fragment: is_for_worker
-- Whether the worker $3 may claim the run, whose steps belong to a version of its code: it has that version, or no worker has that
-- was seen within $4 ms; and they are not known to misfit the version it has, unless the run's time is over or it is to be cancelled:
-- then its function is not called.
(r.version is null
      or (select bool_or(o.name = $3::text) is not false from tidegate.workers o
           where o.seen_at > tidegate.now() - $4::bigint * interval '1 ms'
             and o.versions[array_position(o.definitions, r.workflow_definition_id)] = r.version))
     and (r.misfits is null or r.deadline_at <= tidegate.now() or r.cancel_requested_at is not null
          or coalesce((select o.versions[array_position(o.definitions, r.workflow_definition_id)] from tidegate.workers o
                        where o.name = $3::text) <> all (r.misfits), true))

-- fragment: version_of_worker
-- The version of the run's code that the worker $3 has.
(select o.versions[array_position(o.definitions, r.workflow_definition_id)] from tidegate.workers o where o.name = $3::text)

-- fragment: claim
-- Claims the runs of `due` for the worker $3 until its lease of $4 ms ends. A run without a version begins on that of the worker.
-- What it waited for is over: its warning goes.
clock as materialized (
  select tidegate.now() as now
)
update tidegate.workflow_runs r
   set status = 'running', attempts = r.attempts + 1, claim_generation = r.claim_generation + 1, claimed_by = $3,
       claim_expires_at = now + $4::bigint * interval '1 ms', started_at = coalesce(r.started_at, now),
       version = coalesce(r.version, {{version_of_worker}}), warning = null, updated_at = now
  from due, clock, tidegate.workflow_definitions w
 where r.id = due.id and r.status = 'pending' and w.id = r.workflow_definition_id
returning {{claimed}}

-- name: claim_due
-- Claims due runs of the given workflows for a worker until its lease ends, oldest first. Suspects, whose workers have died
-- at least $5 times in a row, are left to `claim_suspect`.
with due as materialized (
  select id from tidegate.workflow_runs r
   where status = 'pending' and next_attempt_at <= tidegate.now() and workflow_definition_id = any ($1::uuid[])
     and crashes < $5::bigint and {{is_for_worker}}
   order by next_attempt_at, id limit $2 for update skip locked
), {{claim}}

-- name: claim_woken
-- As `claim_due`, of those of the given runs ($6, of which $7 is the least and $8 the greatest) that this transaction has locked and woken and that
-- need no slot.
with due as materialized (
  select id from tidegate.workflow_runs r
   where r.id = any ($6::uuid[]) and r.id between $7 and $8 and status = 'pending' and next_attempt_at <= tidegate.now()
     and workflow_definition_id = any ($1::uuid[]) and crashes < $5::bigint and {{is_for_worker}}
     and {{slot_lines.needs_no_slot}}
   order by id limit $2
), {{claim}}

-- name: keep_claimed
-- Those of the given runs ($1, of which $4 is the least and $5 the greatest) that the worker $2 holds, and that need no slot, with
-- a new lease of $3 ms.
with clock as materialized (
  select tidegate.now() as now
)
update tidegate.workflow_runs r
   set claim_expires_at = now + $3::bigint * interval '1 ms', updated_at = now
  from clock, tidegate.workflow_definitions w
 where r.id = any ($1::uuid[]) and r.id between $4 and $5 and r.status = 'running' and r.claimed_by = $2
   and r.claim_expires_at > now and {{slot_lines.needs_no_slot}} and w.id = r.workflow_definition_id
returning {{claimed}}

-- name: has_suspects
-- Whether suspects of the given workflows are due that the worker may claim: runs whose workers have died at least $2 times in a
-- row.
select exists (select from tidegate.workflow_runs r
                where status = 'pending' and crashes > 0 and crashes >= $2::bigint and next_attempt_at <= tidegate.now()
                  and workflow_definition_id = any ($1::uuid[]) and {{is_for_worker}})

-- name: claim_suspect
-- Claims a due suspect of the given workflows (its workers died at least $2 times in a row): a random one of those that have
-- waited longest, so that one that kills its worker again does not always precede the same others. If nothing executes beside
-- it, a death of its worker counts against the run from now on (`trials`, by $5), until it ends, is suspended or released, or
-- other runs may execute beside it (`pass_trial`).
with due as materialized (
  select id from tidegate.workflow_runs r
   where status = 'pending' and crashes > 0 and crashes >= $2::bigint and next_attempt_at <= tidegate.now()
     and workflow_definition_id = any ($1::uuid[]) and {{is_for_worker}}
   order by date_trunc('second', next_attempt_at), random() limit 1 for update skip locked
), clock as materialized (
  select tidegate.now() as now
)
update tidegate.workflow_runs r
   set status = 'running', attempts = r.attempts + 1, claim_generation = r.claim_generation + 1, claimed_by = $3,
       claim_expires_at = now + $4::bigint * interval '1 ms', started_at = coalesce(r.started_at, now),
       trials = coalesce(r.trials, 0) + $5::bigint, version = coalesce(r.version, {{version_of_worker}}), updated_at = now
  from due, clock, tidegate.workflow_definitions w
 where r.id = due.id and r.status = 'pending' and w.id = r.workflow_definition_id
returning {{claimed}}, r.crashes

-- name: pass_trial
-- Other runs may execute beside a run that was executed alone: if its worker dies from now on, another run may be the cause.
update tidegate.workflow_runs r set trials = null
 where r.id = $1 and {{is_held}} and r.claim_generation = $2

-- name: cancel_requested
-- Those of the runs whose cancellation was asked for and that a worker still holds.
select r.id from tidegate.workflow_runs r where r.id = any ($1::uuid[]) and {{is_held}} and r.cancel_requested_at is not null

-- name: renew
-- Extends the leases a worker still holds. Returns the ids, whether each was extended, and whether its cancellation was asked
-- for; a run that is missing there belongs to another worker. A row that another transaction is writing, such
-- as the end of the run, is left for the next renewal: waiting for a row while holding locks on others can deadlock.
with held as materialized (
  select r.id, r.cancel_requested_at is not null as cancel_requested
    from unnest($1::uuid[], $2::bigint[]) as u (id, claim_generation), tidegate.workflow_runs r
   where r.id = u.id and {{is_held}} and r.claim_generation = u.claim_generation
), free as materialized (
  select r.id
    from unnest($1::uuid[], $2::bigint[]) as u (id, claim_generation), tidegate.workflow_runs r
   where r.id = u.id and {{is_held}} and r.claim_generation = u.claim_generation
     for update of r skip locked
), renewed as (
  update tidegate.workflow_runs r
     set claim_expires_at = tidegate.now() + $3::bigint * interval '1 ms'
   where r.id = any (array(select id from free)) and {{is_held}}
)
select h.id, f.id is not null as is_renewed, h.cancel_requested from held h left join free f on f.id = h.id

-- fragment: end_held
-- Ends the runs $1 that their worker still holds by the claims $2; a worker that lost its claim changes nothing. Its worker is alive,
-- so crashes are reset. An empty array of statuses: all succeeded. What succeeded is counted for triggers that count (`trigger_successes`).
clock as materialized (
  select tidegate.now() as now
), ended as (
update tidegate.workflow_runs r
   set status = coalesce(u.status, 'succeeded'), output = u.output::jsonb, warning = null, finished_at = now, next_attempt_at = null,
       error = case when u.status = 'cancelled' and r.cancelled_by like 'event %' then 'cancelled by ' || r.cancelled_by else u.error end,
       crashes = 0, trials = null, claimed_by = null, claim_expires_at = null, updated_at = now
  from unnest($1::uuid[], $2::bigint[], $3::text[], $4::text[], $5::text[])
         as u (id, claim_generation, status, output, error), clock
 where r.id = u.id and {{is_held}} and r.claim_generation = u.claim_generation
returning {{ended}}
), counted as (
  insert into tidegate.trigger_successes (trigger_id, at, succeeded)
  select g.trigger_id, now, count(*)
    from tidegate.event_scheduler_triggers g join ended e on e.trigger_id = g.trigger_id, clock
   where g.counting_until > now and e.status = 'succeeded' and not e.is_probe
   group by g.trigger_id, now
)

-- name: finish
-- Ends runs that their worker still holds, and returns them.
with {{end_held}}
select * from ended

-- name: succeed
-- Ends runs that succeeded and that their worker still holds, with the steps ($4 and on) that succeeded since they last wrote;
-- these have no row yet, or it fails by its unique key. Returns how many of them hold no slot and are no breaker's
-- trial (none, if the ends of runs are to be published), and counts them for triggers that count (next to none, by a partial index): unless these are all, the caller rolls back, and `finish` has its turn. `is true` has the planner look the runs up
-- in a hash table; it expects one and would compare each step with all of them. A name that all steps share is given once. Steps
-- are a microsecond apart: `created_at` tells their order.
with clock as materialized (
  select tidegate.now() as now
), ended as (
  update tidegate.workflow_runs r
     set status = 'succeeded', output = u.output::jsonb, error = null, warning = null, finished_at = now,
         next_attempt_at = null, crashes = 0, trials = null, claimed_by = null, claim_expires_at = null, updated_at = now
    from unnest($1::uuid[], $2::bigint[], $3::text[]) as u (id, claim_generation, output), clock
   where r.id = u.id and {{is_held}}
     and r.claim_generation = coalesce(u.claim_generation, ($2::bigint[])[1])
  returning r.id, r.trigger_id, r.concurrency_key is not null or r.is_probe as matters
), counted as (
  insert into tidegate.trigger_successes (trigger_id, at, succeeded)
  select g.trigger_id, now, count(*)
    from tidegate.event_scheduler_triggers g join ended e on e.trigger_id = g.trigger_id, clock
   where g.counting_until > now
   group by g.trigger_id, now
), written as (
  insert into tidegate.workflow_run_steps (id, workflow_run_id, name, status, result, created_at, updated_at)
  select u.id, u.workflow_run_id, coalesce(u.name, ($6::text[])[1]), 'succeeded', u.result::json,
         now + u.n * interval '1 microsecond', now
    from unnest($4::uuid[], $5::uuid[], $6::text[], $7::text[]) with ordinality as u (id, workflow_run_id, name, result, n), clock
   where (u.workflow_run_id in (select id from ended)) is true
)
select count(*) from ended
 where not matters and not exists (select from tidegate.registry_version v where 'succeeded' = any (v.run_ends))

-- name: ended_by
-- Those of the runs that have ended by the given claims: a worker that takes a run over raises its generation.
select u.id from unnest($1::uuid[], $2::bigint[], $3::text[]) as u (id, claim_generation, status)
 where exists (select from tidegate.workflow_runs r
                where r.id = u.id and r.claim_generation = u.claim_generation and r.status = u.status offset 0)

-- name: suspend
-- Suspends runs that their worker still holds until a time, not before their trigger or key is open again, nor past
-- their deadline; one whose cancellation was asked for is not. A run that was woken since it was claimed is due at once, unless
-- its function has failed and is called again later. A run that came this far does not kill its workers: crashes are
-- reset. A run that holds its slots while it executes gives them back. Returns the ids suspended, whether each was woken, and the trigger
-- and key of the slot that it gave back.
update tidegate.workflow_runs r
   set status = 'pending', warning = u.warning, deadline_at = u.deadline_at, crashes = 0, trials = null,
       retry_attempts = r.retry_attempts + u.is_retry::int,
       next_attempt_at = least(u.deadline_at, greatest(
         case when r.wakes > u.wakes and not u.is_retry then tidegate.now()
              else coalesce(u.next_attempt_at, tidegate.now() + u.delay_ms * interval '1 ms') end,
         {{open_at}})),
       not_before = case when u.is_retry then coalesce(u.next_attempt_at, tidegate.now() + u.delay_ms * interval '1 ms') end,
       concurrency_key = case when r.slot_key is null then r.concurrency_key end,
       claim_generation = r.claim_generation + 1, claimed_by = null, claim_expires_at = null, updated_at = tidegate.now()
  from unnest($1::uuid[], $2::bigint[], $3::timestamptz[], $4::bigint[], $5::timestamptz[], $6::boolean[], $7::text[],
              $8::bigint[])
         as u (id, claim_generation, next_attempt_at, delay_ms, deadline_at, is_retry, warning, wakes)
 where r.id = u.id and {{is_held}} and r.claim_generation = u.claim_generation
   and r.cancel_requested_at is null
returning r.id, r.wakes > u.wakes, r.trigger_id, r.slot_key

-- name: wake
-- What runs wait for has come: those that no worker holds are due at once, but not before their trigger or key is open again, nor
-- before a time that something else than a wait asked for (`not_before`); those that a worker holds are due at once when they are
-- suspended, and one that waits for a version of its code stays so. The caller has locked them (`lock`). Returns those that have not ended, how often
-- each was woken, and whether a worker holds it, by its last claim.
update tidegate.workflow_runs r
   set wakes = r.wakes + 1,
       next_attempt_at = case when r.status = 'running' or (r.version_held_at is not null and r.cancel_requested_at is null) then r.next_attempt_at
                              else least(r.next_attempt_at, greatest(tidegate.now(), r.not_before, {{open_at}})) end,
       warning = case when r.version_held_at is not null or r.not_before > tidegate.now() then r.warning end,
       updated_at = tidegate.now()
 where r.id = any ($1::uuid[]) and r.id between $2 and $3 and r.status in ('pending', 'running')
returning r.id, r.wakes, r.status = 'running', r.claim_generation

-- name: note
-- Notes what runs that their worker still holds say of themselves: the version of the code that they fit and go on with, and their
-- tags, beside those that they have.
update tidegate.workflow_runs r
   set version = coalesce(u.version, r.version), misfits = case when u.version is null then r.misfits end,
       version_held_at = case when u.version is null then r.version_held_at end,
       tags = case when u.tags is null then r.tags else coalesce(r.tags, '{}') || u.tags::jsonb end
  from unnest($1::uuid[], $2::bigint[], $3::text[], $4::text[]) as u (id, claim_generation, version, tags)
 where r.id = u.id and {{is_held}} and r.claim_generation = u.claim_generation

-- name: hold_for_version
-- Of runs that were just suspended: their recorded steps do not fit the version $2 of each. They wait for another one.
update tidegate.workflow_runs r
   set version_held_at = coalesce(r.version_held_at, tidegate.now()),
       misfits = array_remove(coalesce(r.misfits, '{}'), u.version) || u.version
  from unnest($1::uuid[], $2::text[]) as u (id, version)
 where r.id = u.id and r.status = 'pending'

-- name: offer_versions
-- Makes runs due that wait for a version, if the worker $1 has one that has not been tried: their own, or a new one. Returns the
-- ids.
with mine as materialized (
  select d.id, d.version from tidegate.workers o, unnest(o.definitions, o.versions) as d (id, version)
   where o.name = $1 and d.version is not null
), held as materialized (
  select r.id from tidegate.workflow_runs r join mine on mine.id = r.workflow_definition_id
   where r.status = 'pending' and r.version_held_at is not null and r.next_attempt_at > tidegate.now()
     and mine.version <> all (r.misfits)
   order by r.id for update of r skip locked
)
update tidegate.workflow_runs r
   set next_attempt_at = tidegate.now(), updated_at = tidegate.now()
  from held where r.id = held.id and r.status = 'pending'
returning r.id

-- name: accept_version
-- An operator resumes a run that waits for a version, on whatever code comes next: what it has recorded until now need not fit.
-- Returns its id when it was waiting.
update tidegate.workflow_runs r
   set version = null, misfits = null, version_held_at = null, version_since = tidegate.now(), warning = null,
       next_attempt_at = least(r.next_attempt_at, tidegate.now()), updated_at = tidegate.now()
 where r.id = $1 and r.status = 'pending' and r.version_held_at is not null
returning r.id

-- name: list_version_held
-- The workflows with runs that wait for a version of their code: how many, which versions they need, one of them, and since when.
select w.slug as workflow, count(*) as waiting, array_agg(distinct r.version) as versions, min(r.id::text) as example,
       min(r.version_held_at) as since
  from tidegate.workflow_runs r join tidegate.workflow_definitions w on w.id = r.workflow_definition_id
 where r.status = 'pending' and r.version_held_at is not null
 group by w.slug order by w.slug

-- name: cancel_waiting
-- Ends a run that no worker holds. Returns it when it did.
update tidegate.workflow_runs r
   set status = 'cancelled', cancelled_by = $2, cancel_requested_at = tidegate.now(), error = $3, warning = null,
       finished_at = tidegate.now(), next_attempt_at = null, claim_generation = r.claim_generation + 1,
       updated_at = tidegate.now()
 where r.id = $1 and r.status = 'pending'
returning {{ended}}

-- name: request_cancel
-- Asks the worker that holds a run to stop it at its next step. Returns the id when there is one to ask.
update tidegate.workflow_runs r
   set cancelled_by = coalesce(r.cancelled_by, $2), cancel_requested_at = coalesce(r.cancel_requested_at, tidegate.now()),
       updated_at = tidegate.now()
 where r.id = $1 and r.status = 'running'
returning r.id

-- name: rerun
-- Creates a run ($2) that begins anew with the parameters and the event of another ($1), not before its trigger or key is open. $3 is the
-- key of its slot, which it gives back while it waits if $4 says so.
insert into tidegate.workflow_runs
  (id, workflow_definition_id, event_id, trigger_id, concurrency_key, slot_key, correlation_id, parameters, next_attempt_at, rerun_of,
   created_at, updated_at, window_id)
select $2, r.workflow_definition_id, r.event_id, r.trigger_id, $3, case when $4::boolean then $3 end, r.correlation_id, r.parameters,
       greatest(tidegate.now(), {{open_at}}), r.id, tidegate.now(), tidegate.now(), r.window_id
  from tidegate.workflow_runs r where r.id = $1

-- name: lock
-- Locks runs, in the order of their ids: no other transaction claims one, ends it or writes its steps meanwhile.
select r.id from tidegate.workflow_runs r where r.id = any ($1::uuid[]) and r.id between $2 and $3 order by r.id for no key update

-- name: dead_letter
-- Dead letters for failed runs; for one that failed with a step, of that step.
insert into tidegate.dead_letters (id, kind, subject_id, event_id, reason, detail)
select tidegate.uuid7(), case when u.step_id is null then 'run' else 'step' end, coalesce(u.step_id, u.run_id),
       r.event_id, u.reason, jsonb_build_object('run_id', u.run_id, 'attempts', r.attempts)
  from unnest($1::uuid[], $2::uuid[], $3::text[]) as u (run_id, step_id, reason)
 cross join lateral (select r.event_id, r.attempts from tidegate.workflow_runs r where r.id = u.run_id offset 0) r
on conflict (kind, subject_id) where replayed_at is null do nothing

-- name: release
-- Releases runs that a stopping worker holds, due after $3 ms. Returns the ids.
update tidegate.workflow_runs r
   set status = 'pending', next_attempt_at = tidegate.now() + $3::bigint * interval '1 ms',
       not_before = tidegate.now() + $3::bigint * interval '1 ms', claim_generation = r.claim_generation + 1, trials = null, claimed_by = null, claim_expires_at = null,
       updated_at = tidegate.now()
  from unnest($1::uuid[], $2::bigint[]) as u (id, claim_generation)
 where r.id = u.id and {{is_held}} and r.claim_generation = u.claim_generation
returning r.id

-- name: release_unstarted
-- Releases runs that a worker has claimed and not started: they are as before the claim, but do not start before their trigger
-- or key is open again. Returns the ids.
update tidegate.workflow_runs r
   set status = 'pending', attempts = r.attempts - 1, trials = null,
       next_attempt_at = least(r.deadline_at, greatest(
         r.next_attempt_at,
         {{open_at}})), claim_generation = r.claim_generation + 1, claimed_by = null,
       claim_expires_at = null, started_at = case when r.attempts > 1 then r.started_at end, updated_at = tidegate.now()
  from unnest($1::uuid[], $2::bigint[]) as u (id, claim_generation)
 where r.id = u.id and {{is_held}} and r.claim_generation = u.claim_generation
returning r.id

-- name: release_expired
-- Makes runs whose lease has expired due again; late writes of their worker are fenced off. Which of them was executing, and
-- whether one killed the worker, is not known here: none is blamed, and runs to which this happens $2 times in a row are
-- executed alone. Returns the ids.
with expired as materialized (
  select id from tidegate.workflow_runs
   where status = 'running' and claim_expires_at <= tidegate.now()
   order by claim_expires_at limit $1 for update skip locked
)
update tidegate.workflow_runs r
   set status = 'pending', next_attempt_at = tidegate.now(), claim_generation = r.claim_generation + 1,
       claimed_by = null, claim_expires_at = null, crashes = r.crashes + 1, updated_at = tidegate.now(),
       warning = case when r.crashes + 1 < $2::bigint then r.warning
                      else format('its worker died %s times in a row; it waits to be tried alone', r.crashes + 1) end
  from expired
 where r.id = expired.id and r.status = 'running'
returning r.id

-- name: list_killers
-- Waiting runs whose workers have died the last $1 times that they were executed alone, and that are to fail.
select r.id, r.trigger_id from tidegate.workflow_runs r
 where r.status = 'pending' and r.crashes > 0 and r.trials >= $1 order by r.next_attempt_at limit $2

-- name: fail_killer
-- Ends a run as failed that `list_killers` has named, unless a worker holds it or it was replayed since. Returns the run if it did.
update tidegate.workflow_runs r
   set status = 'failed', error = $2, warning = null, finished_at = tidegate.now(), next_attempt_at = null,
       claim_generation = r.claim_generation + 1, updated_at = tidegate.now()
 where r.id = $1 and r.status = 'pending' and r.crashes > 0 and r.trials >= $3
returning {{ended}}

-- name: next_due
-- Seconds until the next pending run of the given workflows is due that the worker may claim, or null; not counting suspects ($2),
-- which do not start by time alone.
select extract(epoch from min(next_attempt_at) - tidegate.now())::float8
  from tidegate.workflow_runs r
 where status = 'pending' and crashes < $2::bigint and workflow_definition_id = any ($1::uuid[]) and {{is_for_worker}}

-- name: list_unfinished
-- A page of a trigger's unfinished runs with their events, after a given one, and whether each has given its slots back. By status, so that the indexes of
-- unfinished runs are read and not all history.
select u.id, u.event_id, u.slot_key is not null and u.concurrency_key is null as has_no_slot
  from (select id, event_id, slot_key, concurrency_key from tidegate.workflow_runs where trigger_id = $1 and status = 'pending' and id > $2
        union all
        select id, event_id, slot_key, concurrency_key from tidegate.workflow_runs where trigger_id = $1 and status = 'running' and id > $2) u
 order by u.id limit $3

-- fragment: is_without_slot
-- The run has given its slot back, or gives it back now ($3), since it is not executing.
((r.slot_key is not null and r.concurrency_key is null) or ($3::boolean and r.status = 'pending'))

-- name: set_concurrency_keys
-- Sets the concurrency key whose slot each unfinished run holds; null: it holds none. A run that has given its slot back needs one of
-- that key when it resumes. With $3 runs hold their slots while they execute: those that do not execute hold none.
update tidegate.workflow_runs r
   set concurrency_key = case when not {{is_without_slot}} then u.concurrency_key end,
       slot_key = case when {{is_without_slot}} or $3::boolean then u.concurrency_key end
  from unnest($1::uuid[], $2::text[]) as u (id, concurrency_key)
 where r.id = u.id and r.status in ('pending', 'running')

-- name: trigger_of
-- The trigger that launched a run.
select trigger_id from tidegate.workflow_runs where id = $1

-- name: get
-- One run.
select {{run}}
 where r.id = $1

-- name: list_ended
-- Those of the runs ($1, of which $2 is the least id and $3 the greatest) that have ended.
select {{run}}
 where r.id = any ($1::uuid[]) and r.id between $2 and $3 and r.status in ('succeeded', 'failed', 'cancelled')

-- name: list
-- A page of runs, newest first; null filters do not filter.
select {{run}}
 where ($1::text is null or w.slug = $1)
   and ($2::text is null or r.status = $2)
   and ($3::uuid is null or r.id = any (array(select tidegate.runs_of(array[$3]))))
   and ($4::uuid is null or r.id < $4)
 order by r.id desc
 limit $5
