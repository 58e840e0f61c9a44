-- name: queues
-- What each queue holds: due now, due later, claimed; and how long the oldest due one has been due.
with clock as materialized (
  select headgate.now() as now
), inbox as (
  select count(*) as ready,
         (select e.received_at from headgate.event_inbox i join headgate.workflow_events e on e.id = i.event_id
           order by i.ingress_sequence limit 1) as oldest
    from headgate.event_inbox
), held as (
  select count(*) filter (where next_attempt_at <= now) as ready, count(*) filter (where next_attempt_at > now) as later,
         min(next_attempt_at) filter (where next_attempt_at <= now) as oldest
    from headgate.event_ingress_retries, clock where retry_state = 'scheduled'
), deliveries as (
  select count(*) filter (where next_attempt_at <= now) as ready, count(*) filter (where next_attempt_at > now) as later,
         min(next_attempt_at) filter (where next_attempt_at <= now) as oldest
    from headgate.workflow_trigger_deliveries, clock where retry_state = 'scheduled'
), runs as (
  select count(*) filter (where next_attempt_at <= now) as ready, count(*) filter (where next_attempt_at > now) as later,
         min(next_attempt_at) filter (where next_attempt_at <= now) as oldest
    from headgate.workflow_runs, clock where status = 'pending'
), depths as (
  select 'ingress' as queue, inbox.ready + held.ready as ready, held.later as delayed,
         (select count(*) from headgate.event_ingress_retries where retry_state = 'running') as active,
         least(inbox.oldest, held.oldest) as oldest
    from inbox, held
  union all
  select 'triggers', ready, later,
         (select count(*) from headgate.workflow_trigger_deliveries where retry_state = 'running'), oldest
    from deliveries
  union all
  select 'runs', ready, later, (select count(*) from headgate.workflow_runs where status = 'running'), oldest
    from runs
)
select queue, ready, delayed, active,
       greatest(0, coalesce(extract(epoch from now - oldest), 0))::float8 as oldest_due_age_seconds
  from depths, clock

-- name: retries
-- What waits, by kind and reason: how many, how many of them for longer than they should ($1 ms), and the next.
with clock as materialized (
  select headgate.now() as now
), waiting as (
  select 'events' as kind, reason, next_attempt_at
    from headgate.event_ingress_retries where retry_state = 'scheduled'
  union all
  select 'deliveries', coalesce(reason, retry_metadata ->> 'reason'), next_attempt_at
    from headgate.workflow_trigger_deliveries where retry_state = 'scheduled'
  union all
  select 'steps', retry_metadata ->> 'reason', next_attempt_at
    from headgate.workflow_run_steps where retry_state = 'scheduled'
)
select kind, coalesce(reason, 'unknown') as reason, count(*) as total,
       count(*) filter (where next_attempt_at <= now - $1::bigint * interval '1 ms') as overdue,
       min(next_attempt_at) as next_attempt_at
  from waiting, clock group by 1, 2 order by 1, 2

-- name: dead_letters
-- What was given up and not replayed, by kind, and how much of it in the last day.
select kind, count(*) as total, count(*) filter (where created_at > headgate.now() - interval '24 hours') as last_24h
  from headgate.dead_letters where replayed_at is null group by kind order by kind

-- name: paused_triggers
-- Triggers whose pause is not over.
select t.trigger_id, w.slug as workflow, t.paused_until as until, t.pause_reason as reason, t.paused_by,
       t.paused_at as since
  from headgate.event_scheduler_triggers t
  join headgate.workflow_event_triggers e on e.id = t.trigger_id
  join headgate.workflow_definitions w on w.id = e.workflow_definition_id
 where t.paused_at is not null and (t.paused_until is null or t.paused_until > headgate.now())
   and e.deleted_at is null
 order by t.paused_at, t.trigger_id

-- name: open_breakers
-- Triggers whose breaker is not closed.
select t.trigger_id, w.slug as workflow, e.name, t.breaker_state, t.breaker_until as until, t.breaker_reason as reason,
       t.probe_run_id
  from headgate.event_scheduler_triggers t
  join headgate.workflow_event_triggers e on e.id = t.trigger_id
  join headgate.workflow_definitions w on w.id = e.workflow_definition_id
 where t.breaker_state <> 'closed' and e.deleted_at is null
 order by t.trigger_id

-- name: trigger_metrics
-- The totals of every trigger that has any.
select m.trigger_id, w.slug as workflow, m.filtered, m.matched, m.launched, m.throttled, m.skipped, m.failed, m.paused,
       m.last_status, m.last_error, m.updated_at
  from headgate.event_scheduler_trigger_metrics m
  join headgate.workflow_event_triggers t on t.id = m.trigger_id
  join headgate.workflow_definitions w on w.id = t.workflow_definition_id
 order by w.slug, m.trigger_id

-- name: overview
-- How many sources and triggers are paused, and when the gate last decided an event.
select (select count(*) from headgate.event_scheduler_sources
         where paused_at is not null and (paused_until is null or paused_until > headgate.now())) as paused_sources,
       (select count(*) from headgate.event_scheduler_triggers t
          join headgate.workflow_event_triggers e on e.id = t.trigger_id and e.deleted_at is null
         where t.paused_at is not null and (t.paused_until is null or t.paused_until > headgate.now()))
         as paused_triggers,
       (select max(last_event_at) from headgate.event_scheduler_source_metrics) as last_processed_event_at
