-- name: page
-- The next $3 events in the order of their receipt after a given place ($1, $2), as far as they are older than $4 s. The age
-- is asked for afterwards: a range in the scan makes the planner read and sort all of it.
select p.id, p.received_at, p.ingress_sequence
  from (select e.id, e.received_at, e.ingress_sequence from tidegate.workflow_events e
         where (e.received_at, e.ingress_sequence) > ($1::timestamptz, $2::bigint)
         order by e.received_at, e.ingress_sequence limit $3) p
 where p.received_at < tidegate.now() - $4::bigint * interval '1 s'
 order by p.received_at, p.ingress_sequence

-- name: lock_finished_events
-- Locks those of the given events ($1) that are finished and unchanged for $2 s: decided, no retry or
-- delivery that waits, no run unfinished, no key that one of its launches still holds, no dead letter. What another
-- transaction has locked stays for the next pass. Returns the ids. `offset 0` has every question asked for each event by an
-- index; joined, whole tables would be read for a few events.
with cut as materialized (
  select tidegate.now() - $2::bigint * interval '1 s' as off, tidegate.now() as now
)
select e.id
  from tidegate.workflow_events e, cut
 where e.id = any ($1::uuid[])
   and e.received_at < cut.off and (e.replayed_at is null or e.replayed_at < cut.off)
   and not exists (select from tidegate.event_inbox i where i.ingress_sequence = e.ingress_sequence offset 0)
   and not exists (select from tidegate.event_ingress_retries r
                    where r.event_id = e.id and (r.retry_state in ('scheduled', 'running') or r.updated_at >= cut.off)
                   offset 0)
   and not exists (select from tidegate.workflow_trigger_deliveries d
                    where d.event_id = e.id
                      and (d.retry_state in ('scheduled', 'running') or d.status in ('matched', 'throttled', 'paused')
                           or d.updated_at >= cut.off
                           or exists (select from tidegate.workflow_runs r
                                       where r.id = d.workflow_run_id and d.status = 'launched'
                                         and (r.finished_at is null or r.finished_at >= cut.off) offset 0)
                           or exists (select from tidegate.trigger_idempotency_keys k
                                       where k.trigger_id = d.trigger_id and k.dedupe_key = d.dedupe_key
                                         and k.delivery_id = d.id and (k.expires_at is null or k.expires_at > cut.now)))
                   offset 0)
   and not exists (select from tidegate.workflow_runs r
                    where r.event_id = e.id and r.delivery_id is null
                      and (r.finished_at is null or r.finished_at >= cut.off) offset 0)
   and not exists (select from tidegate.dead_letters l where l.event_id = e.id offset 0)
 order by e.ingress_sequence
   for update of e skip locked

-- name: delete_steps
-- Deletes the steps of the runs of the given events. Returns nothing; the command says how many.
delete from tidegate.workflow_run_steps s
 where s.workflow_run_id = any (array(select tidegate.runs_of($1)))

-- name: delete_runs
-- Deletes the runs of the given events.
delete from tidegate.workflow_runs where id = any (array(select tidegate.runs_of($1)))

-- name: delete_deliveries
-- Deletes the deliveries of the given events.
delete from tidegate.workflow_trigger_deliveries where event_id = any ($1::uuid[])

-- name: delete_retries
-- Deletes the retries of the given events.
delete from tidegate.event_ingress_retries where event_id = any ($1::uuid[])

-- name: delete_decisions
-- Deletes what was decided about the given events.
delete from tidegate.event_decisions where event_id = any ($1::uuid[])

-- name: delete_events
-- Deletes the given events.
delete from tidegate.workflow_events where id = any ($1::uuid[])

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
