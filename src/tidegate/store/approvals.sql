-- name: key
-- The key that links are signed with; null until the first approval.
select i.approval_key from tidegate.installation i

-- name: make_key
-- Sets the key, unless there is one by now; returns the one that holds.
update tidegate.installation i set approval_key = coalesce(i.approval_key, $1) returning i.approval_key

-- name: replace_key
-- Sets another key: links that were signed with the one before are no longer valid.
update tidegate.installation i set approval_key = $1

-- name: get
-- An approval, by the id of its step, its run and, while it is open, its wait; and the time.
select s.id, s.workflow_run_id as run_id, d.slug as workflow, s.name, s.status, s.result, s.retry_metadata as asked,
       coalesce(w.until, s.next_attempt_at) as until, r.status as run_status, r.cancel_requested_at, r.correlation_id, r.event_id,
       e.traceparent, coalesce(starts_with(e.type, 'tidegate.run.') or e.origin ? 'of_end', false) as is_of_end,
       w.id is not null as is_open, tidegate.now() as now
  from tidegate.workflow_run_steps s
  join tidegate.workflow_runs r on r.id = s.workflow_run_id
  join tidegate.workflow_definitions d on d.id = r.workflow_definition_id
  left join tidegate.event_waits w on w.workflow_run_id = s.workflow_run_id and w.step_id = s.id
  left join lateral (select e.type, e.traceparent, e.origin from tidegate.workflow_events e where e.id = r.event_id offset 0) e
    on true
 where s.id = $1 and s.kind = 'wait' and s.retry_metadata ->> 'reason' = 'approval'

-- name: list
-- A page of the approvals that runs wait for, oldest run first.
select w.step_id as id, w.workflow_run_id as run_id, d.slug as workflow, s.name, s.retry_metadata ->> 'to' as to,
       s.retry_metadata ->> 'note' as note, s.created_at, w.until, r.event_id
  from tidegate.event_waits w
 cross join lateral (select s.name, s.retry_metadata, s.created_at from tidegate.workflow_run_steps s where s.id = w.step_id offset 0) s
  join tidegate.workflow_runs r on r.id = w.workflow_run_id and r.status in ('pending', 'running')
  join tidegate.workflow_definitions d on d.id = r.workflow_definition_id
 where w.event_type = $1 and w.met_event_id is null and s.retry_metadata ->> 'reason' = 'approval'
   and w.until > tidegate.now() and r.cancel_requested_at is null
   and ($2::uuid is null or w.step_id > $2)
 order by w.step_id
 limit $3

-- name: list_of_run
-- The approvals of a run, by id and name.
select s.id, s.name
  from tidegate.workflow_run_steps s
 where s.id between tidegate.first_of($1) and tidegate.last_of($1) and s.workflow_run_id = $1
   and s.kind = 'wait' and s.retry_metadata ->> 'reason' = 'approval'
 order by s.created_at, s.id limit 20
