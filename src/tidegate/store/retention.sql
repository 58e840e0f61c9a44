-- name: add_days
-- Adds the partitions of today and the $1 days after it. Returns the days that are new.
select d.day from (select (tidegate.now() at time zone 'UTC')::date + n as day from generate_series(0, $1::int) n) d
 where d.day not in (select tidegate.days()) and tidegate.add_day(d.day)
 order by d.day

-- name: span
-- The first and the last day that have partitions, and about how many events have no day.
select min(d.day) as oldest_day, max(d.day) as newest_day,
       (select greatest(c.reltuples, 0)::bigint from pg_catalog.pg_class c
         where c.oid = 'tidegate.workflow_events_default'::regclass) as events_without_a_day
  from tidegate.days() as d (day)

-- name: list_days
-- The days that have partitions and ended more than $1 s ago, oldest first, each with the number of its stories that must be kept,
-- counted no further than $2.
select d.day, (select count(*) from (select from tidegate.needed_stories(
                 d.day, tidegate.now() - $1::bigint * interval '1 s') limit $2) n) as needed
  from tidegate.days() as d (day)
 where (d.day + 1)::timestamp at time zone 'UTC' <= tidegate.now() - $1::bigint * interval '1 s'
 order by d.day

-- name: delete_external_ids_of_day
-- Deletes producers' ids of the events of a day ($1), at most $2, except those of stories that must be kept: what changed in the last
-- $3 s, and what is alive. By the places of the rows, which never move: joined by the key, the whole table would be read for each batch.
with needed as materialized (
  select tidegate.needed_stories($1, tidegate.now() - $3::bigint * interval '1 s') as first
), old as materialized (
  select x.ctid as place from tidegate.event_external_ids x
   where x.event_id >= tidegate.first_of_day($1) and x.event_id < tidegate.first_of_day($1 + 1)
     and tidegate.first_of(x.event_id) not in (select first from needed)
   limit $2
)
delete from tidegate.event_external_ids x where x.ctid = any (array(select place from old))

-- name: drop_day
-- Drops a day ($2) of a table ($1), except stories that must be kept, which move to the default partition: what ended in the last
-- $3 s, and what is alive. Returns how many rows moved; null if there is no such partition.
select tidegate.drop_day($1, $2, tidegate.now() - $3::bigint * interval '1 s')

-- name: day_tables
-- The tables that have partitions, in the order in which a day is dropped.
select name from tidegate.day_tables()

-- name: count_rows
-- About how many rows a day ($2) of a table ($1) has, as the server last counted.
select greatest(coalesce(s.n_live_tup, 0), c.reltuples, 0)::bigint
  from pg_catalog.pg_class c left join pg_catalog.pg_stat_all_tables s on s.relid = c.oid
 where c.oid = to_regclass(format('tidegate.%I', $1::text || to_char($2::date, '_YYYYMMDD')))

-- name: count_events
-- How many events were received more than $1 s ago: all of them, or (not $2) those whose day has no partition.
select case when $2 then (select count(*) from tidegate.workflow_events e
                           where e.received_at < tidegate.now() - $1::bigint * interval '1 s')
       else (select count(*) from tidegate.workflow_events_default e
              where e.received_at < tidegate.now() - $1::bigint * interval '1 s') end

-- name: count_dead_letters
-- How many dead letters `delete_dead_letters` would find.
select count(*) from tidegate.dead_letters l
 where l.created_at < tidegate.now() - $1::bigint * interval '1 s' and l.replay_at is null
   and (l.replayed_at is null or l.replayed_at < tidegate.now() - $1::bigint * interval '1 s')

-- name: count_audit
-- How many rows of the audit log are older than $1 s.
select count(*) from tidegate.audit_log a where a.at < tidegate.now() - $1::bigint * interval '1 s'

-- name: page
-- The next $3 events in the order of their receipt after a given place ($1, $2), as far as they are older than $4 s. The age
-- is asked for afterwards: a range in the scan makes the planner read and sort all of it.
select p.id, p.received_at, p.ingress_sequence
  from (select e.id, e.received_at, e.ingress_sequence from tidegate.workflow_events e
         where (e.received_at, e.ingress_sequence) > ($1::timestamptz, $2::bigint)
         order by e.received_at, e.ingress_sequence limit $3) p
 where p.received_at < tidegate.now() - $4::bigint * interval '1 s'
 order by p.received_at, p.ingress_sequence

-- name: page_of_default
-- The same, of the events whose day has no partition.
select p.id, p.received_at, p.ingress_sequence
  from (select e.id, e.received_at, e.ingress_sequence from tidegate.workflow_events_default e
         where (e.received_at, e.ingress_sequence) > ($1::timestamptz, $2::bigint)
         order by e.received_at, e.ingress_sequence limit $3) p
 where p.received_at < tidegate.now() - $4::bigint * interval '1 s'
 order by p.received_at, p.ingress_sequence

-- name: lock_finished_events
-- Locks those of the given events ($1, of which $3 is the least and $4 the greatest) that are finished and unchanged for $2 s: decided,
-- no retry or delivery that waits, no window that is open or whose run is unfinished, no run unfinished, no dead letter. What another
-- transaction has locked stays for the next pass. Returns the ids. `offset 0` has every question asked for each event by an
-- index; joined, whole tables would be read for a few events.
with cut as materialized (
  select tidegate.now() - $2::bigint * interval '1 s' as off
)
select e.id
  from tidegate.workflow_events e, cut
 where e.id = any ($1::uuid[]) and e.id between $3 and $4
   and e.received_at < cut.off and (e.replayed_at is null or e.replayed_at < cut.off)
   and not exists (select from tidegate.event_inbox i where i.ingress_sequence = e.ingress_sequence offset 0)
   and not exists (select from tidegate.event_ingress_retries r
                    where r.event_id = e.id and (r.retry_state in ('scheduled', 'running') or r.updated_at >= cut.off)
                   offset 0)
   and not exists (select from tidegate.workflow_trigger_deliveries d
                    where d.id between tidegate.first_of(e.id) and tidegate.last_of(e.id) and d.event_id = e.id
                      and (d.retry_state in ('scheduled', 'running') or d.status in ('matched', 'throttled', 'paused')
                           or d.updated_at >= cut.off)
                   offset 0)
   and not exists (select from tidegate.workflow_trigger_deliveries d join tidegate.trigger_windows w on w.id = d.window_id
                    where d.id between tidegate.first_of(e.id) and tidegate.last_of(e.id) and d.event_id = e.id
                      and d.window_id is not null offset 0)
   and not exists (select from tidegate.workflow_runs r
                    where r.id between tidegate.first_of(e.id) and tidegate.last_of(e.id) and r.event_id = e.id
                      and (r.finished_at is null or r.finished_at >= cut.off) offset 0)
   and not exists (select from tidegate.dead_letters l where l.event_id = e.id offset 0)
   and not exists (select from tidegate.event_replays p where p.event_id = e.id offset 0)
 order by e.ingress_sequence
   for update of e skip locked

-- name: delete_steps
-- Deletes the steps of the runs of the given events ($1, of which $2 is the least and $3 the greatest: only their days are read).
-- Returns nothing; the command says how many. The arrays keep to index lookups.
delete from tidegate.workflow_run_steps s
 where s.id = any (array(select x.id from unnest($1::uuid[]) as u (id),
                          lateral (select x.id from tidegate.workflow_run_steps x
                                    where x.id between tidegate.first_of(u.id) and tidegate.last_of(u.id)
                                      and x.workflow_run_id = any (array(select tidegate.runs_of($1))) offset 0) x))
   and s.id between tidegate.first_of($2) and tidegate.last_of($3)

-- name: delete_runs
-- Deletes the runs of the given events.
delete from tidegate.workflow_runs r
 where r.id = any (array(select tidegate.runs_of($1))) and r.id between tidegate.first_of($2) and tidegate.last_of($3)

-- name: delete_deliveries
-- Deletes the deliveries of the given events.
delete from tidegate.workflow_trigger_deliveries d
 where d.id = any (array(select x.id from unnest($1::uuid[]) as u (id),
                          lateral (select x.id from tidegate.workflow_trigger_deliveries x
                                    where x.id between tidegate.first_of(u.id) and tidegate.last_of(u.id)
                                      and x.event_id = u.id offset 0) x))
   and d.id between tidegate.first_of($2) and tidegate.last_of($3)

-- name: delete_retries
-- Deletes the retries of the given events.
delete from tidegate.event_ingress_retries where event_id = any ($1::uuid[]) and event_id between $2 and $3

-- name: delete_decisions
-- Deletes what was decided about the given events.
delete from tidegate.event_decisions where event_id = any ($1::uuid[]) and event_id between $2 and $3

-- name: delete_external_ids
-- Deletes the producers' ids of the given events.
delete from tidegate.event_external_ids where event_id = any ($1::uuid[]) and event_id between $2 and $3

-- name: delete_events
-- Deletes the given events.
delete from tidegate.workflow_events where id = any ($1::uuid[]) and id between $2 and $3

-- name: delete_dead_letters
-- Deletes dead letters with which nothing has happened for $1 s and that are not to be replayed, the oldest first, at most $2.
delete from tidegate.dead_letters
 where id in (select l.id from tidegate.dead_letters l
               where l.created_at < tidegate.now() - $1::bigint * interval '1 s' and l.replay_at is null
                 and (l.replayed_at is null or l.replayed_at < tidegate.now() - $1::bigint * interval '1 s')
               order by l.created_at limit $2 for update skip locked)

-- name: delete_audit
-- Deletes rows of the audit log that are older than $1 s, the oldest first, at most $2; how many. Nothing but this function
-- may.
select tidegate.prune_audit($1, $2)

-- name: delete_refusals
-- Deletes refused publish requests that are older than $1 s, oldest first, at most $2.
delete from tidegate.publish_refusals
 where id in (select r.id from tidegate.publish_refusals r
               where r.at < tidegate.now() - $1::bigint * interval '1 s' order by r.at limit $2)
