-- fragment: delivery
-- The columns of a delivery as operators see it, without its time.
d.id, d.trigger_id, t.name as trigger, w.slug as workflow, d.trigger_version, d.event_id, e.external_id, e.type,
       e.source, e.correlation_id, d.workflow_run_id, d.status, d.retry_state, d.reason, d.attempts, d.retry_attempts,
       d.dedupe_key, d.concurrency_key, d.window_id, d.last_error, d.launched_at, d.created_at, d.updated_at,
       case when d.reason = 'budget' then d.budget end as budget, case when d.reason = 'budget' then d.budget_key end as budget_key

-- fragment: deliveries
-- Deliveries with their event, trigger and workflow.
tidegate.workflow_trigger_deliveries d
  join tidegate.workflow_events e on e.id = d.event_id
  join tidegate.workflow_event_triggers t on t.id = d.trigger_id
  join tidegate.workflow_definitions w on w.id = t.workflow_definition_id

-- name: list_waiting
-- A page of waiting deliveries in the order in which they become due. The time is not known, and
-- the ETA null, if its trigger (or source, or budget, if that is why it waits) is paused without an end, or it waits for a trial run to
-- end, for a slot, or for a budget to be corrected. It is expected later than its time if its budget is paused or closed for longer.
select {{delivery}}, d.next_attempt_at, h.expected_at,
       case when (g.paused_at is not null and g.paused_until is null) or g.breaker_state = 'half_open'
              or (d.reason = 'source_paused' and s.paused_at is not null and s.paused_until is null)
              or (d.reason = 'concurrency' and d.next_attempt_at > tidegate.now())
              or (d.reason = 'budget' and (d.budget_key is null or (b.paused_at is not null and b.paused_until is null)
                    or (b.rate_limit is null
                        and coalesce(greatest(b.paused_until, k.closed_until), '-infinity') <= tidegate.now()))) then null
            else greatest(0, extract(epoch from h.expected_at - tidegate.now()))::float8 end as eta_seconds
  from {{deliveries}}
  left join tidegate.event_scheduler_triggers g on g.trigger_id = d.trigger_id
  left join tidegate.event_scheduler_sources s on s.source = e.source
  left join tidegate.budgets b on d.reason = 'budget' and b.name = d.budget
  left join tidegate.budget_keys k on d.reason = 'budget' and k.budget = d.budget and k.key = d.budget_key and k.probe_run_id is null
 cross join lateral (select greatest(d.next_attempt_at, b.paused_until, k.closed_until) as expected_at) h
 where d.retry_state = 'scheduled'
   and ($1::uuid is null or d.trigger_id = $1)
   and ($2::text is null or w.slug = $2)
   and ($3::text is null or e.source = $3)
   and ($4::text is null or d.reason = $4)
   and ($5::timestamptz is null or (d.next_attempt_at, d.id) > ($5, $6::uuid))
 order by d.next_attempt_at, d.id
 limit $7

-- name: list_settled
-- A page of deliveries in another retry state, newest first.
select {{delivery}}, null::timestamptz as next_attempt_at, null::float8 as eta_seconds
  from {{deliveries}}
 where d.retry_state = $1
   and ($2::uuid is null or d.trigger_id = $2)
   and ($3::text is null or w.slug = $3)
   and ($4::text is null or e.source = $4)
   and ($5::text is null or d.reason = $5)
   and ($6::uuid is null or d.id < $6)
 order by d.id desc
 limit $7

-- name: list_of_trigger
-- A page of the deliveries of one trigger, newest first, whatever became of them.
select {{delivery}}, d.next_attempt_at
  from {{deliveries}}
 where d.trigger_id = $1
   and ($2::text is null or d.status = $2)
   and ($3::uuid is null or d.id < $3)
 order by d.id desc
 limit $4

-- name: list_recent
-- A page of the deliveries of all triggers, newest first.
select {{delivery}}, d.next_attempt_at
  from {{deliveries}}
 where ($1::text is null or d.status = $1)
   and ($2::uuid is null or d.id < $2)
 order by d.id desc
 limit $3

-- name: get
-- One delivery.
select {{delivery}}, d.next_attempt_at
  from {{deliveries}}
 where d.id = $1

-- name: cancel
-- Cancels deliveries that wait, those with a given reason if one is given; locked in the order in which a new plan locks
-- them. Returns what it cancelled.
with waiting as materialized (
  select id from tidegate.workflow_trigger_deliveries
   where id = any ($1::uuid[]) and retry_state = 'scheduled' and ($3::text is null or reason = $3)
   order by trigger_id, ingress_sequence for update
)
update tidegate.workflow_trigger_deliveries d
   set status = 'cancelled', retry_state = 'cancelled', next_attempt_at = null, last_error = $2,
       claim_generation = d.claim_generation + 1, updated_at = tidegate.now()
  from waiting w
 where d.id = w.id and d.retry_state = 'scheduled'
returning d.id, d.event_id, d.retry_attempts, d.trigger_id, d.concurrency_key, d.reason, d.budget, d.budget_key

-- name: cancel_of_trigger
-- Cancels every delivery of a trigger that waits, with the line of its event's story. Returns how many.
with cancelled as (
  update tidegate.workflow_trigger_deliveries d
     set status = 'cancelled', retry_state = 'cancelled', next_attempt_at = null, last_error = $2,
         claim_generation = d.claim_generation + 1, updated_at = tidegate.now()
   where d.trigger_id = $1 and d.retry_state = 'scheduled'
  returning d.event_id, d.retry_attempts
), told as (
  insert into tidegate.event_decisions (event_id, stage, decision, reason, attempt, actor, trigger_id)
  select c.event_id, 'deliver', 'cancelled', $2, c.retry_attempts, $3, $1 from cancelled c
)
select count(*) from cancelled

-- name: force
-- Makes deliveries that wait due now, in their trigger's current plan; otherwise as `cancel`.
with waiting as materialized (
  select id from tidegate.workflow_trigger_deliveries
   where id = any ($1::uuid[]) and retry_state = 'scheduled' and ($2::text is null or reason = $2)
   order by trigger_id, ingress_sequence for update
)
update tidegate.workflow_trigger_deliveries d
   set next_attempt_at = tidegate.now(), claim_generation = d.claim_generation + 1, updated_at = tidegate.now(),
       plan_version = coalesce((select g.plan_version from tidegate.event_scheduler_triggers g
                                 where g.trigger_id = d.trigger_id), d.plan_version)
  from waiting w
 where d.id = w.id and d.retry_state = 'scheduled'
returning d.id, d.event_id, d.retry_attempts, d.trigger_id, d.concurrency_key, d.reason, d.budget, d.budget_key

-- name: keep_order
-- Reassigns the times of a trigger's line, from a given arrival on, in arrival order: workers that decided batches at the same
-- time, or events that their source held, may have come late. Does nothing when more than $3 stand behind. Only rows
-- of the current plan take part: the others get new times anyway. The caller holds the trigger's lock.
with waiting as materialized (
  select d.id, d.next_attempt_at, d.ingress_sequence
    from tidegate.workflow_trigger_deliveries d
   where d.trigger_id = $1 and d.retry_state = 'scheduled' and d.ingress_sequence >= $2
     and d.reason not in ('concurrency', 'source_paused', 'budget') and d.reason in ('throttle', 'paused', 'breaker_open')
     and d.plan_version = (select g.plan_version from tidegate.event_scheduler_triggers g where g.trigger_id = $1)
   order by d.ingress_sequence limit $3::int + 1
), line as materialized (
  select w.*, row_number() over (order by w.ingress_sequence) as place,
         row_number() over (order by w.next_attempt_at, w.ingress_sequence) as turn
    from waiting w where (select count(*) from waiting) <= $3::int
)
update tidegate.workflow_trigger_deliveries d
   set next_attempt_at = slot.next_attempt_at, claim_generation = d.claim_generation + 1, updated_at = tidegate.now(),
       throttled_until = case when d.status = 'throttled' then slot.next_attempt_at end,
       retry_metadata = d.retry_metadata || jsonb_build_object('until', slot.next_attempt_at)
  from line mine join line slot on slot.turn = mine.place
 where d.id = mine.id and d.retry_state = 'scheduled' and d.next_attempt_at <> slot.next_attempt_at
