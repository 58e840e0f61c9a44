-- name: upsert
-- What code says about a workflow's schedule; one that is the same already keeps its next tick. Returns its workflow
-- when it wrote.
insert into tidegate.schedules as s (workflow_definition_id, every_ms, cron, timezone, next_at)
values ($1, $2, $3, $4, $5)
on conflict (workflow_definition_id) do update
   set every_ms = excluded.every_ms, cron = excluded.cron, timezone = excluded.timezone, next_at = excluded.next_at,
       updated_at = tidegate.now()
 where (s.every_ms, s.cron, s.timezone) is distinct from (excluded.every_ms, excluded.cron, excluded.timezone)
returning s.workflow_definition_id

-- name: delete
-- Takes a workflow's schedule away. Returns its workflow when there was one.
delete from tidegate.schedules where workflow_definition_id = $1 returning workflow_definition_id

-- name: lock_due
-- Schedules of these workflows whose tick has come, for this transaction alone, the longest due first; and those whose last
-- tick lies ahead, since the clock was wrong for a while.
select s.workflow_definition_id, w.slug as workflow, s.every_ms, s.cron, s.timezone, s.next_at, s.last_at,
       tidegate.now() as now
  from tidegate.schedules s
  join tidegate.workflow_definitions w on w.id = s.workflow_definition_id
 where s.workflow_definition_id = any ($1::uuid[])
   and (s.next_at <= tidegate.now() or s.last_at > tidegate.now())
 order by s.next_at, s.workflow_definition_id
 limit $2
   for update of s skip locked

-- name: advance
-- Moves locked schedules from the tick just published to the next.
update tidegate.schedules s
   set last_at = u.last_at, next_at = u.next_at, updated_at = tidegate.now()
  from unnest($1::uuid[], $2::timestamptz[], $3::timestamptz[]) as u (id, last_at, next_at)
 where s.workflow_definition_id = u.id

-- name: next_due_seconds
-- Seconds until the next tick of these workflows, negative when it is overdue; null when there is none.
select extract(epoch from min(case when s.last_at > tidegate.now() then tidegate.now() else s.next_at end)
                     - tidegate.now())::float8
  from tidegate.schedules s where s.workflow_definition_id = any ($1::uuid[])

-- name: list
-- A page of schedules, by workflow.
select w.slug as workflow, s.every_ms, s.cron, s.timezone, s.next_at, s.last_at
  from tidegate.schedules s
  join tidegate.workflow_definitions w on w.id = s.workflow_definition_id
 where $1::text is null or w.slug > $1
 order by w.slug
 limit $2
