-- fragment: step
-- The columns of a step as operators see it, without its time.
s.id, s.name as step, s.workflow_run_id, w.slug as workflow, r.trigger_id, t.name as trigger, r.event_id,
       e.external_id, e.type, e.source, r.correlation_id, s.retry_state, s.retry_metadata ->> 'reason' as reason,
       s.retry_attempts as attempts, case when p.step_id is null then s.error else s.retry_metadata ->> 'message' end as last_error,
       s.created_at, s.updated_at, p.budget, p.key as budget_key

-- fragment: steps
-- Steps with their run, workflow, trigger and event.
tidegate.workflow_run_steps s
  join tidegate.workflow_runs r on r.id = s.workflow_run_id
  join tidegate.workflow_definitions w on w.id = r.workflow_definition_id
  left join tidegate.workflow_event_triggers t on t.id = r.trigger_id
  left join tidegate.workflow_events e on e.id = r.event_id
  left join tidegate.budget_steps p on p.step_id = s.id and s.kind = 'step'

-- name: list_waiting
-- A page of waiting steps and timers in the order in which they become due, with their run, trigger and event. The run of
-- one may have to wait for longer: its trigger, or its key, may be closed. One that waits for a budget is expected when that is not paused
-- or closed; the time is not known, and the ETA null, if it waits for a slot, for an operator to resume it, or to correct it.
select {{step}}, s.next_attempt_at,
       case when p.granted_at is null and (p.key is null or (b.paused_at is not null and b.paused_until is null)
                  or (b.rate_limit is null
                      and coalesce(greatest(b.paused_until, k.closed_until), '-infinity') <= tidegate.now()))
             and p.step_id is not null then null
            else greatest(0, extract(epoch from h.expected_at - tidegate.now()))::float8 end as eta_seconds
  from {{steps}}
  left join tidegate.budgets b on b.name = p.budget and p.granted_at is null
  left join tidegate.budget_keys k on k.budget = p.budget and k.key = p.key and p.granted_at is null and k.probe_run_id is null
 cross join lateral (select case when p.step_id is null
                                 then greatest(s.next_attempt_at, case when r.status = 'pending' then r.next_attempt_at end)
                                 else greatest(s.next_attempt_at, b.paused_until, k.closed_until) end as expected_at) h
 where s.retry_state = 'scheduled'
   and ($1::text is null or e.source = $1)
   and ($2::text is null or s.retry_metadata ->> 'reason' = $2)
   and ($3::uuid is null or r.trigger_id = $3)
   and ($4::text is null or w.slug = $4)
   and ($5::uuid is null or s.workflow_run_id = $5)
   and ($6::timestamptz is null or (s.next_attempt_at, s.id) > ($6, $7::uuid))
 order by s.next_attempt_at, s.id
 limit $8

-- name: list_settled
-- A page of steps in another retry state, newest first.
select {{step}}, null::timestamptz as next_attempt_at, null::float8 as eta_seconds
  from {{steps}}
 where s.retry_state = $1
   and ($2::text is null or e.source = $2)
   and ($3::text is null or s.retry_metadata ->> 'reason' = $3)
   and ($4::uuid is null or r.trigger_id = $4)
   and ($5::text is null or w.slug = $5)
   and ($6::uuid is null or s.workflow_run_id = $6)
   and ($7::uuid is null or s.id < $7)
 order by s.id desc
 limit $8

-- name: get
-- Steps with their runs, as far as the operator's verbs need them. A waiting step of a run that no worker holds
-- is suspended; of a run that a worker holds, a step whose time has come is being tried.
select s.id, s.name, s.kind, s.status, s.retry_state, s.retry_metadata ->> 'reason' as reason, s.retry_attempts,
       s.next_attempt_at, s.next_attempt_at <= tidegate.now() as is_due, s.workflow_run_id, r.status as run_status,
       r.trigger_id, r.event_id, w.slug as workflow
  from tidegate.workflow_run_steps s
  join tidegate.workflow_runs r on r.id = s.workflow_run_id
  join tidegate.workflow_definitions w on w.id = r.workflow_definition_id
 where s.id = any ($1::uuid[])
 order by s.id

-- name: force
-- Makes waiting steps of suspended runs due now, and their runs, but not before their trigger or key is open again. The
-- caller holds the runs. Returns the steps.
with forced as (
  update tidegate.workflow_run_steps s
     set next_attempt_at = tidegate.now(), claim_generation = s.claim_generation + 1, updated_at = tidegate.now()
   where s.id = any ($1::uuid[]) and s.retry_state = 'scheduled'
  returning s.id, s.workflow_run_id
), due as (
  update tidegate.workflow_runs r
     set next_attempt_at = least(r.next_attempt_at, greatest(
           tidegate.now(),
           {{runs.open_at}})),
         updated_at = tidegate.now()
   where r.id in (select workflow_run_id from forced) and r.status = 'pending'
  returning r.id
)
select f.id from forced f join due on due.id = f.workflow_run_id
