-- A run is running exactly while it has a lease (`workflow_runs_claim_check`). Statements that are given ids ask for the lease, not
-- the status: by the status the planner, which expects next to no running rows, would read the whole index of leases, with
-- the entries of all runs that have ended since the last vacuum, rather than look up the ids.

-- fragment: run
-- A run as operators see it.
r.id, w.slug as workflow, r.workflow_definition_id, r.delivery_id, r.event_id, r.correlation_id, r.status,
       r.parameters, r.output, r.error, r.warning, r.attempts, r.crashes, r.next_attempt_at, r.cancel_requested_at,
       r.cancelled_by, r.replayed_from, r.created_at, r.started_at, r.finished_at
  from tidegate.workflow_runs r join tidegate.workflow_definitions w on w.id = r.workflow_definition_id

-- fragment: claimed
-- The columns of a run that was just claimed, in the order of `model.run.ClaimedRun`.
r.id, w.slug as workflow, r.event_id, r.correlation_id, r.parameters, r.attempts, r.claim_generation,
          r.trigger_id, r.concurrency_key, r.is_probe, now, r.started_at, r.retry_attempts,
          r.cancel_requested_at is not null as cancel_requested

-- fragment: ended
-- What the caller must know of a run that has ended.
r.id, r.status, r.trigger_id, r.concurrency_key, r.is_probe, r.event_id, r.correlation_id

-- fragment: open_at
-- When the run's trigger and its key are open again, each null if it is not closed.
(select g.closed_until from tidegate.event_scheduler_triggers g where g.trigger_id = r.trigger_id),
         (select h.until from tidegate.trigger_key_holds h
           where h.trigger_id = r.trigger_id and h.concurrency_key = r.concurrency_key)

-- name: claim_due
-- Claims due runs of the given workflows for a worker until its lease ends, oldest first. Suspects, whose workers have died
-- at least $5 times in a row, are left to `claim_suspect`.
with due as materialized (
  select id from tidegate.workflow_runs
   where status = 'pending' and next_attempt_at <= tidegate.now() and workflow_definition_id = any ($1::uuid[])
     and crashes < $5::bigint
   order by next_attempt_at, id limit $2 for update skip locked
), clock as materialized (
  select tidegate.now() as now
)
update tidegate.workflow_runs r
   set status = 'running', attempts = r.attempts + 1, claim_generation = r.claim_generation + 1, claimed_by = $3,
       claim_expires_at = now + $4::bigint * interval '1 ms', started_at = coalesce(r.started_at, now),
       updated_at = now
  from due, clock, tidegate.workflow_definitions w
 where r.id = due.id and w.id = r.workflow_definition_id
returning {{claimed}}

-- name: has_suspects
-- Whether suspects of the given workflows are due: runs whose workers have died at least $2 times in a row.
select exists (select from tidegate.workflow_runs
                where status = 'pending' and crashes > 0 and crashes >= $2::bigint and next_attempt_at <= tidegate.now()
                  and workflow_definition_id = any ($1::uuid[]))

-- name: claim_suspect
-- Claims a due suspect of the given workflows (its workers died at least $2 times in a row): a random one of those that have
-- waited longest, so that one that kills its worker again does not always precede the same others. If nothing executes beside
-- it, a death of its worker counts against the run from now on (`trials`, by $5), until it ends, is suspended or released, or
-- other runs may execute beside it (`pass_trial`).
with due as materialized (
  select id from tidegate.workflow_runs
   where status = 'pending' and crashes > 0 and crashes >= $2::bigint and next_attempt_at <= tidegate.now()
     and workflow_definition_id = any ($1::uuid[])
   order by date_trunc('second', next_attempt_at), random() limit 1 for update skip locked
), clock as materialized (
  select tidegate.now() as now
)
update tidegate.workflow_runs r
   set status = 'running', attempts = r.attempts + 1, claim_generation = r.claim_generation + 1, claimed_by = $3,
       claim_expires_at = now + $4::bigint * interval '1 ms', started_at = coalesce(r.started_at, now),
       trials = coalesce(r.trials, 0) + $5::bigint, updated_at = now
  from due, clock, tidegate.workflow_definitions w
 where r.id = due.id and w.id = r.workflow_definition_id
returning {{claimed}}, r.crashes

-- name: pass_trial
-- Other runs may execute beside a run that was executed alone: if its worker dies from now on, another run may be the cause.
update tidegate.workflow_runs r set trials = null
 where r.id = $1 and r.claim_expires_at is not null and r.claim_generation = $2

-- name: cancel_requested
-- Those of the runs whose cancellation was asked for and that a worker still holds.
select id from tidegate.workflow_runs where id = any ($1::uuid[]) and claim_expires_at is not null and cancel_requested_at is not null

-- name: renew
-- Extends the leases a worker still holds. Returns the ids, whether each was extended, and whether its cancellation was asked
-- for; a run that is missing there belongs to another worker. A row that another transaction is writing, such
-- as the end of the run, is left for the next renewal: waiting for a row while holding locks on others can deadlock.
with held as materialized (
  select r.id, r.cancel_requested_at is not null as cancel_requested
    from unnest($1::uuid[], $2::bigint[]) as u (id, claim_generation), tidegate.workflow_runs r
   where r.id = u.id and r.claim_expires_at is not null and r.claim_generation = u.claim_generation
), free as materialized (
  select r.id
    from unnest($1::uuid[], $2::bigint[]) as u (id, claim_generation), tidegate.workflow_runs r
   where r.id = u.id and r.claim_expires_at is not null and r.claim_generation = u.claim_generation
     for update of r skip locked
), renewed as (
  update tidegate.workflow_runs r
     set claim_expires_at = tidegate.now() + $3::bigint * interval '1 ms'
   where r.id = any (array(select id from free))
)
select h.id, f.id is not null as is_renewed, h.cancel_requested from held h left join free f on f.id = h.id

-- name: finish
-- Ends runs that their worker still holds, and returns them; a worker that lost its claim changes nothing. Its worker is alive,
-- so crashes are reset. An empty array of statuses: all succeeded. What succeeded is counted for triggers that count (`trigger_successes`).
with clock as materialized (
  select tidegate.now() as now
), ended as (
update tidegate.workflow_runs r
   set status = coalesce(u.status, 'succeeded'), output = u.output::jsonb, error = u.error, warning = null, finished_at = now, next_attempt_at = null,
       crashes = 0, trials = null, claimed_by = null, claim_expires_at = null, updated_at = now
  from unnest($1::uuid[], $2::bigint[], $3::text[], $4::text[], $5::text[])
         as u (id, claim_generation, status, output, error), clock
 where r.id = u.id and r.claim_expires_at is not null and r.claim_generation = u.claim_generation
returning {{ended}}
), counted as (
  insert into tidegate.trigger_successes (trigger_id, at, succeeded)
  select g.trigger_id, now, count(*)
    from tidegate.event_scheduler_triggers g join ended e on e.trigger_id = g.trigger_id, clock
   where g.counting_until > now and e.status = 'succeeded' and not e.is_probe
   group by g.trigger_id, now
)
select * from ended

-- name: succeed
-- Ends runs that succeeded and that their worker still holds, with the steps ($4 and on) that succeeded since they last wrote;
-- these have no row yet, or it fails by its unique key. Returns how many of them hold no slot and are no breaker's
-- trial, and counts them for triggers that count (next to none, by a partial index): unless these are all, the caller rolls back, and `finish` has its turn. `is true` has the planner look the runs up
-- in a hash table; it expects one and would compare each step with all of them. A name that all steps share is given once.
with clock as materialized (
  select tidegate.now() as now
), ended as (
  update tidegate.workflow_runs r
     set status = 'succeeded', output = u.output::jsonb, error = null, warning = null, finished_at = now,
         next_attempt_at = null, crashes = 0, trials = null, claimed_by = null, claim_expires_at = null, updated_at = now
    from unnest($1::uuid[], $2::bigint[], $3::text[]) as u (id, claim_generation, output), clock
   where r.id = u.id and r.claim_expires_at is not null
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
  select u.id, u.workflow_run_id, coalesce(u.name, ($6::text[])[1]), 'succeeded', u.result::json, now, now
    from unnest($4::uuid[], $5::uuid[], $6::text[], $7::text[]) as u (id, workflow_run_id, name, result), clock
   where (u.workflow_run_id in (select id from ended)) is true
)
select count(*) from ended where not matters

-- name: ended_by
-- Those of the runs that have ended by the given claims: a worker that takes a run over raises its generation.
select r.id from tidegate.workflow_runs r
  join unnest($1::uuid[], $2::bigint[], $3::text[]) as u (id, claim_generation, status)
    on r.id = u.id and r.claim_generation = u.claim_generation and r.status = u.status

-- name: suspend
-- Suspends runs that their worker still holds until a time, not before their trigger or key is open again, nor past
-- their deadline; one whose cancellation was asked for is not. A run that came this far does not kill its workers: crashes are
-- reset. Returns the ids suspended.
update tidegate.workflow_runs r
   set status = 'pending', warning = u.warning, deadline_at = u.deadline_at, crashes = 0, trials = null,
       retry_attempts = r.retry_attempts + u.is_retry::int,
       next_attempt_at = least(u.deadline_at, greatest(
         coalesce(u.next_attempt_at, tidegate.now() + u.delay_ms * interval '1 ms'),
         {{open_at}})),
       claim_generation = r.claim_generation + 1, claimed_by = null, claim_expires_at = null, updated_at = tidegate.now()
  from unnest($1::uuid[], $2::bigint[], $3::timestamptz[], $4::bigint[], $5::timestamptz[], $6::boolean[], $7::text[])
         as u (id, claim_generation, next_attempt_at, delay_ms, deadline_at, is_retry, warning)
 where r.id = u.id and r.claim_expires_at is not null and r.claim_generation = u.claim_generation
   and r.cancel_requested_at is null
returning r.id

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

-- name: lock
-- Locks runs, in the order of their ids: no other transaction claims one, ends it or writes its steps meanwhile.
select r.id from tidegate.workflow_runs r where r.id = any ($1::uuid[]) order by r.id for no key update

-- name: dead_letter
-- Dead letters for failed runs; for one that failed with a step, of that step.
insert into tidegate.dead_letters (id, kind, subject_id, event_id, reason, detail)
select tidegate.uuid7(), case when u.step_id is null then 'run' else 'step' end, coalesce(u.step_id, u.run_id),
       r.event_id, u.reason, jsonb_build_object('run_id', u.run_id, 'attempts', r.attempts)
  from unnest($1::uuid[], $2::uuid[], $3::text[]) as u (run_id, step_id, reason)
  join tidegate.workflow_runs r on r.id = u.run_id
on conflict (kind, subject_id) where replayed_at is null do nothing

-- name: release
-- Releases runs that a stopping worker holds, due after $3 ms. Returns the ids.
update tidegate.workflow_runs r
   set status = 'pending', next_attempt_at = tidegate.now() + $3::bigint * interval '1 ms',
       claim_generation = r.claim_generation + 1, trials = null, claimed_by = null, claim_expires_at = null,
       updated_at = tidegate.now()
  from unnest($1::uuid[], $2::bigint[]) as u (id, claim_generation)
 where r.id = u.id and r.claim_expires_at is not null and r.claim_generation = u.claim_generation
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
 where r.id = u.id and r.claim_expires_at is not null and r.claim_generation = u.claim_generation
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
 where r.id = expired.id
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
-- Seconds until the next pending run of the given workflows is due, or null; not counting suspects ($2), which do not
-- start by time alone.
select extract(epoch from min(next_attempt_at) - tidegate.now())::float8
  from tidegate.workflow_runs
 where status = 'pending' and crashes < $2::bigint and workflow_definition_id = any ($1::uuid[])

-- name: list_unfinished
-- A page of a trigger's unfinished runs with their events, after a given one. By status, so that the indexes of
-- unfinished runs are read and not all history.
select u.id, u.event_id
  from (select id, event_id from tidegate.workflow_runs where trigger_id = $1 and status = 'pending' and id > $2
        union all
        select id, event_id from tidegate.workflow_runs where trigger_id = $1 and status = 'running' and id > $2) u
 order by u.id limit $3

-- name: set_concurrency_keys
-- Sets the concurrency key whose slot each unfinished run holds; null: it holds none.
update tidegate.workflow_runs r
   set concurrency_key = u.concurrency_key
  from unnest($1::uuid[], $2::text[]) as u (id, concurrency_key)
 where r.id = u.id and r.concurrency_key is distinct from u.concurrency_key

-- name: trigger_of
-- The trigger that launched a run.
select trigger_id from tidegate.workflow_runs where id = $1

-- name: get
-- One run.
select {{run}}
 where r.id = $1

-- name: list
-- A page of runs, newest first; null filters do not filter.
select {{run}}
 where ($1::text is null or w.slug = $1)
   and ($2::text is null or r.status = $2)
   and ($3::uuid is null or r.id = any (array(select tidegate.runs_of(array[$3]))))
   and ($4::uuid is null or r.id < $4)
 order by r.id desc
 limit $5
