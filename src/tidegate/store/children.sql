-- name: add
-- Adds children of steps that wait to be started; those that exist stay as they are.
insert into tidegate.run_children (step_id, position, run_id, workflow, parameters)
select u.step_id, u.position, u.run_id, u.workflow, u.parameters::jsonb
  from unnest($1::uuid[], $2::bigint[], $3::uuid[], $4::text[], $5::text[]) as u (step_id, position, run_id, workflow, parameters)
on conflict do nothing

-- name: next
-- The children that the steps may start now: in order, as many as may run at once, while none has failed (unless the step goes on
-- then) and their run has not ended; a child may be started with the last write of a run that succeeds. With what their starts need: the trigger (as
-- `model.start.own_trigger`; null: there is none that is active), and what the
-- parent passes on; and the run that resumes instead, if it exists: its start, status and output.
select s.id as step_id, c.position, s.workflow_run_id as run_id, c.workflow, c.parameters::text as parameters,
       case when t.is_active then t.id end as trigger_id, r.event_id, r.correlation_id, e.traceparent,
       coalesce(starts_with(e.type, 'tidegate.run.') or e.origin ? 'of_end', false) as is_of_end,
       k.id as known_run_id, k.event_id as known_event_id, k.status as known_status, k.output::text as known_output
  from unnest($1::uuid[]) as u (step_id)
  join tidegate.workflow_run_steps s on s.id = u.step_id and s.status = 'pending'
  join tidegate.workflow_runs r on r.id = s.workflow_run_id
   and (r.status in ('pending', 'running') or (s.kind = 'child' and r.status = 'succeeded'))
  left join lateral (select e.type, e.origin, e.traceparent from tidegate.workflow_events e where e.id = r.event_id offset 0) e on true
 cross join lateral (select count(*) as running from tidegate.run_children b where b.step_id = s.id and b.status = 'started') b
 cross join lateral (select * from tidegate.run_children c where c.step_id = s.id and c.status = 'waiting'
                      order by c.position
                      limit greatest(0, coalesce((s.retry_metadata->>'at_once')::bigint, 1) - b.running)) c
  left join lateral (
    select t.id, t.status = 'active' as is_active
      from tidegate.workflow_event_triggers t join tidegate.workflow_definitions w on w.id = t.workflow_definition_id
     where w.slug = c.workflow and w.deleted_at is null and t.deleted_at is null
     order by case t.name when 'code' then 1 when 'schedule' then 2 when 'start' then 3 else 4 end, t.created_at, t.id
     limit 1) t on true
  left join lateral (select k.id, k.event_id, k.status, k.output from tidegate.workflow_runs k
                      where k.id = c.resumes and k.event_id is not null offset 0) k on true
 where (s.retry_metadata->>'goes_on')::boolean
    or not exists (select from tidegate.run_children f where f.step_id = s.id and f.status in ('failed', 'cancelled'))
 order by s.id, c.position

-- name: begin
-- The starts of these children are stored, or their runs are to resume.
update tidegate.run_children c
   set status = 'started', event_id = u.event_id, child_run_id = u.child_run_id, resumes = null, updated_at = tidegate.now()
  from unnest($1::uuid[], $2::bigint[], $3::uuid[], $4::uuid[]) as u (step_id, position, event_id, child_run_id)
 where c.step_id = u.step_id and c.position = u.position and c.status = 'waiting'

-- fragment: why_failed
-- Why a step has failed: its child `f` has.
format('%s%s of %s %s: %s', case when s.kind = 'map' then format('item %s, ', f.position) end,
                              coalesce('run ' || f.child_run_id, 'a run'), f.workflow, f.status, coalesce(f.error, 'no reason'))

-- fragment: settle_one
-- Writes the result of steps with one child (`ctx.run`) that is among the children `f` that have ended; `settle` does it for the others.
-- $7 and $8 are the least and the greatest step.
settled as (
  update tidegate.workflow_run_steps s
     set status = case f.status when 'succeeded' then 'succeeded' else 'failed' end,
         retry_state = case f.status when 'succeeded' then 'none' else 'exhausted' end,
         error = case when f.status <> 'succeeded' then {{why_failed}} end,
         result = case when f.status = 'succeeded' then f.result end, updated_at = tidegate.now(),
         claim_generation = s.claim_generation + 1
    from f
   where s.id = f.step_id and s.id between $7 and $8 and s.kind = 'child' and s.status = 'pending'
  returning s.id, s.workflow_run_id
)

-- fragment: left
-- What the end of the child `f` leaves of its step: the step, whether other children of it wait to be started, and the step's run if it
-- has its result (`settled`).
f.step_id, exists (select from tidegate.run_children w where w.step_id = f.step_id and w.status = 'waiting') as has_next,
       s.workflow_run_id

-- fragment: may_end
-- The child has not ended, or it had failed and its run was retried by itself since: then the parent is told when it is retried.
c.status in ('waiting', 'started', 'failed', 'cancelled')

-- name: finish
-- Children have ended. Returns what is left of the steps of those that had not before.
with f as (
  update tidegate.run_children c
     set status = u.status, result = u.result::json, error = u.error, updated_at = tidegate.now()
    from unnest($1::uuid[], $2::bigint[], $3::uuid[], $4::text[], $5::text[], $6::text[])
           as u (step_id, position, child_run_id, status, result, error)
   where c.step_id = u.step_id and c.position = u.position
     and (c.status = 'waiting' or u.child_run_id is not null) and {{may_end}} and c.child_run_id is not distinct from u.child_run_id
  returning c.*
), {{settle_one}}
select {{left}} from f left join settled s on s.id = f.step_id

-- name: lose_waiting
-- Children of these steps cannot be started, and why: of a step that goes on when one fails, none that waits can.
update tidegate.run_children c
   set status = 'failed', error = u.error, updated_at = tidegate.now()
  from unnest($1::uuid[], $2::text[]) as u (step_id, error)
  join tidegate.workflow_run_steps s on s.id = u.step_id and (s.retry_metadata->>'goes_on')::boolean
 where c.step_id = u.step_id and c.status = 'waiting'

-- name: finish_runs
-- Ends runs that their worker still holds (as `runs.finish`), and the children ($6, $9, $10: step, position, error) that they are, in one
-- round trip. The caller has locked them and their parents in an earlier statement. Returns the runs, and what is left of their steps.
with {{runs.end_held}}, f as (
  update tidegate.run_children c
     set status = e.status, result = u.output::json, error = u.error, updated_at = tidegate.now()
    from unnest($1::uuid[], $6::uuid[], $9::bigint[], $4::text[], $10::text[])
           as u (id, step_id, position, output, error), ended e
   where e.id = u.id and c.step_id = u.step_id and c.position = u.position and c.child_run_id = u.id and {{may_end}}
  returning c.*
), {{settle_one}}
select e.*, {{left}} from ended e left join f on f.child_run_id = e.id left join settled s on s.id = f.step_id

-- name: settle
-- Writes the results of steps whose children have all ended, or of which one has failed and none is running. Returns their runs.
update tidegate.workflow_run_steps s
   set status = case when d.failed is null or d.goes_on then 'succeeded' else 'failed' end,
       retry_state = case when d.failed is null or d.goes_on then 'none' else 'exhausted' end,
       error = case when not d.goes_on then d.failed end, updated_at = tidegate.now(), claim_generation = s.claim_generation + 1,
       result = case
         when d.failed is not null and not d.goes_on then null
         when s.kind = 'child' then (select c.result from tidegate.run_children c where c.step_id = s.id)
         when d.goes_on then (select json_agg(json_build_object('run_id', c.child_run_id, 'result', c.result, 'error', c.error)
                                     order by c.position) from tidegate.run_children c where c.step_id = s.id)
         else (select json_agg(c.result order by c.position) from tidegate.run_children c where c.step_id = s.id) end
  from (select s.id, coalesce((s.retry_metadata->>'goes_on')::boolean, false) as goes_on,
               (select {{why_failed}}
                  from tidegate.run_children f where f.step_id = s.id and f.status in ('failed', 'cancelled')
                 order by f.position limit 1) as failed
          from tidegate.workflow_run_steps s
         where s.id = any ($1::uuid[]) and s.id between $2 and $3 and s.status = 'pending'
           and not exists (select from tidegate.run_children c where c.step_id = s.id and c.status = 'started')) d
 where s.id = d.id and s.status = 'pending'
   and ((d.failed is not null and not d.goes_on)
        or ((s.retry_metadata->>'added')::bigint = (s.retry_metadata->>'total')::bigint
            and not exists (select from tidegate.run_children c where c.step_id = s.id and c.status = 'waiting')))
returning s.workflow_run_id

-- name: of_runs
-- Of which step each of the runs is a child, if it is one.
select r.id, (e.origin->>'run_id')::uuid, (e.origin->>'step_id')::uuid, (e.origin->>'position')::bigint
  from tidegate.workflow_runs r
 cross join lateral (select e.origin from tidegate.workflow_events e where e.id = r.event_id offset 0) e
 where r.id = any ($1::uuid[]) and e.origin ? 'step_id'

-- name: pass_down
-- Notes that the children of these runs are to be cancelled, if any has not ended.
insert into tidegate.run_cancellations (run_id, reason)
select u.run_id, u.reason
  from unnest($1::uuid[], $2::text[]) as u (run_id, reason)
 where exists (select from tidegate.run_children c
                where c.step_id between tidegate.first_of(u.run_id) and tidegate.last_of(u.run_id)
                  and c.run_id = u.run_id and c.status = 'started')
on conflict do nothing

-- name: list_passed_down
-- Children that are to be cancelled with their parents, and have not ended; a null child: none is left. First those that were not
-- launched: a run that ends frees a slot that one of them may wait for.
select p.run_id, p.reason, c.step_id, c.position, c.event_id, c.child_run_id
  from (select * from tidegate.run_cancellations order by created_at limit $1) p
  left join lateral (select * from tidegate.run_children c
                      where c.step_id between tidegate.first_of(p.run_id) and tidegate.last_of(p.run_id)
                        and c.run_id = p.run_id and c.status = 'started'
                      order by exists (select from tidegate.workflow_runs r where r.id = c.child_run_id offset 0), c.step_id, c.position
                      limit $2) c on true

-- name: list_stopped
-- Those of the children ($2) of steps ($1) that are to be cancelled with their parents, and why. Their parents are not resumed
-- before the commit.
select c.child_run_id, p.reason
  from tidegate.run_children c join tidegate.run_cancellations p on p.run_id = c.run_id
 where c.step_id = any ($1::uuid[]) and c.child_run_id = any ($2::uuid[]) and c.status = 'started'
 order by p.run_id for key share of p

-- name: is_passed_down
-- Whether the children of a run are still to be cancelled. The caller has locked the run: it is not resumed meanwhile.
select exists (select from tidegate.run_cancellations where run_id = $1)

-- name: passed_down
-- Those of these runs with which nothing is left to be cancelled are done.
delete from tidegate.run_cancellations p
 where p.run_id = any ($1::uuid[])
   and not exists (select from tidegate.run_children c
                    where c.step_id between tidegate.first_of(p.run_id) and tidegate.last_of(p.run_id)
                      and c.run_id = p.run_id and c.status = 'started')

-- name: list_started
-- A page of children that have been started and have not ended, after a given one.
select c.run_id, c.step_id, c.position, c.event_id, c.child_run_id
  from tidegate.run_children c
 where c.status = 'started' and (c.step_id, c.position) > ($1, $2)
 order by c.step_id, c.position limit $3

-- name: count_of_run
-- How many children the steps of a run have.
select count(*) from tidegate.run_children c
 where c.step_id between tidegate.first_of($1) and tidegate.last_of($1) and c.run_id = $1

-- name: is_stopping
-- A child of the run that was asked to stop and has not ended yet, if there is one.
select c.child_run_id from tidegate.run_children c
  cross join lateral (select from tidegate.workflow_runs r
                       where r.id = c.child_run_id and r.status in ('pending', 'running') and r.cancel_requested_at is not null
                      offset 0) r
 where c.step_id between tidegate.first_of($1) and tidegate.last_of($1) and c.run_id = $1 and c.status = 'started'
 limit 1

-- name: list_unresumed
-- Those of the started children ($1, $2: step, position) whose runs have ended and do not resume, with how they ended: the replay of their dead
-- letter was refused or called off.
select c.child_run_id, r.status, r.output::text as output, r.error, l.replay_error
  from unnest($1::uuid[], $2::bigint[]) as u (step_id, position)
  join tidegate.run_children c on c.step_id = u.step_id and c.position = u.position and c.status = 'started'
 cross join lateral (select r.id, r.status, r.output, r.error from tidegate.workflow_runs r
                      where r.id = c.child_run_id and r.status in ('succeeded', 'failed', 'cancelled') offset 0) r
  left join lateral (select l.replay_at, l.replay_error from tidegate.dead_letters l
                      where l.replayed_at is null
                        and l.subject_id = any (array[r.id] || array(select s.id from tidegate.workflow_run_steps s
                                                                      where s.id between tidegate.first_of(r.id) and tidegate.last_of(r.id)
                                                                        and s.workflow_run_id = r.id))
                      order by l.replay_at nulls last, l.id desc limit 1) l on true
 where l.replay_at is null

-- name: list_of_run
-- The children of a run, in order; of one that waits to be resumed, the run that it had. One that waits when its step or run has ended is
-- not started any more, unless the run is retried.
select s.name as step, c.position, c.workflow,
       case when c.status = 'waiting' and (s.status <> 'pending' or p.status not in ('pending', 'running')) then 'not_started'
            else c.status end as status, coalesce(c.child_run_id, c.resumes) as run_id, c.event_id, c.error,
       exists (select from tidegate.workflow_runs r where r.id = coalesce(c.child_run_id, c.resumes) offset 0) as is_launched
  from tidegate.run_children c join tidegate.workflow_run_steps s on s.id = c.step_id
  join tidegate.workflow_runs p on p.id = c.run_id
 where c.step_id between tidegate.first_of($1) and tidegate.last_of($1) and c.run_id = $1 and p.id = $1
 order by s.created_at, c.step_id, c.position limit $2
