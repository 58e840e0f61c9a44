-- name: runs
-- What keeps runs ($1): who holds them and until when, whether their trigger or key is closed, how many due runs of their
-- workflow come before them (up to $2), and whether they have given their slots back.
select r.id, r.trigger_id, t.name as trigger, r.concurrency_key, r.claimed_by, r.claim_expires_at, r.updated_at,
       r.deadline_at, r.retry_attempts, greatest(g.closed_until, h.until) as closed_until,
       case when h.until > coalesce(g.closed_until, '-infinity') then h.reason else g.closed_reason end as closed_reason,
       case when r.status = 'pending' and r.next_attempt_at <= tidegate.now() then
         (select count(*) from (select from tidegate.workflow_runs a
                                 where a.workflow_definition_id = r.workflow_definition_id and a.status = 'pending'
                                   and a.next_attempt_at <= tidegate.now()
                                   and (a.next_attempt_at, a.id) < (r.next_attempt_at, r.id) limit $2) earlier)
         else 0 end as ahead,
       coalesce((select max(p.priority) from tidegate.workflow_event_triggers p
                  where p.workflow_definition_id = r.workflow_definition_id and p.deleted_at is null), 1) as priority,
       r.status = 'pending' and not {{slot_lines.needs_no_slot}} as has_no_slot
  from tidegate.workflow_runs r
  left join tidegate.workflow_event_triggers t on t.id = r.trigger_id
  left join tidegate.event_scheduler_triggers g on g.trigger_id = r.trigger_id
  left join tidegate.trigger_key_holds h on h.trigger_id = r.trigger_id and h.concurrency_key = coalesce(r.concurrency_key, r.slot_key)
 where r.id = any ($1::uuid[])

-- name: deliveries
-- What keeps waiting deliveries ($1): their place in line, the limits of their trigger, and when they leave (`max_wait`).
select d.id, d.stale_at, t.max_concurrency, t.throttle_count, t.throttle_window_ms, d.concurrency_key, g.paused_at, g.paused_until,
       g.pause_reason, g.paused_by, g.breaker_state, g.breaker_until, g.breaker_reason, g.probe_run_id,
       s.paused_at as source_paused_at, s.paused_until as source_paused_until,
       case when d.reason = 'concurrency' then
         (select count(*) from (select from tidegate.workflow_trigger_deliveries a
                                 where a.trigger_id = d.trigger_id and a.retry_state = 'scheduled' and a.reason = 'concurrency'
                                   and a.concurrency_key is not distinct from d.concurrency_key
                                   and a.ingress_sequence < d.ingress_sequence limit 10000) earlier)
         else (select count(*) from (select from tidegate.workflow_trigger_deliveries a
                                 where a.trigger_id = d.trigger_id and a.retry_state = 'scheduled'
                                   and a.reason not in ('concurrency', 'source_paused', 'budget')
                                   and (a.next_attempt_at, a.ingress_sequence) < (d.next_attempt_at, d.ingress_sequence)
                                 limit 10000) earlier) end as ahead
  from tidegate.workflow_trigger_deliveries d
  join tidegate.workflow_event_triggers t on t.id = d.trigger_id
  left join tidegate.event_scheduler_triggers g on g.trigger_id = d.trigger_id
  left join tidegate.event_scheduler_sources s on s.source = d.source
 where d.id = any ($1::uuid[]) and d.retry_state in ('scheduled', 'running')

-- fragment: holder
-- A run that holds a slot: until when it sleeps or waits, or until when its worker's lease lasts.
r.id, w.slug as workflow, r.status, r.created_at,
       case when r.status = 'pending' and r.next_attempt_at > tidegate.now() then r.next_attempt_at end as resumes_at,
       r.claim_expires_at as lease_until, count(*) over () as total,
       (select e.source from tidegate.workflow_events e where e.id = r.event_id) as source

-- name: slot_holders
-- The runs that hold the slots that a delivery waits for, the oldest first, and how many they are in all.
select {{holder}}
  from tidegate.workflow_trigger_deliveries d
  join tidegate.workflow_runs r on r.trigger_id = d.trigger_id and r.concurrency_key = d.concurrency_key
   and r.status in ('pending', 'running')
  join tidegate.workflow_definitions w on w.id = r.workflow_definition_id
 where d.id = $1 and d.retry_state = 'scheduled' and d.reason = 'concurrency'
 order by r.created_at, r.id limit $2

-- name: trigger_slot_holders
-- The same for a key of a trigger.
select {{holder}}
  from tidegate.workflow_runs r join tidegate.workflow_definitions w on w.id = r.workflow_definition_id
 where r.trigger_id = $1 and r.concurrency_key = $2 and r.status in ('pending', 'running')
 order by r.created_at, r.id limit $3

-- name: slot_waits
-- What runs ($1) wait for that are due and have no slot: since when, in which line, how many slots there are, and how many runs wait
-- longer.
select q.run_id, q.since, q.trigger_id, q.budget, q.key, coalesce(b.concurrency, t.max_concurrency) as most,
       (select count(*)
          from (select from tidegate.slot_waits a
                 where (a.trigger_id = q.trigger_id or a.budget = q.budget) and a.key = q.key and a.since < q.since limit 10000) a) as ahead
  from tidegate.slot_waits q
  join tidegate.workflow_runs r on {{slot_lines.is_waiting}}
  left join tidegate.workflow_event_triggers t on t.id = q.trigger_id
  left join tidegate.budgets b on b.name = q.budget
 where q.run_id = any ($1::uuid[])

-- name: children
-- How many children of a step ($1) have ended, up to $2, and the first that was started and has not.
select (select count(*) from (select from tidegate.run_children c
                               where c.step_id = $1 and c.status in ('succeeded', 'failed', 'cancelled') limit $2) e) as ended,
       f.workflow, f.position, f.event_id, f.child_run_id as run_id
  from (select) one
  left join lateral (select * from tidegate.run_children c where c.step_id = $1 and c.status = 'started'
                      order by c.position limit 1) f on true

-- name: event
-- What keeps an event: the time, how many undecided ones of its source and priority come before it, and, if its source holds it, its place in the source's line.
select tidegate.now() as now,
       exists (select from tidegate.event_inbox i where i.ingress_sequence = e.ingress_sequence) as is_undecided,
       (select count(*) from (select from tidegate.event_inbox i
                               where i.source = e.source and i.priority = coalesce(e.priority, 1)
                                 and i.ingress_sequence < e.ingress_sequence limit 10000) earlier) as undecided_ahead,
       coalesce(e.priority, 1) as priority, coalesce(s.weight, 1) as weight,
       coalesce((select count(*) from (select from tidegate.event_ingress_retries a
                                        where a.source = r.source and a.retry_state = 'scheduled'
                                          and a.reason is distinct from 'scheduled'
                                          and (a.next_attempt_at, a.ingress_sequence) < (r.next_attempt_at, r.ingress_sequence)
                                        limit 10000) earlier), 0) as held_ahead,
       s.paused_at as source_paused_at, s.paused_until as source_paused_until,
       p.replay_at, p.replay_by
  from tidegate.workflow_events e
  left join tidegate.event_ingress_retries r on r.event_id = e.id and r.retry_state = 'scheduled'
  left join tidegate.event_scheduler_sources s on s.source = e.source
  left join tidegate.event_replays p on p.event_id = e.id
 where e.id = $1

-- name: letters
-- The dead letters of an event, its deliveries, runs and steps, oldest first, with the run of each step.
select l.id, l.kind, l.subject_id, s.workflow_run_id, l.reason, l.created_at, l.replay_at, l.replay_by, l.replay_error,
       l.replayed_at, l.replayed_by
  from tidegate.dead_letters l
  left join tidegate.workflow_run_steps s on l.kind = 'step' and s.id = l.subject_id
 where l.event_id = $1 or l.subject_id = any ($2::uuid[])
 order by l.id

-- name: now
-- The time by the clock that schedules.
select tidegate.now()

-- name: known_triggers
-- Triggers in all states, deleted ones too, the last changed first.
select {{triggers.trigger}}, t.deleted_at, w.parameters as parameter_names
  from {{triggers.triggers}}
 order by t.deleted_at desc nulls first, t.updated_at desc, t.id limit $1

-- name: version_at
-- A trigger's definition as it was at a time; none if it did not exist yet.
select v.version, v.definition, v.changed_by, v.changed_at
  from tidegate.workflow_event_trigger_versions v
 where v.trigger_id = $1 and v.changed_at <= $2 order by v.version desc limit 1

-- name: delivery
-- The event of a delivery.
select d.event_id from tidegate.workflow_trigger_deliveries d where d.id = $1
