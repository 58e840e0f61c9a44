-- Windows (`trigger_windows`) are read and changed under the lock of their trigger. A window has the id of the delivery that opened it: its
-- leader, which waits for all of them. The others are in history at once, as `collected` without a run, until the leader's end.

-- name: load
-- The windows of triggers ($1) and keys ($2) that take events, or have launched one at once.
select w.id, w.trigger_id, w.key, w.state, w.event_id, w.size, w.opened_at, w.closes_at, w.oldest_event_id, w.last_event_id,
       w.last_sequence, w.expires_at, w.trigger_version
  from unnest($1::uuid[], $2::text[]) as u (trigger_id, key)
  join tidegate.trigger_windows w on w.trigger_id = u.trigger_id and w.key = u.key and w.state in ('open', 'quiet')

-- name: get
-- Windows by their ids ($1).
select w.id, w.trigger_id, w.key, w.state, w.event_id, w.size, w.opened_at, w.closes_at, w.oldest_event_id, w.last_event_id,
       w.last_sequence, w.expires_at, w.trigger_version
  from tidegate.trigger_windows w where w.id = any ($1::uuid[])

-- name: save
-- Writes windows, those that were there before those that are new; $14 is the time. One that waits for nothing is forgotten
-- after $15 ms, unless something needs it then.
insert into tidegate.trigger_windows as w
  (id, trigger_id, key, state, event_id, size, opened_at, closes_at, oldest_event_id, last_event_id, last_sequence, expires_at,
   trigger_version, closed_at, forget_at)
select u.id, u.trigger_id, u.key, u.state, u.event_id, u.size, u.opened_at, u.closes_at, u.oldest_event_id, u.last_event_id,
       u.last_sequence, u.expires_at, u.trigger_version, case when u.state not in ('open', 'quiet') then $14::timestamptz end,
       case when u.state not in ('open', 'closed') then greatest(u.closes_at, $14::timestamptz) + $15::bigint * interval '1 ms' end
  from unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::uuid[], $6::bigint[], $7::timestamptz[], $8::timestamptz[],
              $9::uuid[], $10::uuid[], $11::bigint[], $12::timestamptz[], $13::bigint[])
    with ordinality as u (id, trigger_id, key, state, event_id, size, opened_at, closes_at, oldest_event_id, last_event_id,
                          last_sequence, expires_at, trigger_version, place)
 order by u.place
on conflict (id) do update
   set state = excluded.state, size = excluded.size, closes_at = excluded.closes_at, oldest_event_id = excluded.oldest_event_id,
       last_event_id = excluded.last_event_id, last_sequence = excluded.last_sequence, expires_at = excluded.expires_at,
       trigger_version = excluded.trigger_version, closed_at = excluded.closed_at, forget_at = excluded.forget_at

-- name: collect
-- Records deliveries that are collected, each with its window ($12); the leader of a window waits until it closes. None of them exists
-- already: the caller has asked. $13 is the time.
insert into tidegate.workflow_trigger_deliveries
  (id, trigger_id, event_id, trigger_version, status, attempts, dedupe_key, last_error, retry_state, next_attempt_at, retry_metadata,
   reason, source, concurrency_key, ingress_sequence, window_id, created_at, updated_at, plan_version, backlog_key)
select u.id, u.trigger_id, u.event_id, u.trigger_version, 'collected', 1, u.dedupe_key, u.last_error, u.retry_state, u.next_attempt_at,
       u.metadata::jsonb, 'window', u.source, u.concurrency_key, u.ingress_sequence, u.window_id, $13, $13,
       coalesce((select g.plan_version from tidegate.event_scheduler_triggers g where g.trigger_id = u.trigger_id), 0),
       u.metadata::jsonb #>> '{backlog,key}'
  from unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::bigint[], $5::text[], $6::text[], $7::text[], $8::timestamptz[], $9::text[],
              $10::text[], $11::bigint[], $12::uuid[], $14::text[])
    as u (id, trigger_id, event_id, trigger_version, dedupe_key, last_error, retry_state, next_attempt_at, source,
          concurrency_key, ingress_sequence, window_id, metadata)

-- name: move_leaders
-- Leaders ($1) wait until their windows close ($2). Returns the ids.
update tidegate.workflow_trigger_deliveries d
   set next_attempt_at = u.closes_at, claim_generation = d.claim_generation + 1, updated_at = tidegate.now(),
       retry_metadata = d.retry_metadata || jsonb_build_object('until', u.closes_at)
  from unnest($1::uuid[], $2::timestamptz[]) as u (id, closes_at)
 where d.id = u.id and d.retry_state = 'scheduled' and d.reason = 'window' and d.next_attempt_at <> u.closes_at
returning d.id

-- name: members
-- The members of windows ($1) that no run has taken, in the order of arrival.
select d.window_id, d.id, d.event_id, d.ingress_sequence
  from tidegate.workflow_trigger_deliveries d
 where d.window_id = any ($1::uuid[]) and d.workflow_run_id is null
 order by d.ingress_sequence, d.id

-- name: follow
-- Brings windows ($1) and their members in line with their leaders, which this transaction has decided about: launched, the run takes them
-- all; ended otherwise, so do the others, with the line of each event's story; still waiting, the window is closed. $2 is the time, $3 after
-- how many ms a window is forgotten that nothing needs. Returns the windows, and whether their run was launched.
with led as materialized (
  select w.id, d.status, d.last_error, d.reason, d.retry_state in ('scheduled', 'running') as is_waiting
    from tidegate.trigger_windows w
   cross join lateral (select d.* from tidegate.workflow_trigger_deliveries d where d.id = w.id offset 0) d
   where w.id = any ($1::uuid[]) and d.window_id = w.id and (d.retry_state <> 'scheduled' or d.reason <> 'window')
), members as materialized (
  select d.id, d.event_id, d.retry_state, d.trigger_id, d.retry_attempts, l.id as window_id, l.status, l.last_error, l.reason
    from led l
   cross join lateral (select d.* from tidegate.workflow_trigger_deliveries d where d.window_id = l.id offset 0) d
   where not l.is_waiting
), written as (
  update tidegate.workflow_trigger_deliveries d
     set status = case when m.status = 'launched' then 'collected' else m.status end,
         retry_state = case when d.retry_state = 'none' then 'none' when m.status = 'launched' then 'completed' else d.retry_state end,
         workflow_run_id = case when m.status = 'launched' then m.window_id end,
         launched_at = case when m.status = 'launched' then $2::timestamptz end,
         last_error = case when m.status <> 'launched' then m.last_error end,
         reason = case when m.status = 'launched' then 'window' else m.reason end, updated_at = $2::timestamptz
    from members m
   where d.id = any (array(select id from members)) and d.id = m.id
     and (m.status = 'launched' or d.id <> m.window_id)
), of_runs as (
  update tidegate.workflow_runs r set window_id = r.id
   where r.id = any (array(select l.id from led l where l.status = 'launched')) and r.status in ('pending', 'running')
), told as (
  insert into tidegate.event_decisions (event_id, at, stage, decision, reason, trigger_id)
  select m.event_id, $2::timestamptz, 'deliver', m.status, m.last_error, m.trigger_id
    from members m where m.status <> 'launched' and m.id <> m.window_id
)
update tidegate.trigger_windows w
   set state = case when l.is_waiting then 'closed' when l.status = 'launched' then 'taken' else 'ended' end,
       closed_at = coalesce(w.closed_at, $2::timestamptz),
       forget_at = case when not l.is_waiting then $2::timestamptz + $3::bigint * interval '1 ms' end
  from led l where w.id = l.id
returning w.id, w.state = 'taken' as is_taken

-- name: close
-- Windows ($1) take no more events: their leaders were made due.
update tidegate.trigger_windows set state = 'closed', closed_at = tidegate.now(), forget_at = null
 where id = any ($1::uuid[]) and state = 'open'

-- name: close_of_trigger
-- The leaders of a trigger's windows that are not taken.
select w.id from tidegate.trigger_windows w where w.trigger_id = $1 and w.state in ('open', 'closed')

-- name: leaders_of
-- The windows that deliveries ($1) are collected in and that no run has taken, with the trigger.
select d.id, d.window_id, d.trigger_id from tidegate.workflow_trigger_deliveries d
 where d.id = any ($1::uuid[]) and d.window_id is not null and d.window_id <> d.id and d.status = 'collected'
   and d.workflow_run_id is null

-- name: leave
-- Takes members ($1), but no leaders, out of their windows, with a status ($2), a text ($3) and a reason ($4) for each. The caller holds the
-- trigger's lock. Returns them.
with gone as (
  update tidegate.workflow_trigger_deliveries d
     set status = u.status, last_error = u.text, reason = u.reason, window_id = null, updated_at = tidegate.now(),
         retry_state = case u.status when 'cancelled' then 'cancelled' when 'exhausted' then 'exhausted' else 'none' end
    from unnest($1::uuid[], $2::text[], $3::text[], $4::text[]) as u (id, status, text, reason),
         lateral (select o.window_id from tidegate.workflow_trigger_deliveries o where o.id = u.id offset 0) o
   where d.id = any ($1::uuid[]) and d.id = u.id and d.window_id <> d.id and d.status = 'collected' and d.workflow_run_id is null
  returning d.id, d.event_id, d.retry_attempts, d.trigger_id, d.concurrency_key, o.window_id
), smaller as (
  update tidegate.trigger_windows w set size = w.size - g.number, last_event_id = null
    from (select window_id, count(*) as number from gone group by window_id) g
   where w.id = g.window_id
)
select g.id, g.event_id, g.retry_attempts, g.trigger_id, g.concurrency_key from gone g

-- name: hand_on
-- The leader ($1) of a window is decided on its own, and another member ($2) leads the rest; it is due at $3.
with window_row as (
  update tidegate.trigger_windows w
     set id = $2, event_id = d.event_id, size = w.size - 1, last_event_id = null, state = 'closed', forget_at = null,
         closed_at = coalesce(w.closed_at, $3)
    from (select d.event_id from tidegate.workflow_trigger_deliveries d where d.id = $2) d
   where w.id = $1
)
update tidegate.workflow_trigger_deliveries d
   set window_id = case when d.id = $1 then null else $2 end,
       retry_state = case when d.id = $2 then 'scheduled' else d.retry_state end,
       next_attempt_at = case when d.id = $2 then $3 else d.next_attempt_at end, updated_at = $3
 where d.window_id = $1

-- name: events
-- The events of windows ($1) that their runs have taken, in the order of arrival.
select d.window_id, d.event_id from tidegate.workflow_trigger_deliveries d
 where d.window_id = any ($1::uuid[]) and d.workflow_run_id is not null
 order by d.ingress_sequence, d.id

-- name: keep
-- Keeps the events of a run's window ($1) for it when it resumes, or for a run that repeats it: the window is known again, if it was forgotten.
insert into tidegate.trigger_windows as w
  (id, trigger_id, key, state, event_id, size, opened_at, closes_at, oldest_event_id, last_sequence, trigger_version, closed_at,
   forget_at)
select $1, min(d.trigger_id::text)::uuid, '', 'taken', (select l.event_id from tidegate.workflow_trigger_deliveries l where l.id = $1),
       count(*), min(d.created_at), max(d.created_at), min(d.event_id::text)::uuid, max(d.ingress_sequence), max(d.trigger_version),
       tidegate.now(), tidegate.now() + $2::bigint * interval '1 ms'
  from tidegate.workflow_trigger_deliveries d where d.window_id = $1 having count(*) > 0
on conflict (id) do update set forget_at = excluded.forget_at

-- name: forget
-- Deletes windows whose events nothing needs any more, at most $1: no run is unfinished, no delivery waits, no dead letter may be replayed.
-- The others are asked about again after $2 ms. Returns how many it looked at.
with asked as materialized (
  select w.id, w.event_id from tidegate.trigger_windows w
   where w.forget_at <= tidegate.now() order by w.forget_at limit $1 for update skip locked
), needed as materialized (
  select a.id from asked a
   where exists (select from tidegate.workflow_trigger_deliveries d where d.id = a.id and d.retry_state in ('scheduled', 'running') offset 0)
      or exists (select from tidegate.workflow_runs r where r.window_id = a.id and r.status in ('pending', 'running') offset 0)
      or exists (select from tidegate.dead_letters l where l.event_id = a.event_id offset 0)
), later as (
  update tidegate.trigger_windows w set forget_at = tidegate.now() + $2::bigint * interval '1 ms'
   where w.id in (select id from needed)
), gone as (
  delete from tidegate.trigger_windows w where w.id in (select id from asked) and w.id not in (select id from needed)
)
select count(*) from asked

-- name: of_deliveries
-- The windows that deliveries ($1) are in: size, state and times.
select d.id as delivery_id, w.size, w.state, w.closes_at, w.id
  from tidegate.workflow_trigger_deliveries d join tidegate.trigger_windows w on w.id = d.window_id
 where d.id = any ($1::uuid[])
