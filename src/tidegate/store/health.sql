-- name: waiting
-- Everything that waits, by kind and reason: how many, the first, how many of them are due at $1, and how many at $2; and whether
-- something holds them back on purpose, which then is the reason. One pass over each index of what waits: whether a source or a
-- trigger is held is the same for all that wait for it. Rows of kind `source` say how much waits of each of the sources $3. What was
-- published for a later time waits for that alone.
with held_sources as materialized (
  select source,
         case when paused_at is not null and (paused_until is null or paused_until > $1::timestamptz) then 'paused'
              when breaker_state = 'open' and breaker_until > $1::timestamptz then 'breaker_open' else 'rate_limit' end as holds
    from tidegate.event_scheduler_sources
   where (paused_at is not null and (paused_until is null or paused_until > $1::timestamptz))
      or (breaker_state = 'open' and breaker_until > $1::timestamptz) or throttled_until > $1::timestamptz
), held_triggers as materialized (
  select trigger_id,
         case when paused_at is not null and (paused_until is null or paused_until > $1::timestamptz) then 'paused'
              when breaker_state <> 'closed' then 'breaker_open' else 'throttle' end as holds
    from tidegate.event_scheduler_triggers
   where (paused_at is not null and (paused_until is null or paused_until > $1::timestamptz))
      or (breaker_state = 'open' and breaker_until > $1::timestamptz) or breaker_state = 'half_open'
      or closed_until > $1::timestamptz
), events as materialized (
  select source, reason, count(*) as total, min(next_attempt_at) as next_attempt_at,
         count(*) filter (where next_attempt_at <= $1::timestamptz) as due,
         count(*) filter (where next_attempt_at <= $2::timestamptz) as overdue
    from tidegate.event_ingress_retries where retry_state = 'scheduled' group by source, reason
), deliveries as materialized (
  select trigger_id, reason, case when reason = 'source_paused' then source end as source, count(*) as total,
         min(next_attempt_at) as next_attempt_at, count(*) filter (where next_attempt_at <= $1::timestamptz) as due,
         count(*) filter (where next_attempt_at <= $2::timestamptz) as overdue
    from tidegate.workflow_trigger_deliveries where retry_state = 'scheduled' group by 1, 2, 3
), steps as materialized (
  -- A wait whose time is over ends when its run resumes, which may be later: the run is not asking for it yet, or is executing.
  -- What a run has that waits for a version of its code, or for its slot, is due when the run is.
  select case when s.kind = 'sleep' then 'sleep' when s.kind = 'wait' then 'event'
              when exists (select from tidegate.budget_steps p where p.step_id = s.id) then 'budget' else 'failed' end as reason,
         case when s.kind = 'wait' and s.next_attempt_at <= $1::timestamptz
              then (select greatest(s.next_attempt_at, r.next_attempt_at) from tidegate.workflow_runs r
                     where r.id = s.workflow_run_id and r.status = 'pending')
              when s.next_attempt_at <= $1::timestamptz
              then coalesce((select greatest(s.next_attempt_at, r.next_attempt_at) from tidegate.workflow_runs r
                              where r.id = s.workflow_run_id and r.status = 'pending'
                                 and (r.version_held_at is not null or (not {{slot_lines.needs_no_slot}} and not exists (
                                     select from tidegate.budget_steps p where p.step_id = s.id and p.granted_at is null)))),
                            s.next_attempt_at)
              else s.next_attempt_at end as next_attempt_at
    from tidegate.workflow_run_steps s where s.retry_state = 'scheduled'
)
select 'events' as kind, coalesce(h.holds, g.reason, 'unknown') as reason, h.holds is not null as is_held,
       sum(g.total)::bigint as total, min(g.next_attempt_at) as next_attempt_at, sum(g.due)::bigint as due,
       sum(g.overdue)::bigint as overdue
  from events g left join held_sources h on h.source = g.source and g.reason is distinct from 'scheduled'
 group by 1, 2, 3
union all
select 'deliveries', coalesce(h.holds, g.reason, 'unknown'), h.holds is not null or s.source is not null,
       sum(g.total)::bigint, min(g.next_attempt_at), sum(g.due)::bigint, sum(g.overdue)::bigint
  from deliveries g
  left join held_triggers h on h.trigger_id = g.trigger_id
  left join held_sources s on s.source = g.source
 group by 1, 2, 3
union all
select 'steps', reason, false, count(*), min(next_attempt_at),
       count(*) filter (where next_attempt_at <= $1::timestamptz), count(*) filter (where next_attempt_at <= $2::timestamptz)
  from steps group by 1, 2, 3
union all
select 'source', source, false, sum(total)::bigint, min(next_attempt_at), sum(due)::bigint, sum(overdue)::bigint
  from events where source = any ($3::text[]) and reason is distinct from 'scheduled' group by source

-- name: depths
-- What else the queues hold at $1: undecided events and the oldest of them, runs that are due or wait for a time and the
-- earliest of them whose code a worker has that was seen within $3 ms (where there is none: of all), and what is claimed. Of a very long inbox only the first $2 are counted; for the rest the numbers that were
-- given out since then stand, also those of events that were sent twice.
with first as materialized (
  select count(*) as counted, max(ingress_sequence) as last
    from (select ingress_sequence from tidegate.event_inbox order by ingress_sequence limit $2) i
), served as materialized (
  select array_agg(distinct d.id) as ids from tidegate.workers w, unnest(w.definitions) as d (id)
   where w.seen_at > tidegate.now() - $3::bigint * interval '1 ms'
), runs as (
  select count(*) filter (where next_attempt_at <= $1::timestamptz) as due, count(next_attempt_at) as total,
         min(next_attempt_at) filter (where served.ids is null or workflow_definition_id = any (served.ids)) as next_attempt_at
    from served left join tidegate.workflow_runs on status = 'pending'
)
select first.counted + case when first.counted < $2 then 0
                            else (select max(ingress_sequence) from tidegate.event_inbox) - first.last end as inbox,
       (select e.received_at from tidegate.event_inbox i join tidegate.workflow_events e on e.id = i.event_id
         order by i.ingress_sequence limit 1) as inbox_since,
       runs.due as runs_due, runs.total as runs_total, runs.next_attempt_at as runs_since,
       (select count(*) from tidegate.workflow_runs where status = 'running') as active_runs
  from first, runs

-- name: limits
-- Sources that have a limit, the last changed first, $1 of them.
select source, rate_limit as limit, interval_ms, coalesce(pause_ms, 0) as pause_ms, limit_set_by as set_by, throttled_until, updated_at
  from tidegate.event_scheduler_sources where rate_limit is not null
 order by updated_at desc, source limit $1

-- name: paused_sources
-- Sources whose pause is not over at $1, the longest paused first, $2 of them.
select source, paused_until as until, pause_reason as reason, paused_by, paused_at as since
  from tidegate.event_scheduler_sources
 where paused_at is not null and (paused_until is null or paused_until > $1::timestamptz)
 order by paused_at, source limit $2

-- name: source_breakers
-- Sources whose breaker is not closed, $1 of them.
select source, breaker_state as state, breaker_until as until, breaker_reason as reason,
       breaker_at as since
  from tidegate.event_scheduler_sources where breaker_state <> 'closed'
 order by breaker_at, source limit $1

-- name: counts
-- How many there are of what the snapshot lists, at $1.
select (select count(*) from tidegate.event_scheduler_source_metrics) as sources,
       (select count(*) from tidegate.event_scheduler_trigger_metrics) as triggers,
       s.rate_limits, s.paused_sources, s.source_breakers, t.paused_triggers, t.trigger_breakers
  from (select count(*) filter (where rate_limit is not null) as rate_limits,
               count(*) filter (where paused_at is not null and (paused_until is null or paused_until > $1::timestamptz))
                 as paused_sources,
               count(*) filter (where breaker_state <> 'closed') as source_breakers
          from tidegate.event_scheduler_sources) s,
       (select count(*) filter (where g.paused_at is not null and (g.paused_until is null or g.paused_until > $1::timestamptz))
                 as paused_triggers,
               count(*) filter (where g.breaker_state <> 'closed') as trigger_breakers
          from tidegate.event_scheduler_triggers g
          join tidegate.workflow_event_triggers e on e.id = g.trigger_id
         where e.deleted_at is null) t

-- name: source_metrics
-- The totals of sources, the last seen first, $1 of them.
select source, total, passed, throttled, dropped, failures, total_lag_ms, last_lag_ms, max_lag_ms, last_event_at, updated_at
  from tidegate.event_scheduler_source_metrics order by updated_at desc, source limit $1

-- name: dead_letters
-- Dead letters that are not replayed, by kind: how many, how many in the last day before $1, how many after $2, and the first of
-- these.
select kind, count(*) as total, count(*) filter (where created_at > $1::timestamptz - interval '24 hours') as last_24h,
       count(*) filter (where created_at > $2::timestamptz) as recent,
       min(created_at) filter (where created_at > $2::timestamptz) as recent_since
  from tidegate.dead_letters where replayed_at is null group by kind order by kind

-- name: paused_triggers
-- Triggers whose pause is not over, the longest paused first, $1 of them.
select t.trigger_id, w.slug as workflow, e.name, t.paused_until as until, t.pause_reason as reason, t.paused_by,
       t.paused_at as since
  from tidegate.event_scheduler_triggers t
  join tidegate.workflow_event_triggers e on e.id = t.trigger_id
  join tidegate.workflow_definitions w on w.id = e.workflow_definition_id
 where t.paused_at is not null and (t.paused_until is null or t.paused_until > tidegate.now())
   and e.deleted_at is null
 order by t.paused_at, t.trigger_id limit $1

-- name: trigger_breakers
-- Triggers whose breaker is not closed, $1 of them.
select t.trigger_id, w.slug as workflow, e.name, t.breaker_state as state, t.breaker_until as until, t.breaker_reason as reason,
       t.probe_run_id, t.breaker_at as since
  from tidegate.event_scheduler_triggers t
  join tidegate.workflow_event_triggers e on e.id = t.trigger_id
  join tidegate.workflow_definitions w on w.id = e.workflow_definition_id
 where t.breaker_state <> 'closed' and e.deleted_at is null
 order by t.breaker_at, t.trigger_id limit $1

-- name: trigger_metrics
-- The totals of triggers, the last changed first, $1 of them.
select m.trigger_id, w.slug as workflow, m.filtered, m.matched, m.launched, m.throttled, m.skipped, m.failed, m.paused,
       m.collected, m.last_status, m.last_error, m.updated_at
  from tidegate.event_scheduler_trigger_metrics m
  join tidegate.workflow_event_triggers t on t.id = m.trigger_id
  join tidegate.workflow_definitions w on w.id = t.workflow_definition_id
 order by m.updated_at desc, m.trigger_id limit $1

-- name: last_processed
-- When the gate last decided an event.
select max(last_event_at) from tidegate.event_scheduler_source_metrics

-- name: workers
-- How many workers were seen within $1 ms, and when one of them last reconciled.
select count(*) as alive, max(reconciled_at) as reconciled_at
  from tidegate.workers where seen_at > tidegate.now() - $1::bigint * interval '1 ms'

-- name: expired_claims
-- Claims on runs whose lease has expired and that have not been released: how many, and since when. No row if there are none.
select 'runs' as kind, count(*) as total, min(claim_expires_at) as since
  from tidegate.workflow_runs
 where status = 'running' and claim_expires_at <= tidegate.now()
having count(*) > 0

-- name: totals
-- How many events were decided and how many runs launched, over the whole cluster.
select (select coalesce(sum(total), 0)::bigint from tidegate.event_scheduler_source_metrics) as decided,
       (select coalesce(sum(launched), 0)::bigint from tidegate.event_scheduler_trigger_metrics) as launched
