-- name: ensure
-- A row for each trigger that has none.
insert into tidegate.event_scheduler_triggers (trigger_id)
select t from unnest($1::uuid[]) as t order by t
on conflict (trigger_id) do nothing

-- name: lock
-- The state of triggers with their limits, locked in a fixed order until the commit: those asked for ($1), and of the
-- others ($2) those that are paused or whose breaker is not closed.
select g.trigger_id, g.ring, g.ring_at, g.ring_width_us, g.spent_at, g.drain_at, g.paused_at, g.paused_until, g.pause_reason,
       g.paused_by, g.breaker_state, g.breaker_until, g.breaker_reason, g.breaker_at, g.failed_trials, g.outcomes, g.counting_until, g.probe_run_id, g.closed_until,
       g.closed_reason, g.plan_version, g.is_replanning, g.refused_at, t.throttle_count, t.throttle_window_ms, t.max_concurrency, t.retry, t.breaker, t.budgets,
       t.backlog is not null as has_backlog,
       t.holds = 'executing' as gives_back, t.holds = 'executing' or g.lends_slots as lends_slots
  from tidegate.event_scheduler_triggers g
  join tidegate.workflow_event_triggers t on t.id = g.trigger_id
 where g.trigger_id = any ($1::uuid[])
    or (g.trigger_id = any ($2::uuid[]) and (g.paused_at is not null or g.breaker_state <> 'closed'
                                              or g.closed_until is not null))
 order by g.trigger_id
   for update of g

-- name: lines
-- The last delivery in line of each trigger that has any waiting, for anything but a slot of its own key, a budget, its source to
-- be resumed, or its window to close: those hold up no other delivery. A statement of its own, after the locks: the one that waited for them still sees the tables as they were before it waited.
select t.trigger_id, w.ingress_sequence
  from unnest($1::uuid[]) as t (trigger_id),
       lateral (select d.ingress_sequence from tidegate.workflow_trigger_deliveries d
                 where d.trigger_id = t.trigger_id and d.retry_state = 'scheduled'
                   and d.reason not in ('concurrency', 'source_paused', 'budget') and d.reason <> 'window'
                 order by d.ingress_sequence desc limit 1) w

-- name: slots
-- For each trigger and key: how many of its slots are in use, how many deliveries and resuming runs wait for one (counted no further
-- than there are slots), until when (and why) the key is closed, for a trigger that skips what overlaps its oldest run, and how many
-- runs wait since the first delivery came, or before.
select u.trigger_id, u.concurrency_key, held.in_use,
       (select count(*)
          from (select 1 from tidegate.workflow_trigger_deliveries d
                 where d.trigger_id = u.trigger_id and d.concurrency_key = u.concurrency_key
                   and d.retry_state = 'scheduled' and d.reason = 'concurrency'
                 order by d.ingress_sequence limit t.max_concurrency) w)
         + (select count(*)
              from (select from tidegate.slot_waits q join tidegate.workflow_runs r on {{slot_lines.is_waiting}}
                     where q.trigger_id = u.trigger_id and q.key = u.concurrency_key limit t.max_concurrency) w) as waiting,
       h.until, h.reason, held.oldest, {{slot_lines.waiting_before}} as ahead
  from unnest($1::uuid[], $2::text[]) as u (trigger_id, concurrency_key)
  join tidegate.workflow_event_triggers t on t.id = u.trigger_id
 cross join lateral (select count(*) as in_use, (array_agg(r.id order by r.id) filter (where t.overlap = 'skip'))[1] as oldest
                       from tidegate.workflow_runs r
                      where r.trigger_id = u.trigger_id and r.concurrency_key = u.concurrency_key
                        and r.status in ('pending', 'running')) held
  left join tidegate.trigger_key_holds h
    on h.trigger_id = u.trigger_id and h.concurrency_key = u.concurrency_key and h.until > tidegate.now()

-- name: next_in_line
-- Locks the oldest deliveries that wait for a slot of each trigger and key, as many as are free (apart from those for which runs wait
-- longer) and at most $3 of each. Returns them with all that decides about them, in one round trip: the slots in use, the pause of their source, the time, the
-- registry's version. The caller holds the triggers' locks, so no other transaction decides about these rows meanwhile.
with freed as materialized (
  select u.trigger_id, u.concurrency_key, t.max_concurrency,
         (select count(*) from tidegate.workflow_runs r
           where r.trigger_id = u.trigger_id and r.concurrency_key = u.concurrency_key
             and r.status in ('pending', 'running')) as in_use, {{slot_lines.waiting_before}} as ahead
    from unnest($1::uuid[], $2::text[]) as u (trigger_id, concurrency_key)
    join tidegate.workflow_event_triggers t on t.id = u.trigger_id
   where not exists (select 1 from tidegate.trigger_key_holds h
                      where h.trigger_id = u.trigger_id and h.concurrency_key = u.concurrency_key
                        and h.until > tidegate.now())
)
select w.*, f.concurrency_key, f.in_use, f.ahead, s.paused_until, s.pause_reason, s.paused_by,
       s.paused_at is not null and (s.paused_until is null or s.paused_until > tidegate.now()) as is_source_paused,
       tidegate.now() as now, (select version from tidegate.registry_version) as registry_version
  from freed f
 cross join lateral (select d.id, d.trigger_id, d.event_id, d.status, d.reason, d.retry_attempts, d.next_attempt_at, d.source,
                       d.trigger_version, d.window_id, d.budget, d.stale_at, d.created_at
                  from tidegate.workflow_trigger_deliveries d
                 where d.trigger_id = f.trigger_id and d.concurrency_key = f.concurrency_key
                   and d.retry_state = 'scheduled' and d.reason = 'concurrency'
                 order by d.ingress_sequence
                 limit greatest(0, least($3::bigint, f.max_concurrency - f.in_use - f.ahead))
                   for update of d) w
  left join tidegate.event_scheduler_sources s on s.source = w.source

-- name: wake
-- Makes the oldest deliveries that wait for a slot of each trigger and key due now, as many as are free (apart from
-- those for which runs wait longer; all, when the trigger has no limit any more). Returns them. The caller holds the triggers' locks, so no other transaction
-- decides about these rows meanwhile.
with freed as materialized (
  select u.trigger_id, u.concurrency_key,
         case when t.max_concurrency is not null then
           greatest(0, t.max_concurrency - (select count(*) from tidegate.workflow_runs r
                                             where r.trigger_id = u.trigger_id and r.concurrency_key = u.concurrency_key
                                               and r.status in ('pending', 'running')) - {{slot_lines.waiting_before}}) end as free
    from unnest($1::uuid[], $2::text[]) as u (trigger_id, concurrency_key)
    join tidegate.workflow_event_triggers t on t.id = u.trigger_id
), oldest as materialized (
  select w.id
    from freed f,
         lateral (select d.id from tidegate.workflow_trigger_deliveries d
                   where d.trigger_id = f.trigger_id and d.concurrency_key = f.concurrency_key
                     and d.retry_state = 'scheduled' and d.reason = 'concurrency'
                   order by d.ingress_sequence limit f.free) w
)
update tidegate.workflow_trigger_deliveries d
   set next_attempt_at = tidegate.now(), claim_generation = d.claim_generation + 1, updated_at = tidegate.now()
  from oldest o
 where d.id = o.id and d.retry_state = 'scheduled' and d.next_attempt_at > tidegate.now()
returning d.id

-- name: save
-- Writes back what a transaction changed in the triggers it holds.
update tidegate.event_scheduler_triggers g
   set ring = u.ring::bigint[], ring_at = u.ring_at, ring_width_us = u.ring_width_us, drain_at = u.drain_at,
       breaker_state = u.breaker_state, breaker_until = u.breaker_until, breaker_reason = u.breaker_reason,
       breaker_at = u.breaker_at, failed_trials = u.failed_trials, outcomes = u.outcomes::jsonb,
       counting_until = u.counting_until, probe_run_id = u.probe_run_id, spent_at = u.spent_at,
       updated_at = tidegate.now()
  from unnest($1::uuid[], $2::text[], $3::bigint[], $4::bigint[], $5::timestamptz[], $6::text[], $7::timestamptz[],
              $8::text[], $9::text[], $10::uuid[], $11::timestamptz[], $12::timestamptz[], $13::bigint[],
              $14::timestamptz[])
    as u (trigger_id, ring, ring_at, ring_width_us, drain_at, breaker_state, breaker_until, breaker_reason, outcomes,
          probe_run_id, spent_at, breaker_at, failed_trials, counting_until)
 where g.trigger_id = u.trigger_id

-- name: take_successes
-- Takes what was counted of runs that succeeded, by spans of $2 ms.
with taken as (
  delete from tidegate.trigger_successes where trigger_id = $1 returning at, succeeded
)
select to_timestamp(floor(extract(epoch from at) * 1000 / $2::bigint) * $2::bigint / 1000.0) as at, sum(succeeded)::bigint as succeeded
  from taken group by 1

-- name: recent_successes
-- How many of a trigger's last $4 deliveries had a run that succeeded after $2, by spans of $3 ms.
select to_timestamp(floor(extract(epoch from r.finished_at) * 1000 / $3::bigint) * $3::bigint / 1000.0) as at, count(*) as succeeded
  from (select d.id from tidegate.workflow_trigger_deliveries d where d.trigger_id = $1 order by d.id desc limit $4) d
  join tidegate.workflow_runs r on r.id = d.id
 where r.status = 'succeeded' and r.finished_at > $2
 group by 1

-- name: forget_successes
-- Deletes the counts of triggers that no longer count.
delete from tidegate.trigger_successes s
 where not exists (select from tidegate.event_scheduler_triggers g
                    where g.trigger_id = s.trigger_id and g.counting_until > tidegate.now())

-- name: fold_successes
-- Keeps one row for each trigger and second of what was counted more than 64 s ago: a longer window has spans of more than a
-- second, so that this makes no difference to it, and a shorter one is over. Rows that another transaction takes meanwhile are left.
with crowded as materialized (
  select s.trigger_id, date_trunc('second', s.at) as second
    from tidegate.trigger_successes s where s.at < tidegate.now() - interval '64 s'
   group by 1, 2 having count(*) > 1
), found as materialized (
  select s.ctid from tidegate.trigger_successes s, crowded c
   where s.trigger_id = c.trigger_id and date_trunc('second', s.at) = c.second for update of s skip locked
), taken as (
  delete from tidegate.trigger_successes where ctid = any (array(select ctid from found)) returning trigger_id, at, succeeded
)
insert into tidegate.trigger_successes (trigger_id, at, succeeded)
select trigger_id, min(at), sum(succeeded) from taken group by trigger_id, date_trunc('second', at)

-- name: set_plan
-- Ends a plan, or begins a new one: every waiting delivery of the trigger gets a new slot. $5 is when due deliveries
-- were refused, if that is why: those due by then have used an attempt.
update tidegate.event_scheduler_triggers
   set plan_version = plan_version + $2::bigint, is_replanning = $3, drain_at = $4, refused_at = $5,
       updated_at = tidegate.now()
 where trigger_id = $1

-- name: replan
-- A new plan for a trigger, if any of its deliveries wait.
update tidegate.event_scheduler_triggers g
   set plan_version = g.plan_version + 1, is_replanning = true, drain_at = null, refused_at = null,
       updated_at = tidegate.now()
 where g.trigger_id = $1
   and exists (select 1 from tidegate.workflow_trigger_deliveries d
                where d.trigger_id = g.trigger_id and d.retry_state = 'scheduled')

-- name: list_replanning
-- Triggers whose waiting deliveries are to get new slots.
select trigger_id from tidegate.event_scheduler_triggers where is_replanning order by trigger_id

-- name: get
-- One trigger's pause, breaker and waiting deliveries, and how many of its runs wait for a slot to go on.
select t.id as trigger_id, g.paused_at, g.paused_until, g.pause_reason, g.paused_by,
       coalesce(g.breaker_state, 'closed') as breaker_state, g.breaker_until, g.breaker_reason, g.probe_run_id,
       w.waiting, w.next_attempt_at,
       (select count(*) from tidegate.slot_waits q join tidegate.workflow_runs r on {{slot_lines.is_waiting}}
         where r.trigger_id = t.id) as resuming
  from tidegate.workflow_event_triggers t
  left join tidegate.event_scheduler_triggers g on g.trigger_id = t.id,
       lateral (select count(*) as waiting, min(d.next_attempt_at) as next_attempt_at
                  from tidegate.workflow_trigger_deliveries d
                 where d.trigger_id = t.id and d.retry_state = 'scheduled') w
 where t.id = $1

-- name: pause
-- Pauses a trigger until a time, for a duration from now, or until it is resumed (both null).
insert into tidegate.event_scheduler_triggers as g (trigger_id, paused_at, paused_until, pause_reason, paused_by)
values ($1, tidegate.now(), coalesce($2, tidegate.now() + $3::bigint * interval '1 ms'), $4, $5)
on conflict (trigger_id) do update
   set paused_at = excluded.paused_at, paused_until = excluded.paused_until, pause_reason = excluded.pause_reason,
       paused_by = excluded.paused_by, version = g.version + 1, updated_at = tidegate.now()
returning paused_until

-- name: close
-- Nothing of a trigger is launched for a while.
update tidegate.event_scheduler_triggers
   set closed_until = greatest(closed_until, tidegate.now() + $2::bigint * interval '1 ms'), closed_reason = $3,
       updated_at = tidegate.now()
 where trigger_id = $1

-- name: close_key
-- Nothing of one of a trigger's keys is launched for a while.
insert into tidegate.trigger_key_holds as h (trigger_id, concurrency_key, until, reason)
values ($1, $4, tidegate.now() + $2::bigint * interval '1 ms', $3)
on conflict (trigger_id, concurrency_key) do update
   set until = greatest(h.until, excluded.until), reason = excluded.reason

-- name: hold_runs
-- Runs of a trigger (or of one of its keys) that wait do not begin before that either.
update tidegate.workflow_runs r
   set next_attempt_at = least(r.deadline_at,
                               greatest(r.next_attempt_at, tidegate.now() + $2::bigint * interval '1 ms')),
       warning = $3, updated_at = tidegate.now()
 where r.trigger_id = $1 and r.status = 'pending' and ($4::text is null or r.concurrency_key = $4)

-- name: resume
-- Lifts the pause and closes the breaker.
update tidegate.event_scheduler_triggers
   set paused_at = null, paused_until = null, pause_reason = null, paused_by = null, breaker_state = 'closed',
       breaker_until = null, breaker_reason = null, breaker_at = null, failed_trials = 0,
       outcomes = '[]', counting_until = null, probe_run_id = null, closed_until = null,
       closed_reason = null, version = version + 1, updated_at = tidegate.now()
 where trigger_id = $1
