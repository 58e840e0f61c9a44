-- name: queues
-- What each queue holds: due now, due later, claimed; and how long the oldest has been due of those that may go on. Who is
-- held on purpose (a pause, an open breaker, the pause after an exceeded limit) is not due, whatever its slot says.
with clock as materialized (
  select headgate.now() as now
), held_sources as materialized (
  select source from headgate.event_scheduler_sources, clock
   where (paused_at is not null and (paused_until is null or paused_until > now))
      or (breaker_state = 'open' and breaker_until > now) or throttled_until > now
), held_triggers as materialized (
  select trigger_id from headgate.event_scheduler_triggers, clock
   where (paused_at is not null and (paused_until is null or paused_until > now))
      or (breaker_state = 'open' and breaker_until > now) or breaker_state = 'half_open' or closed_until > now
), inbox as (
  select count(*) as ready,
         (select e.received_at from headgate.event_inbox i join headgate.workflow_events e on e.id = i.event_id
           order by i.ingress_sequence limit 1) as oldest
    from headgate.event_inbox
), held as (
  select count(*) filter (where is_due) as ready, count(*) filter (where not is_due) as later,
         min(next_attempt_at) filter (where is_due) as oldest
    from (select next_attempt_at, next_attempt_at <= now and source not in (select source from held_sources) as is_due
            from headgate.event_ingress_retries, clock where retry_state = 'scheduled') waiting
), deliveries as (
  select count(*) filter (where is_due) as ready, count(*) filter (where not is_due) as later,
         min(next_attempt_at) filter (where is_due) as oldest
    from (select next_attempt_at,
                 next_attempt_at <= now and trigger_id not in (select trigger_id from held_triggers)
                   and (reason is distinct from 'source_paused' or source not in (select source from held_sources)) as is_due
            from headgate.workflow_trigger_deliveries, clock where retry_state = 'scheduled') waiting
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
-- What waits, by kind and reason: how many, how many of them for longer than they should ($1 ms) and since when, and the
-- next. Who is held on purpose is not late: the reason is the pause or breaker that holds it now.
with clock as materialized (
  select headgate.now() as now
), held_sources as materialized (
  select source,
         case when paused_at is not null and (paused_until is null or paused_until > now) then 'paused'
              when breaker_state = 'open' and breaker_until > now then 'breaker_open' else 'rate_limit' end as holds
    from headgate.event_scheduler_sources, clock
   where (paused_at is not null and (paused_until is null or paused_until > now))
      or (breaker_state = 'open' and breaker_until > now) or throttled_until > now
), held_triggers as materialized (
  select trigger_id,
         case when paused_at is not null and (paused_until is null or paused_until > now) then 'paused'
              when breaker_state <> 'closed' then 'breaker_open' else 'throttle' end as holds
    from headgate.event_scheduler_triggers, clock
   where (paused_at is not null and (paused_until is null or paused_until > now))
      or (breaker_state = 'open' and breaker_until > now) or breaker_state = 'half_open' or closed_until > now
), waiting as (
  select 'events' as kind, coalesce(h.holds, r.reason) as reason, r.next_attempt_at, h.source is not null as is_held
    from headgate.event_ingress_retries r left join held_sources h on h.source = r.source
   where r.retry_state = 'scheduled'
  union all
  select 'deliveries', coalesce(h.holds, d.reason, d.retry_metadata ->> 'reason'), d.next_attempt_at,
         h.trigger_id is not null
           or coalesce(d.reason = 'source_paused' and d.source in (select source from held_sources), false)
    from headgate.workflow_trigger_deliveries d left join held_triggers h on h.trigger_id = d.trigger_id
   where d.retry_state = 'scheduled'
  union all
  select 'steps', retry_metadata ->> 'reason', next_attempt_at, false
    from headgate.workflow_run_steps where retry_state = 'scheduled'
), judged as (
  select kind, reason, next_attempt_at, not is_held and next_attempt_at <= now - $1::bigint * interval '1 ms' as is_overdue
    from waiting, clock
)
select kind, coalesce(reason, 'unknown') as reason, count(*) as total, count(*) filter (where is_overdue) as overdue,
       min(next_attempt_at) filter (where is_overdue) as overdue_since, min(next_attempt_at) as next_attempt_at
  from judged group by 1, 2 order by 1, 2

-- name: dead_letters
-- What was given up and not replayed, by kind, how much of it in the last day, and how much of late ($1 ms) since when.
select kind, count(*) as total, count(*) filter (where created_at > headgate.now() - interval '24 hours') as last_24h,
       count(*) filter (where created_at > headgate.now() - $1::bigint * interval '1 ms') as recent,
       min(created_at) filter (where created_at > headgate.now() - $1::bigint * interval '1 ms') as recent_since
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
       t.probe_run_id, t.failures[cardinality(t.failures)] as since
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

-- name: source_breakers
-- Sources whose breaker is not closed, and when the last of the failures that opened it was.
select source, failures[cardinality(failures)] as since
  from headgate.event_scheduler_sources where breaker_state <> 'closed' order by source

-- name: workers
-- How many workers were seen within $1 ms, and when the last of all was.
select count(*) filter (where seen_at > headgate.now() - $1::bigint * interval '1 ms') as alive, max(seen_at) as seen_at
  from headgate.workers

-- name: expired_claims
-- Claims whose lease is over and that nobody has released, by kind, and since when.
with clock as materialized (
  select headgate.now() as now
), expired as (
  select 'runs' as kind, claim_expires_at from headgate.workflow_runs, clock
   where status = 'running' and claim_expires_at <= now
  union all
  select 'deliveries', claim_expires_at from headgate.workflow_trigger_deliveries, clock
   where retry_state = 'running' and claim_expires_at <= now
  union all
  select 'events', claim_expires_at from headgate.event_ingress_retries, clock
   where retry_state = 'running' and claim_expires_at <= now
  union all
  select 'steps', claim_expires_at from headgate.workflow_run_steps, clock
   where retry_state = 'running' and claim_expires_at <= now
)
select kind, count(*) as total, min(claim_expires_at) as since from expired group by kind order by kind

-- name: totals
-- Running totals over the whole cluster. What was received is what was decided and what is still in the inbox; what has
-- ended is what was launched and is not unfinished, so that no finished run has to be read.
select decided + (select count(*) from headgate.event_inbox) as received, decided, launched,
       greatest(0, launched - (select count(*) from headgate.workflow_runs where status = 'pending')
                            - (select count(*) from headgate.workflow_runs where status = 'running')) as ended
  from (select (select coalesce(sum(total), 0)::bigint from headgate.event_scheduler_source_metrics) as decided,
               (select coalesce(sum(launched), 0)::bigint from headgate.event_scheduler_trigger_metrics) as launched) t
