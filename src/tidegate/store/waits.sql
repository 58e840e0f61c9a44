-- name: register
-- Begins to wait for events: the steps are written in this transaction, and end at their time; not for a step that is done, which was
-- written before by a commit whose answer was lost. Events count from the sequence or the
-- time given, by default from the creation of the run; what cancels a rerun counts from its creation, since it begins anew. For a time the sequence is one that every event received since then follows: the
-- numbers of events are in the order of their receipt but for the few seconds that storing one can take, and for delayed events, which have
-- a later one.
insert into tidegate.event_waits
  (id, workflow_run_id, step_id, number, mode, event_type, source, paths, key, contained, where_text, after_sequence, since,
   until)
select u.id, u.workflow_run_id, u.step_id, u.number, u.mode, u.event_type, u.source, u.paths, u.key, u.contained::jsonb, u.where_text,
       coalesce(given.after_sequence, before.sequence, greatest(0, (select last_value from tidegate.ingress_sequence) - 100000)),
       case when given.after_sequence is null then start.since end, s.next_attempt_at
  from unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::bigint[], $5::text[], $6::text[], $7::text[], $8::text[], $9::text[],
              $10::text[], $11::text[], $12::bigint[], $13::timestamptz[], $14::bigint[])
    as u (id, workflow_run_id, step_id, number, mode, event_type, source, paths, key, contained, where_text, after_sequence, since,
          since_ms)
 cross join lateral (select r.created_at, r.rerun_of from tidegate.workflow_runs r where r.id = u.workflow_run_id offset 0) r
 cross join lateral (select case when u.mode <> 'cancel' or r.rerun_of is null then u.after_sequence end as after_sequence) given
 cross join lateral (select s.next_attempt_at from tidegate.workflow_run_steps s where s.id = u.step_id and s.status = 'pending' offset 0) s
 cross join lateral (select coalesce(u.since, tidegate.now() - u.since_ms * interval '1 ms', r.created_at) as since) start
  left join lateral (select e.ingress_sequence - 1 as sequence from tidegate.workflow_events e
                      where given.after_sequence is null and e.received_at >= start.since - interval '1 minute' and e.deliver_at is null
                      order by e.received_at, e.ingress_sequence limit 1) before on true
on conflict (id) do nothing

-- name: list_path_sets
-- For each of the types, the sets of fields by which runs wait for its events; each is read from the index once.
with recursive found as (
  select t.event_type, w.paths
    from unnest($1::text[]) as t (event_type),
         lateral (select w.paths from tidegate.event_waits w where w.event_type = t.event_type and w.met_event_id is null
                   order by w.paths limit 1) w
  union all
  select f.event_type, w.paths
    from found f,
         lateral (select w.paths from tidegate.event_waits w
                   where w.event_type = f.event_type and w.paths > f.paths and w.met_event_id is null
                   order by w.paths limit 1) w
)
select event_type, paths from found

-- name: find
-- The open waits for events with these types, fields and values, and the parameters of their runs where an expression needs them;
-- with the place of the value in the arrays. One whose time is over at $4 is no longer met.
select u.n, w.*, case when w.where_text is not null then
         (select r.parameters from tidegate.workflow_runs r where r.id = w.workflow_run_id and r.status in ('pending', 'running'))
       end as parameters
  from unnest($1::text[], $2::text[], $3::text[]) with ordinality as u (event_type, paths, key, n)
  join tidegate.event_waits w on w.event_type = u.event_type and w.paths = u.paths and w.key = u.key and w.met_event_id is null
 where coalesce(w.until > $4::timestamptz, true)

-- name: list_of_runs
-- The waits of runs, and whether each has yet to look back. The caller has locked the runs: none is met, ends or has looked back meanwhile.
select w.*, coalesce(s.retry_metadata -> 'looked_back' = 'false', false) as looks_back
  from tidegate.event_waits w
  left join lateral (select s.retry_metadata from tidegate.workflow_run_steps s
                      where s.id = w.step_id and s.status = 'pending' offset 0) s on true
 where w.workflow_run_id = any ($1::uuid[])

-- name: look_again
-- Steps that have yet to look back were met by events meanwhile: what they have found until now may be incomplete. The caller has locked
-- the runs.
update tidegate.workflow_run_steps s set retry_metadata = s.retry_metadata || '{"looks_again": true}'
 where s.id = any ($1::uuid[]) and s.id between tidegate.first_of($2) and tidegate.last_of($3) and s.kind = 'wait'
   and s.status = 'pending'

-- name: looks_again
-- Whether one of the steps was met by an event before it had looked back. Read after the runs are locked.
select exists (select from tidegate.workflow_run_steps s
                where s.id = any ($1::uuid[]) and s.id between tidegate.first_of($2) and tidegate.last_of($3) and s.status = 'pending'
                  and s.retry_metadata ? 'looks_again')

-- name: is_overtaken
-- Whether an event of one of the types ($1) that came before the one with the sequence ($2) is undecided. What this transaction has
-- claimed it does not see any more.
select exists (select from unnest($1::text[], $2::bigint[]) as u (type, ingress_sequence),
                      lateral (select i.event_id from tidegate.event_inbox i where i.ingress_sequence < u.ingress_sequence offset 0) i
                 join tidegate.workflow_events e on e.id = i.event_id
                where e.type = u.type)

-- name: is_overtaken_in_lane
-- As `is_overtaken`, among the events of a source ($3) and priority ($4).
select exists (select from unnest($1::text[], $2::bigint[], $3::text[], $4::bigint[]) as u (type, ingress_sequence, source, priority),
                      lateral (select i.event_id from tidegate.event_inbox i
                                where i.source = u.source and i.priority = u.priority and i.ingress_sequence < u.ingress_sequence
                               offset 0) i
                 join tidegate.workflow_events e on e.id = i.event_id
                where e.type = u.type)

-- name: list_taken
-- The events that waits of the runs were given before.
select w.workflow_run_id, w.met_event_id from tidegate.event_waits w
 where w.workflow_run_id = any ($1::uuid[]) and w.met_event_id is not null
union all
select s.workflow_run_id, (jsonb_array_elements_text(s.retry_metadata -> 'events'))::uuid
  from unnest($1::uuid[]) as u (run_id)
  join tidegate.workflow_run_steps s
    on s.id between tidegate.first_of(u.run_id) and tidegate.last_of(u.run_id) and s.workflow_run_id = u.run_id
 where s.kind = 'wait' and s.retry_metadata ? 'events'

-- name: keep
-- Patterns of `wait_all` keep their events until the others have theirs; their steps note which. The caller has locked the runs.
with kept as (
  update tidegate.event_waits w set met_event_id = u.event_id, met_event = u.event::json
    from unnest($1::uuid[], $2::uuid[], $3::text[]) as u (id, event_id, event)
   where w.id = u.id
  returning w.step_id, w.number, w.met_event_id
)
update tidegate.workflow_run_steps s
   set retry_metadata = s.retry_metadata || jsonb_build_object('kept', coalesce(s.retry_metadata -> 'kept', '{}') || k.events)
  from (select step_id, jsonb_object_agg(number::text, met_event_id) as events from kept group by step_id) k
 where s.id = k.step_id and s.id between tidegate.first_of($4) and tidegate.last_of($5) and s.kind = 'wait' and s.status = 'pending'

-- name: complete
-- Steps whose events have come: they have their result, and their waits end. The caller has locked the runs. Returns the steps, with
-- their names.
with gone as (
  delete from tidegate.event_waits where step_id = any ($1::uuid[]) and workflow_run_id = any ($4::uuid[])
)
update tidegate.workflow_run_steps s
   set status = 'succeeded', retry_state = 'completed', next_attempt_at = null, result = u.result::json,
       retry_metadata = s.retry_metadata - '{looked_back,looks_again,kept}'::text[] || jsonb_build_object('events', u.events::jsonb),
       claim_generation = s.claim_generation + 1, updated_at = tidegate.now()
  from unnest($1::uuid[], $2::text[], $3::text[]) as u (id, result, events)
 where s.id = u.id and s.id between tidegate.first_of($5) and tidegate.last_of($6) and s.kind = 'wait' and s.status = 'pending'
returning s.id, s.name

-- name: request_cancel
-- Events ($3) cancel runs: the worker that holds or claims one ends it before its next step. The step that registered the wait ($2) notes
-- the event, so that it does not cancel the run again when an operator retries it. Returns the ids of those that were not to be
-- cancelled before.
with asked as (
  update tidegate.workflow_runs r
     set cancel_requested_at = tidegate.now(), cancelled_by = 'event ' || u.event_id, updated_at = tidegate.now()
    from unnest($1::uuid[], $3::uuid[]) as u (id, event_id)
   where r.id = u.id and r.status in ('pending', 'running') and r.cancel_requested_at is null
  returning r.id
), noted as (
  update tidegate.workflow_run_steps s
     set retry_metadata = s.retry_metadata
           || jsonb_build_object('events', coalesce(s.retry_metadata -> 'events', '[]') || to_jsonb(u.event_id::text))
    from unnest($1::uuid[], $2::uuid[], $3::uuid[]) as u (id, step_id, event_id)
   where s.id = u.step_id and u.id in (select id from asked)
)
select id from asked

-- name: close
-- Waits that ended without an event: their steps were cut off by the function.
delete from tidegate.event_waits where step_id = any ($1::uuid[]) and workflow_run_id = any ($2::uuid[])

-- name: list_deciding
-- The transactions that are deciding events now: they share the lock of the triggers (`locks.share`). A wait that is committed before this
-- is read may be unknown to them, and is known to all that come after them.
select distinct l.virtualtransaction from pg_locks l
 where l.locktype = 'advisory' and l.classid = 8702 and l.objid = 0 and l.mode = 'ShareLock' and l.granted
   and l.database = (select d.oid from pg_database d where d.datname = current_database()) and l.pid <> pg_backend_pid()

-- name: still_deciding
-- Whether one of these transactions has not ended.
select exists (select from pg_locks l where l.virtualtransaction = any ($1::text[]) and l.locktype = 'advisory' and l.classid = 8702
                  and l.granted)

-- name: list_of_steps
-- The open waits of steps that are to look back, and their runs' parameters. Not locked: what is found is checked again under the lock.
select w.*, r.parameters
  from tidegate.event_waits w
  left join tidegate.workflow_runs r on r.id = w.workflow_run_id and r.status in ('pending', 'running')
 where w.step_id = any ($1::uuid[]) and w.workflow_run_id = any ($2::uuid[]) and w.met_event_id is null

-- fragment: may_meet
-- Whether an event has passed the gate and may be what a wait is for: of its type, with its values, since its time (a delayed event comes at
-- its time), and let through before its end. What is undecided, held, expired or dead-lettered has not passed.
e.type = w.event_type and e.ingress_sequence > u.after_sequence
              and greatest(e.received_at, e.deliver_at) >= coalesce(w.since, '-infinity')
              and e.received_at < coalesce(w.until, 'infinity') and e.payload @> w.contained
              and not exists (select from tidegate.event_inbox i where i.ingress_sequence = e.ingress_sequence)
              and not exists (select from tidegate.event_ingress_retries h where h.event_id = e.id
                                 and (h.retry_state <> 'completed' or h.updated_at >= coalesce(w.until, 'infinity')))
              and not exists (select from tidegate.dead_letters d
                               where d.kind = 'event' and d.subject_id = e.id and d.replayed_at is null)

-- name: look_back
-- For each wait the first events, after a place, that have passed the gate and may be what it waits for. $3 are the least ids that can be
-- meant: of earlier days only delayed events are read.
select u.n, {{events.event}}
  from unnest($1::uuid[], $2::bigint[], $3::uuid[]) with ordinality as u (id, after_sequence, least_id, n)
  join tidegate.event_waits w on w.id = u.id,
  lateral (select e.*
             from ((select e.* from tidegate.workflow_events e
                     where e.id >= u.least_id and {{may_meet}}
                     order by e.ingress_sequence limit $4)
                   union all
                   (select e.* from tidegate.workflow_events e
                     where e.id < u.least_id and e.deliver_at is not null and {{may_meet}}
                     order by e.ingress_sequence limit $4)) e
            order by e.ingress_sequence limit $4) e

-- name: lock_held
-- Locks those of the runs that their workers still hold, in the order of their ids. Returns the ids, and whether each is to be cancelled.
select r.id, r.cancel_requested_at is not null
  from unnest($1::uuid[], $2::bigint[]) as u (id, claim_generation), tidegate.workflow_runs r
 where r.id = u.id and {{runs.is_held}} and r.claim_generation = u.claim_generation
 order by r.id for no key update of r

-- name: looked_back
-- Steps have looked back: when their runs resume, they need not do so again.
update tidegate.workflow_run_steps s
   set retry_metadata = s.retry_metadata - 'looks_again' || '{"looked_back": true}', updated_at = tidegate.now(),
       status = case when s.next_attempt_at is null then 'succeeded' else s.status end
 where s.id = any ($1::uuid[]) and s.id between tidegate.first_of($2) and tidegate.last_of($3) and s.kind = 'wait'
   and s.status = 'pending'

-- name: time_out
-- Steps whose time is over, and whose events have not come, have the result null; their waits end. The caller has locked the runs.
with gone as (
  delete from tidegate.event_waits where step_id = any ($1::uuid[]) and workflow_run_id = any ($4::uuid[])
)
update tidegate.workflow_run_steps s
   set status = 'succeeded', retry_state = 'completed', next_attempt_at = null, result = 'null',
       retry_metadata = s.retry_metadata || '{"timed_out": true}', claim_generation = s.claim_generation + 1,
       updated_at = tidegate.now()
 where s.id = any ($1::uuid[]) and s.id between tidegate.first_of($2) and tidegate.last_of($3) and s.kind = 'wait'
   and s.status = 'pending'

-- name: list_states
-- Whether steps are done, and their results.
select s.id, s.status, s.result from tidegate.workflow_run_steps s
 where s.id = any ($1::uuid[]) and s.id between tidegate.first_of($2) and tidegate.last_of($3)
