-- name: ensure
-- A row for each source that has none. Returns those created here.
insert into tidegate.event_scheduler_sources (source, updated_by)
select s, 'default' from unnest($1::text[]) as s order by s
on conflict (source) do nothing
returning source

-- name: lock
-- The state of sources, locked in a fixed order until the commit; at least one row, also when none of them has any. With it the
-- time, the version of the registry, whether any run waits for an event, and the limit of sources that have none of their own: the caller shares the locks under which
-- these change (`locks.share`). While there is such a limit and one of the sources has no row, none is locked: rows are created before
-- any is locked (`ensure`), since created in between they would be locked out of order.
with fallback as materialized (
  select f.rate_limit, f.interval_ms, f.pause_ms from tidegate.event_scheduler_sources f
   where f.source = '*' and f.rate_limit is not null
), missing as materialized (
  select from unnest($1::text[]) as n (source), fallback
   where n.source <> '*' and not exists (select from tidegate.event_scheduler_sources o where o.source = n.source)
), locked as materialized (
  select s.source, s.rate_limit, s.interval_ms, s.pause_ms, s.ring, s.ring_at, s.ring_width_us, s.spent_at, s.drain_at,
         s.throttled_until, s.paused_at, s.paused_until, s.pause_reason, s.paused_by, s.breaker_state, s.breaker_until,
         s.breaker_reason, s.breaker_at, s.failed_trials, s.outcomes, s.breaker,
         s.plan_version, s.is_replanning, s.refused_at
    from tidegate.event_scheduler_sources s
   where s.source = any ($1::text[]) and s.source <> '*' and not exists (select from missing)
   order by s.source
     for update of s
)
select tidegate.now() as now, (select version from tidegate.registry_version) as registry_version,
       exists (select from tidegate.event_waits) as has_waits, d.rate_limit as default_rate_limit, d.interval_ms as default_interval_ms, d.pause_ms as default_pause_ms, l.*
  from (values (1)) as always
  left join fallback d on true
  left join locked l on true

-- name: backlogs
-- The time, and the last event in line of each of the sources, if any waits. A statement of its own, after the locks: the one that
-- waited for them still sees the tables as they were before it waited.
select s.source, w.ingress_sequence, tidegate.now() as now
  from unnest($1::text[]) as s (source)
  left join lateral (select r.ingress_sequence from tidegate.event_ingress_retries r
                      where r.source = s.source and r.retry_state = 'scheduled' and r.reason is distinct from 'scheduled'
                      order by r.ingress_sequence desc limit 1) w on true

-- name: peek
-- The state of one source, as `lock` returns it but without a lock: nothing may be decided by it. One row, also when it has none.
with fallback as materialized (
  select f.rate_limit, f.interval_ms, f.pause_ms from tidegate.event_scheduler_sources f
   where f.source = '*' and f.rate_limit is not null
)
select tidegate.now() as now, d.rate_limit as default_rate_limit, d.interval_ms as default_interval_ms, d.pause_ms as default_pause_ms,
       $1::text as source, s.rate_limit, s.interval_ms, s.pause_ms, s.ring, coalesce(s.ring_at, 0) as ring_at,
       coalesce(s.ring_width_us, 0) as ring_width_us, s.spent_at, s.drain_at, s.throttled_until, s.paused_at, s.paused_until,
       s.pause_reason, s.paused_by, coalesce(s.breaker_state, 'closed') as breaker_state, s.breaker_until, s.breaker_reason, s.breaker_at,
       coalesce(s.failed_trials, 0) as failed_trials, s.outcomes, s.breaker, coalesce(s.plan_version, 0) as plan_version,
       coalesce(s.is_replanning, false) as is_replanning, s.refused_at,
       (select count(*) from tidegate.event_ingress_retries r
         where r.source = $1 and r.retry_state = 'scheduled' and r.reason is distinct from 'scheduled') as waiting
  from (values (1)) as always
  left join fallback d on true
  left join tidegate.event_scheduler_sources s on s.source = $1

-- name: paused
-- Those of the sources that an operator has paused, and until when. The caller holds their shared locks (`locks.share`).
select s.source, s.paused_until, s.pause_reason, s.paused_by from tidegate.event_scheduler_sources s
 where s.source = any ($1::text[]) and s.paused_at is not null and (s.paused_until is null or s.paused_until > tidegate.now())

-- name: save
-- Writes back what a batch changed in the sources it holds.
update tidegate.event_scheduler_sources s
   set ring = u.ring::bigint[], ring_at = u.ring_at, ring_width_us = u.ring_width_us, drain_at = u.drain_at,
       throttled_until = u.throttled_until, breaker_state = u.breaker_state, breaker_until = u.breaker_until, breaker_reason = u.breaker_reason,
       breaker_at = u.breaker_at, failed_trials = u.failed_trials, outcomes = u.outcomes::jsonb, spent_at = u.spent_at, updated_at = tidegate.now()
  from unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::timestamptz[], $6::timestamptz[], $7::text[],
              $8::timestamptz[], $9::text[], $10::text[], $11::timestamptz[], $12::timestamptz[], $13::bigint[])
    as u (source, ring, ring_at, ring_width_us, drain_at, throttled_until, breaker_state, breaker_until, breaker_reason, outcomes,
          spent_at, breaker_at, failed_trials)
 where s.source = u.source

-- name: set_plan
-- Ends a plan, or begins a new one: every waiting event of the source gets a new slot. $5 is when due events were
-- refused, if that is why: those due by then have used an attempt.
update tidegate.event_scheduler_sources
   set plan_version = plan_version + $2::bigint, is_replanning = $3, drain_at = $4, refused_at = $5,
       updated_at = tidegate.now()
 where source = $1

-- name: replan
-- A new plan for a source, or (`*`) for every source, if any of its events wait.
update tidegate.event_scheduler_sources s
   set plan_version = s.plan_version + 1, is_replanning = true, drain_at = null, refused_at = null,
       updated_at = tidegate.now()
 where (s.source = $1 or $1 = '*')
   and exists (select 1 from tidegate.event_ingress_retries r
                where r.source = s.source and r.retry_state = 'scheduled' and r.reason is distinct from 'scheduled')

-- name: end_throttle
-- Ends the pause that followed an exceeded limit, of a source or (`*`) of every source without a limit of its own.
update tidegate.event_scheduler_sources s
   set throttled_until = null, updated_at = tidegate.now()
 where s.throttled_until is not null and (s.source = $1 or ($1 = '*' and s.rate_limit is null))

-- name: list_replanning
-- Sources whose waiting events are to get new slots.
select source from tidegate.event_scheduler_sources where is_replanning order by source

-- name: list
-- A page of the sources that have a limit, a pause, a breaker or waiting events, by name, after a given one ($2); or (not null)
-- one of them.
select s.source, s.rate_limit, s.interval_ms, s.pause_ms, s.limit_set_by, s.paused_at, s.paused_until, s.pause_reason,
       s.paused_by, s.breaker, s.breaker_set_by, s.breaker_state, s.breaker_until, s.breaker_reason, s.throttled_until, s.version, s.updated_by,
       s.created_at, s.updated_at, s.weight, s.max_waiting, s.when_full, w.waiting, w.next_attempt_at,
       case when s.max_waiting is null then 0 else (select count(*) from tidegate.event_inbox i where i.source = s.source) end as undecided
  from tidegate.event_scheduler_sources s,
       lateral (select count(*) as waiting, min(next_attempt_at) as next_attempt_at
                  from tidegate.event_ingress_retries r
                 where r.source = s.source and r.retry_state = 'scheduled' and r.reason is distinct from 'scheduled') w
 where ($1::text is null or s.source = $1) and ($2::text is null or s.source > $2)
 order by s.source
 limit $3

-- name: seed_limit
-- A limit from the settings: created, or changed unless an operator set it.
insert into tidegate.event_scheduler_sources as s
  (source, rate_limit, interval_ms, pause_ms, limit_set_by, updated_by)
values ($1, $2, $3, $4, 'settings', 'settings')
on conflict (source) do update
   set rate_limit = excluded.rate_limit, interval_ms = excluded.interval_ms, pause_ms = excluded.pause_ms,
       limit_set_by = 'settings', version = s.version + 1, updated_by = 'settings',
       updated_at = tidegate.now()
 where s.limit_set_by is distinct from 'operator'
   and (s.rate_limit, s.interval_ms, s.pause_ms)
       is distinct from (excluded.rate_limit, excluded.interval_ms, excluded.pause_ms)
returning source

-- name: unseeded
-- Those of the limits from the settings that `seed_limit` would create or change.
select u.source
  from unnest($1::text[], $2::bigint[], $3::bigint[], $4::bigint[]) as u (source, rate_limit, interval_ms, pause_ms)
  left join tidegate.event_scheduler_sources s on s.source = u.source
 where s.source is null
    or (s.limit_set_by is distinct from 'operator'
        and (s.rate_limit, s.interval_ms, s.pause_ms) is distinct from (u.rate_limit, u.interval_ms, u.pause_ms))

-- name: set_limit
-- An operator's limit, or none (nulls).
insert into tidegate.event_scheduler_sources as s
  (source, rate_limit, interval_ms, pause_ms, limit_set_by, updated_by)
values ($1, $2, $3, $4, 'operator', $5)
on conflict (source) do update
   set rate_limit = excluded.rate_limit, interval_ms = excluded.interval_ms, pause_ms = excluded.pause_ms,
       limit_set_by = 'operator', version = s.version + 1, updated_by = excluded.updated_by,
       updated_at = tidegate.now()

-- name: seed_breaker
-- A breaker's policy from the settings: created, or changed unless an operator set it.
insert into tidegate.event_scheduler_sources as s (source, breaker, breaker_set_by, updated_by)
values ($1, $2::text::jsonb, 'settings', 'settings')
on conflict (source) do update
   set breaker = excluded.breaker, breaker_set_by = 'settings', version = s.version + 1, updated_by = 'settings',
       updated_at = tidegate.now()
 where s.breaker_set_by is distinct from 'operator' and s.breaker is distinct from excluded.breaker
returning source

-- name: set_breaker
-- An operator's policy for the breaker of a source, or none (null): then the settings' holds.
insert into tidegate.event_scheduler_sources as s (source, breaker, breaker_set_by, updated_by)
values ($1, $2::text::jsonb, 'operator', $3)
on conflict (source) do update
   set breaker = excluded.breaker, breaker_set_by = 'operator', version = s.version + 1, updated_by = excluded.updated_by,
       updated_at = tidegate.now()

-- name: set_weight
-- The weight of a source: its share of a batch while several sources wait.
insert into tidegate.event_scheduler_sources as s (source, weight, updated_by)
values ($1, $2, $3)
on conflict (source) do update
   set weight = excluded.weight, version = s.version + 1, updated_by = excluded.updated_by, updated_at = tidegate.now()

-- name: recent_successes
-- How many of a source's last $4 events that were received after $2 were delivered, by spans of $3 ms.
select to_timestamp(floor(extract(epoch from e.received_at) * 1000 / $3::bigint) * $3::bigint / 1000.0) as at, count(*) as succeeded
  from (select e.id, e.received_at from tidegate.workflow_events e where e.source = $1 order by e.ingress_sequence desc limit $4) e
 where e.received_at > $2
   and exists (select from tidegate.workflow_trigger_deliveries d 
                where d.id between tidegate.first_of(e.id) and tidegate.last_of(e.id) and d.event_id = e.id and d.status <> 'failed')
 group by 1

-- name: counting_runs
-- The sources of runs, each with the policy of its breaker.
select r.id, e.source, s.breaker
  from unnest($1::uuid[]) as u (id)
 cross join lateral (select r.id, r.event_id from tidegate.workflow_runs r where r.id = u.id offset 0) r
 cross join lateral (select e.source from tidegate.workflow_events e where e.id = r.event_id offset 0) e
  left join tidegate.event_scheduler_sources s on s.source = e.source

-- name: pause
-- Pauses a source until a time, for a duration from now, or until it is resumed (both null).
insert into tidegate.event_scheduler_sources as s
  (source, paused_at, paused_until, pause_reason, paused_by, updated_by)
values ($1, tidegate.now(), coalesce($2, tidegate.now() + $3::bigint * interval '1 ms'), $4, $5, $5)
on conflict (source) do update
   set paused_at = excluded.paused_at, paused_until = excluded.paused_until, pause_reason = excluded.pause_reason,
       paused_by = excluded.paused_by, version = s.version + 1, updated_by = excluded.updated_by,
       updated_at = tidegate.now()
returning paused_until

-- name: resume
-- Lifts the pause and closes the breaker. Returns the source when there was one to lift.
update tidegate.event_scheduler_sources
   set paused_at = null, paused_until = null, pause_reason = null, paused_by = null, breaker_state = 'closed',
       breaker_until = null, breaker_reason = null, breaker_at = null, failed_trials = 0, outcomes = '[]',
       version = version + 1, updated_by = $2,
       updated_at = tidegate.now()
 where source = $1
returning source
