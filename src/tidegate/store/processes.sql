-- name: beat
-- A process is alive. Waits while a contraction is being applied (`hold`).
insert into tidegate.processes as p
  (id, name, kind, version, schema_version, retention_events_seconds, retention_dead_letters_seconds,
   retention_audit_seconds)
values ($1, $2, $3, $4, $5, $6, $7, $8)
on conflict (id) do update set seen_at = excluded.seen_at

-- name: leave
-- A process has stopped.
delete from tidegate.processes where id = $1

-- name: forget
-- Deletes processes that have not been seen for $1 ms.
delete from tidegate.processes where seen_at < tidegate.now() - $1::bigint * interval '1 ms'

-- name: hold
-- Until the end of the transaction no process can say that it is alive: who comes later sees what was decided here.
lock table tidegate.processes in exclusive mode

-- name: retentions
-- How long the processes seen within $1 ms keep finished rows, those that say so.
select kind, name, retention_events_seconds, retention_dead_letters_seconds, retention_audit_seconds
  from tidegate.processes
 where retention_events_seconds is not null and seen_at > tidegate.now() - $1::bigint * interval '1 ms'
 order by kind, name, id

-- name: alive
-- Processes seen within $1 ms.
select name, kind, version, schema_version, seen_at from tidegate.processes
 where seen_at > tidegate.now() - $1::bigint * interval '1 ms'
 order by kind, name, id

-- name: older
-- Processes seen within $2 ms whose code knows no schema version from $1 on.
select name, kind, version, schema_version, seen_at from tidegate.processes
 where schema_version < $1 and seen_at > tidegate.now() - $2::bigint * interval '1 ms'
 order by kind, name, id
