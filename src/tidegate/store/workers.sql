-- name: heartbeat
-- A worker is alive and has the code of these definitions, in the versions $5; it says so every $6 ms. It leaves out the runs of $7, and
-- reserves the slots $8. Of a new one it is said when it began, not that it has reconciled.
insert into tidegate.workers as w (name, definitions, slots, version, versions, heartbeat_ms, left_out, reserved, seen_at,
  reconciled_at)
values ($1, $2::uuid[], $3, $4, $5::text[], $6, $7::text[], $8::text::jsonb, tidegate.now(), tidegate.now())
on conflict (name) do update
   set definitions = excluded.definitions, slots = excluded.slots, version = excluded.version, versions = excluded.versions,
       heartbeat_ms = excluded.heartbeat_ms, left_out = excluded.left_out, reserved = excluded.reserved, seen_at = excluded.seen_at

-- name: reconciled
-- Records that a worker has reconciled; written every five seconds at most.
update tidegate.workers set reconciled_at = tidegate.now()
 where name = $1 and reconciled_at <= tidegate.now() - interval '5 s'

-- name: leave
-- A worker has stopped.
delete from tidegate.workers where name = $1

-- name: forget
-- Deletes workers that have not been seen for $1 ms.
delete from tidegate.workers where seen_at < tidegate.now() - $1::bigint * interval '1 ms'

-- name: unserved
-- Workflows with due runs that no worker seen within $1 ms takes: how many, since when, and the workers that have the code and leave them
-- out. Where every workflow is served, no run is read.
with unserved as materialized (
  select d.id, d.slug from tidegate.workflow_definitions d
   where not exists (select from tidegate.workers w
                      where w.seen_at > tidegate.now() - $1::bigint * interval '1 ms' and d.id = any (w.definitions))
), waiting as (
  select r.workflow_definition_id, count(*) as waiting, min(r.next_attempt_at) as since
    from tidegate.workflow_runs r
   where (select count(*) from unserved) > 0
     and r.status = 'pending' and r.next_attempt_at <= tidegate.now() - $2::bigint * interval '1 ms'
   group by r.workflow_definition_id
)
select d.slug as workflow, sum(w.waiting)::bigint as waiting, min(w.since) as since,
       array(select o.name from tidegate.workers o
              where o.seen_at > tidegate.now() - $1::bigint * interval '1 ms' and d.slug = any (o.left_out)
              order by o.started_at, o.name) as left_out_by
  from unserved d join waiting w on w.workflow_definition_id = d.id
 group by d.slug order by d.slug

-- name: list
-- The workers on record, whether each was seen within $1 ms, whether it has missed a heartbeat (a third of the time more is allowed),
-- and the workflows whose code each has.
select w.name, w.version, w.slots, w.started_at, w.seen_at, w.left_out, w.reserved,
       w.seen_at > tidegate.now() - $1::bigint * interval '1 ms' as is_alive,
       w.seen_at < tidegate.now() - w.heartbeat_ms * 4 / 3 * interval '1 ms' as is_late,
       array(select d.slug from tidegate.workflow_definitions d
              where d.id = any (w.definitions) and d.deleted_at is null order by d.slug) as workflows,
       (select coalesce(jsonb_object_agg(d.slug, has.version), '{}')
          from unnest(w.definitions, w.versions) as has (id, version) join tidegate.workflow_definitions d on d.id = has.id
         where has.version is not null and d.deleted_at is null) as code_versions
  from tidegate.workers w
 order by w.started_at, w.name

-- name: executing
-- The runs that workers hold, the longest held first, at most $1 of them; with the source of the event of each.
select r.claimed_by as worker, r.id as run_id, d.slug as workflow, r.updated_at as since, r.claim_expires_at as lease_until,
       (select e.source from tidegate.workflow_events e where e.id = r.event_id) as source
  from tidegate.workflow_runs r join tidegate.workflow_definitions d on d.id = r.workflow_definition_id
 where r.status = 'running'
 order by r.updated_at, r.id limit $1
