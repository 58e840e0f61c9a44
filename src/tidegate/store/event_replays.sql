-- name: keep_days
-- Keeps every day as it is until the commit: of a day the runs are dropped first.
lock table only tidegate.workflow_runs_history in access share mode

-- name: state
-- Whether an event can be decided again: the state of its retry, whether it is undecided, and whether its day is being dropped: its runs
-- are gone.
select e.id, (select r.retry_state from tidegate.event_ingress_retries r where r.event_id = e.id) as retry_state,
       exists (select from tidegate.event_inbox i where i.ingress_sequence = e.ingress_sequence) as is_undecided,
       e.tableoid <> 'tidegate.workflow_events_default'::regclass
         and to_regclass('tidegate.workflow_runs' || right(e.tableoid::regclass::text, 9)) is null as is_leaving
  from tidegate.workflow_events e where e.id = $1

-- name: open_letter
-- The dead letter of an event that was not replayed.
select l.id from tidegate.dead_letters l where l.kind = 'event' and l.subject_id = $1 and l.replayed_at is null

-- name: lock
-- Locks an event.
select e.id from tidegate.workflow_events e where e.id = $1 for no key update

-- fragment: is_taken_back
-- Whether an event was taken back before it was decided. Only who names it decides it again.
exists (select from tidegate.event_ingress_retries r where r.event_id = e.id and r.retry_state = 'cancelled')

-- name: count
-- How many of the oldest $5 events of a type, source and time can be replayed, how many of them were taken back, and whether there are
-- more.
select count(*) filter (where not found.is_taken_back and found.place <= $5),
       count(*) filter (where found.is_taken_back and found.place <= $5), count(*) > $5
  from (select {{is_taken_back}} as is_taken_back, row_number() over (order by e.received_at, e.ingress_sequence) as place
          from (select e.id, e.received_at, e.ingress_sequence from tidegate.workflow_events e
                 where ($1::text is null or e.type = $1) and ($2::text is null or e.source = $2)
                   and ($3::timestamptz is null or e.received_at >= $3)
                   and ($4::timestamptz is null or e.received_at < $4)
                 order by e.received_at, e.ingress_sequence limit $5 + 1) e) found

-- name: taken_back
-- Those of the events that were taken back.
select e.id from unnest($1::uuid[]) as e (id) where {{is_taken_back}}

-- name: schedule
-- Events of a type, source and time are to be decided again one after the other, oldest first, $6 ms apart, behind those that already
-- are; not those that were taken back. Returns how many, and the times of the first and the last.
with clock as materialized (
  select greatest(tidegate.now(), (select max(replay_at) from tidegate.event_replays) + $6::float8 * interval '1 ms') as now
), found as materialized (
  select e.id, row_number() over (order by e.received_at, e.ingress_sequence) - 1 as place
    from (select e.id, e.received_at, e.ingress_sequence from tidegate.workflow_events e
           where ($1::text is null or e.type = $1) and ($2::text is null or e.source = $2)
             and ($3::timestamptz is null or e.received_at >= $3)
             and ($4::timestamptz is null or e.received_at < $4)
           order by e.received_at, e.ingress_sequence limit $5) e
   where not {{is_taken_back}}
), scheduled as (
  insert into tidegate.event_replays (event_id, replay_at, replay_by)
  select f.id, clock.now + f.place * $6::float8 * interval '1 ms', $7 from found f, clock
  on conflict (event_id) do nothing
  returning replay_at
)
select count(*), min(replay_at), max(replay_at) from scheduled

-- name: stop
-- Cancels the scheduled replays of events. Returns how many.
with stopped as (
  delete from tidegate.event_replays r
   where r.event_id in (select event_id from tidegate.event_replays order by event_id for update)
  returning r.event_id
)
select count(*) from stopped

-- name: postpone
-- When the first scheduled replay is more than $1 ms late, since no worker replayed, postpones all by as much: the rate holds.
-- Returns how many.
with waiting as materialized (
  select event_id, replay_at from tidegate.event_replays order by event_id for update
), late as materialized (
  select tidegate.now() - min(replay_at) as by from waiting
), moved as (
  update tidegate.event_replays r set replay_at = w.replay_at + late.by
    from waiting w, late where r.event_id = w.event_id and late.by > $1::bigint * interval '1 ms'
  returning r.event_id
)
select count(*) from moved

-- name: take_due
-- Takes the scheduled replays that are due off the list, the longest due first; nothing that another worker is taking.
delete from tidegate.event_replays r
 where r.event_id in (select event_id from tidegate.event_replays where replay_at <= tidegate.now()
                       order by replay_at, event_id limit $1 for update skip locked)
returning r.event_id, r.replay_by

-- name: next_due
-- Seconds until the next scheduled replay, or null.
select extract(epoch from min(replay_at) - tidegate.now())::float8 from tidegate.event_replays

-- name: delivered
-- Those of the deliveries that exist.
select d.id from tidegate.workflow_trigger_deliveries d where d.id = any ($1::uuid[])
