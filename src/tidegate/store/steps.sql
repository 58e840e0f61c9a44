-- fragment: is_cut_approval
-- The step is an approval that is being cut off.
excluded.status = 'cancelled' and s.kind = 'wait' and s.retry_metadata ->> 'reason' = 'approval'

-- fragment: is_asked_again
-- The step is an approval that was not decided before its run was retried: it begins anew.
(s.kind = 'wait' and s.status = 'cancelled' and s.retry_metadata ? 'revived')

-- name: write
-- Records the outcome of steps of runs that their worker still holds, or that this transaction has ended ($13); a step that
-- is done stays as it is. Returns run, name, whether the run's cancellation was asked for, and when the step resumes; a
-- step that is missing there was done before (`done_before`), or written by a worker that lost its claim, and nothing changes. A step
-- that waits for an event or for children, and that its function has cut off, is cut off, even if these came or ended meanwhile: the
-- function has gone on without it. An approval that is cut off stays one, with its decision: whoever has the link can ask. Steps are a microsecond
-- apart: `created_at` tells their order. The runs are locked, so that no worker takes one over
-- meanwhile. An empty array means the default in every row: a step that succeeded at once, in a run that has ended.
with input as materialized (
  select u.id, u.workflow_run_id, u.claim_generation, u.name, coalesce(u.status, 'succeeded') as status,
         coalesce(u.kind, 'step') as kind, u.result, u.error, coalesce(u.retry_state, 'none') as retry_state, u.delay_ms,
         coalesce(u.retry_attempts, 0) as retry_attempts, coalesce(u.retry_metadata, '{}') as retry_metadata,
         coalesce(u.has_ended, true) as has_ended, u.n
    from unnest($1::uuid[], $2::uuid[], $3::bigint[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[],
                       $9::text[], $10::bigint[], $11::bigint[], $12::text[], $13::boolean[])
    with ordinality as u (id, workflow_run_id, claim_generation, name, status, kind, result, error, retry_state, delay_ms,
          retry_attempts, retry_metadata, has_ended, n)
), clock as materialized (
  select tidegate.now() as now
), held as materialized (
  select r.id, r.claim_generation, r.cancel_requested_at is not null as cancel_requested from tidegate.workflow_runs r
   where r.id in (select workflow_run_id from input where not has_ended) and {{runs.is_held}}
   order by r.id for no key update of r
), written as (
  insert into tidegate.workflow_run_steps as s
    (id, workflow_run_id, name, kind, status, result, error, retry_state, next_attempt_at, retry_attempts,
     retry_metadata, created_at, updated_at)
  select u.id, u.workflow_run_id, u.name, u.kind, u.status, u.result::json, u.error, u.retry_state,
         now + u.delay_ms * interval '1 ms', u.retry_attempts, u.retry_metadata::jsonb,
         now + u.n * interval '1 microsecond', now
    from input u left join held h on h.id = u.workflow_run_id and h.claim_generation = u.claim_generation, clock
   where u.has_ended or h.id is not null
   order by u.id
  on conflict (id) do update
     set status = excluded.status, kind = case when {{is_asked_again}} then excluded.kind else s.kind end, result = case when {{is_cut_approval}} then s.result else excluded.result end, error = excluded.error, retry_state = excluded.retry_state,
         next_attempt_at = excluded.next_attempt_at,
         retry_attempts = greatest(s.retry_attempts, excluded.retry_attempts),
         retry_metadata = case when {{is_cut_approval}} then s.retry_metadata else '{}' end || excluded.retry_metadata, claim_generation = s.claim_generation + 1, updated_at = excluded.updated_at
   where s.status not in ('succeeded', 'failed', 'cancelled') or {{is_asked_again}}
      or (s.kind in ('wait', 'child', 'map') and s.status in ('succeeded', 'failed') and excluded.status = 'cancelled')
  returning workflow_run_id, name, next_attempt_at
)
select w.workflow_run_id, w.name, coalesce(h.cancel_requested, false), w.next_attempt_at
  from written w left join held h on h.id = w.workflow_run_id

-- name: done_before
-- Those of the steps that `write` did not write, and that were done before, in runs that their worker still holds: by the same claim,
-- by a commit whose answer was lost, or because their children have ended or their event has come. A statement of its own: `write` may have
-- waited for the run, and sees its steps as before.
select s.workflow_run_id, s.name, r.cancel_requested_at is not null, s.next_attempt_at
  from unnest($1::uuid[], $2::uuid[], $3::bigint[], $4::text[], $5::text[]) as u (id, workflow_run_id, claim_generation, status, kind)
  join tidegate.workflow_runs r on r.id = u.workflow_run_id and {{runs.is_held}} and r.claim_generation = u.claim_generation
  join tidegate.workflow_run_steps s on s.id = u.id
 where (s.status = u.status or u.kind in ('child', 'map', 'wait')) and s.status in ('succeeded', 'failed', 'cancelled')

-- name: end_waiting
-- The runs have ended: cancels their waiting steps and timers, and ends their waits for events and budgets. Returns how many steps
-- (timers and waits do not count).
with unawaited as (
  delete from tidegate.event_waits where workflow_run_id = any ($1::uuid[])
), unplaced as (
  delete from tidegate.budget_steps where run_id = any ($1::uuid[])
), ended as (
  update tidegate.workflow_run_steps s
     set status = 'cancelled', retry_state = 'cancelled', next_attempt_at = null, claim_generation = s.claim_generation + 1,
         updated_at = tidegate.now()
   where s.id = any (array(select x.id from unnest($1::uuid[]) as u (run_id),
                            lateral (select x.id from tidegate.workflow_run_steps x
                                      where x.id between tidegate.first_of(u.run_id) and tidegate.last_of(u.run_id)
                                        and x.workflow_run_id = u.run_id offset 0) x))
     and s.id between tidegate.first_of($2) and tidegate.last_of($3) and s.retry_state = 'scheduled'
  returning s.kind
)
select count(*) from ended where kind = 'step'

-- name: list_of_runs
-- The steps of several runs.
select s.* from unnest($1::uuid[]) as u (run_id)
  join tidegate.workflow_run_steps s
    on s.id between tidegate.first_of(u.run_id) and tidegate.last_of(u.run_id) and s.workflow_run_id = u.run_id

-- name: list_scheduled
-- Waiting rows in the order in which they become due, after a given place; a null place means from the first. Not those that wait for a
-- budget: they are woken when their turn comes.
select r.* from tidegate.workflow_run_steps r
 where r.retry_state = 'scheduled' and r.retry_metadata ->> 'reason' is distinct from 'budget'
   and ($1::timestamptz is null or (r.next_attempt_at, r.id) > ($1, $2::uuid))
 order by r.next_attempt_at, r.id
 limit $3

-- name: list_of_run
-- The steps of one run, in order.
select r.* from tidegate.workflow_run_steps r
 where r.id between tidegate.first_of($1) and tidegate.last_of($1) and r.workflow_run_id = $1 order by r.created_at, r.id
