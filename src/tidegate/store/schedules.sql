-- name: upsert
-- What code says about a workflow's schedule; one whose times are the same already keeps its next tick. What an operator set stays.
-- Returns its workflow when it wrote.
insert into tidegate.schedules as s (workflow_definition_id, every_ms, cron, timezone, next_at, overlap)
values ($1, $2, $3, $4, $5, $6)
on conflict (workflow_definition_id) do update
   set every_ms = excluded.every_ms, cron = excluded.cron, timezone = excluded.timezone, overlap = excluded.overlap,
       next_at = case when (s.every_ms, s.cron, s.timezone) is distinct from (excluded.every_ms, excluded.cron, excluded.timezone)
                      then excluded.next_at else s.next_at end,
       updated_at = tidegate.now()
 where (s.every_ms, s.cron, s.timezone, s.overlap)
       is distinct from (excluded.every_ms, excluded.cron, excluded.timezone, excluded.overlap)
returning s.workflow_definition_id

-- name: delete
-- Takes a workflow's schedule away. Returns its workflow when there was one.
delete from tidegate.schedules where workflow_definition_id = $1 returning workflow_definition_id

-- name: lock_due
-- Schedules of these workflows whose tick has come, for this transaction alone, the longest due first; and those whose last
-- tick lies ahead, since the clock was wrong for a while.
select s.workflow_definition_id, w.slug as workflow, s.every_ms, s.cron, s.timezone, s.overlap, s.next_at, s.last_at,
       s.paused_at, s.paused_until, tidegate.now() as now
  from tidegate.schedules s
  join tidegate.workflow_definitions w on w.id = s.workflow_definition_id
 where s.workflow_definition_id = any ($1::uuid[])
   and (s.next_at <= tidegate.now() or s.last_at > tidegate.now())
 order by s.next_at, s.workflow_definition_id
 limit $2
   for update of s skip locked

-- name: advance
-- Moves locked schedules from the tick just published to the next, and counts the ticks in between that were not.
update tidegate.schedules s
   set last_at = u.last_at, next_at = u.next_at, missed_total = s.missed_total + u.missed,
       missed_from = case when u.missed > 0 then u.missed_from else s.missed_from end,
       missed_to = case when u.missed > 0 then u.missed_to else s.missed_to end,
       paused_total = s.paused_total + u.in_pause, updated_at = tidegate.now()
  from unnest($1::uuid[], $2::timestamptz[], $3::timestamptz[], $4::bigint[], $5::timestamptz[], $6::timestamptz[], $7::bigint[])
    as u (id, last_at, next_at, missed, missed_from, missed_to, in_pause)
 where s.workflow_definition_id = u.id

-- name: next_due_seconds
-- Seconds until the next tick of these workflows, negative when it is overdue; null when there is none.
select extract(epoch from min(case when s.last_at > tidegate.now() then tidegate.now() else s.next_at end)
                     - tidegate.now())::float8
  from tidegate.schedules s where s.workflow_definition_id = any ($1::uuid[])

-- name: list
-- A page of schedules, by workflow.
select w.slug as workflow, s.every_ms, s.cron, s.timezone, s.overlap, s.next_at, s.last_at
  from tidegate.schedules s
  join tidegate.workflow_definitions w on w.id = s.workflow_definition_id
 where $1::text is null or w.slug > $1
 order by w.slug
 limit $2

-- name: list_operated
-- A page of schedules with what an operator set and what was missed, by workflow, after a given one ($1); or (not null, $2) that of one
-- workflow. `workers` counts those seen within $3 ms that have its code.
select w.slug as workflow, s.every_ms, s.cron, s.timezone, s.overlap, s.next_at, s.last_at, s.paused_at, s.paused_until,
       s.pause_reason, s.paused_by, s.missed_total, s.missed_from, s.missed_to, s.paused_total,
       coalesce((select m.skipped from tidegate.event_scheduler_trigger_metrics m
                   join tidegate.workflow_event_triggers t on t.id = m.trigger_id
                  where t.workflow_definition_id = w.id and t.name = $5 and t.deleted_at is null), 0) as skipped_total,
       (select count(*) from tidegate.workers a
         where a.seen_at > tidegate.now() - $3::bigint * interval '1 ms' and w.id = any (a.definitions)) as workers,
       tidegate.now() as now
  from tidegate.schedules s
  join tidegate.workflow_definitions w on w.id = s.workflow_definition_id
 where w.deleted_at is null and ($1::text is null or w.slug > $1) and ($2::text is null or w.slug = $2)
 order by w.slug
 limit $4

-- name: lock
-- Locks the schedule of one workflow: no tick of it is being published.
select s.workflow_definition_id, w.slug as workflow, s.every_ms, s.cron, s.timezone, s.overlap, s.next_at, s.last_at,
       s.paused_at, s.paused_until, tidegate.now() as now
  from tidegate.schedules s
  join tidegate.workflow_definitions w on w.id = s.workflow_definition_id
 where w.slug = $1 and w.deleted_at is null
   for update of s

-- name: pause
-- Pauses a locked schedule until a time, for a duration from now, or until it is resumed (both null).
update tidegate.schedules
   set paused_at = tidegate.now(), paused_until = coalesce($2, tidegate.now() + $3::bigint * interval '1 ms'),
       pause_reason = $4, paused_by = $5, updated_at = tidegate.now()
 where workflow_definition_id = $1
returning paused_until

-- name: resume
-- Ends the pause of a locked schedule. Ticks that were due in the pause are counted ($3) and not published.
update tidegate.schedules
   set paused_at = null, paused_until = null, pause_reason = null, paused_by = null, next_at = $2,
       paused_total = paused_total + $3::bigint, updated_at = tidegate.now()
 where workflow_definition_id = $1

-- name: known_ticks
-- Those of the producers' ids of ticks that have an event.
select external_id from tidegate.event_external_ids where external_id = any ($1::text[]) and source = $2

-- name: list_overdue
-- Schedules that are not paused and whose tick has been due for $1 ms: $2 of them, the longest overdue first.
select w.slug as workflow, s.next_at,
       (select count(*) from tidegate.workers a
         where a.seen_at > tidegate.now() - $3::bigint * interval '1 ms' and w.id = any (a.definitions)) as workers
  from tidegate.schedules s
  join tidegate.workflow_definitions w on w.id = s.workflow_definition_id
 where s.next_at <= tidegate.now() - $1::bigint * interval '1 ms' and w.deleted_at is null
   and (s.paused_at is null or s.paused_until <= tidegate.now())
 order by s.next_at, w.slug
 limit $2
