-- fragment: dead_letters
-- Dead letters with the event, delivery, step, run, trigger and workflow they belong to.
tidegate.dead_letters l
  left join tidegate.workflow_events e on e.id = l.event_id
  left join tidegate.workflow_trigger_deliveries d on l.kind = 'delivery' and d.id = l.subject_id
  left join tidegate.workflow_run_steps s on l.kind = 'step' and s.id = l.subject_id
  left join tidegate.workflow_runs r
    on r.id = case l.kind when 'run' then l.subject_id when 'step' then s.workflow_run_id end
  left join tidegate.workflow_event_triggers t on t.id = coalesce(d.trigger_id, r.trigger_id)
  left join tidegate.workflow_definitions w on w.id = coalesce(r.workflow_definition_id, t.workflow_definition_id)

-- name: list
-- A page of dead letters with what they belong to, newest first; null filters do not filter. With an id, that one.
select l.id, l.kind, l.subject_id, l.event_id, e.source, e.type as event_type, t.id as trigger_id, t.name as trigger,
       w.slug as workflow, r.id as workflow_run_id, s.name as step, l.reason, l.detail, l.created_at, l.replay_at,
       l.replay_by, l.replay_error, l.replayed_at, l.replayed_by, l.replayed_into,
       nullif(coalesce(r.replayed_from, d.replayed_from, i.replayed_from), l.id) as last_replayed_from
  from {{dead_letters}}
  left join tidegate.event_ingress_retries i on l.kind = 'event' and i.event_id = l.subject_id
 where ($1::uuid is null or l.id = $1)
   and ($2::text is null or l.kind = $2)
   and ($3::text is null or e.source = $3)
   and ($4::uuid is null or t.id = $4)
   and ($5::text is null or w.slug = $5)
   and ($6::text is null or position(lower($6) in lower(l.reason)) > 0)
   and ($7::timestamptz is null or l.created_at >= $7)
   and ($8::timestamptz is null or l.created_at < $8)
   and case $9::text when 'open' then l.replayed_at is null and l.replay_at is null
                     when 'scheduled' then l.replay_at is not null
                     when 'replayed' then l.replayed_at is not null else true end
   and ($10::uuid is null or l.id < $10)
 order by l.id desc
 limit $11

-- name: lock_matching
-- Locks the dead letters that are not replayed or scheduled for replay and that the filters (as in `list`) describe, oldest first.
-- Returns the ids.
select l.id
  from {{dead_letters}}
 where l.replayed_at is null and l.replay_at is null
   and ($1::text is null or l.kind = $1)
   and ($2::text is null or e.source = $2)
   and ($3::uuid is null or t.id = $3)
   and ($4::text is null or w.slug = $4)
   and ($5::text is null or position(lower($5) in lower(l.reason)) > 0)
   and ($6::timestamptz is null or l.created_at >= $6)
   and ($7::timestamptz is null or l.created_at < $7)
 order by l.id
   for update of l

-- name: schedule
-- Schedules the replay of locked dead letters, one after the other, $2 ms apart, from now on. Returns how many, and the times of
-- the first and the last.
with clock as materialized (
  select tidegate.now() as now
), due as (
  update tidegate.dead_letters l
     set replay_at = clock.now + (u.n - 1) * $2::float8 * interval '1 ms', replay_by = $3, replay_error = null
    from unnest($1::uuid[]) with ordinality as u (id, n), clock
   where l.id = u.id
  returning l.replay_at
)
select count(*), min(replay_at), max(replay_at) from due

-- name: unschedule
-- Cancels the scheduled replays that have not happened yet. Returns how many.
with stopped as (
  update tidegate.dead_letters l set replay_at = null, replay_by = null
   where l.id in (select id from tidegate.dead_letters where replay_at is not null order by id for update)
  returning l.id
)
select count(*) from stopped

-- name: postpone
-- When the first scheduled replay is more than $1 ms late, since no worker replayed, postpones all by as much: the rate holds. A
-- transaction that waited for the locks sees the times that another worker set. Returns how many.
with waiting as materialized (
  select id, replay_at from tidegate.dead_letters where replay_at is not null order by id for update
), late as materialized (
  select tidegate.now() - min(replay_at) as by from waiting
), moved as (
  update tidegate.dead_letters l set replay_at = w.replay_at + late.by
    from waiting w, late where l.id = w.id and late.by > $1::bigint * interval '1 ms'
  returning l.id
)
select count(*) from moved

-- name: lock
-- Locks one dead letter, and returns the newer one of the same subject that is not replayed, if there is one.
select l.id, l.kind, l.subject_id, l.event_id, l.replay_at, l.replay_by, l.replayed_at, l.replayed_by,
       (select n.id from tidegate.dead_letters n
         where n.subject_id = l.subject_id and n.kind = l.kind and n.replayed_at is null and n.id > l.id) as newer_id
  from tidegate.dead_letters l where l.id = $1 for update of l

-- name: lock_due
-- Locks a dead letter that is due for replay; nothing when another worker has it, or it was replayed or cancelled meanwhile.
select l.id, l.kind, l.subject_id, l.event_id, l.replay_at, l.replay_by, l.replayed_at, l.replayed_by,
       null::uuid as newer_id
  from tidegate.dead_letters l where l.id = $1 and l.replay_at <= tidegate.now() for update of l skip locked

-- name: list_due
-- The dead letters that are due for replay, the longest due first, not locked.
select id from tidegate.dead_letters where replay_at <= tidegate.now() order by replay_at, id limit $1

-- name: next_due
-- Seconds until the next scheduled replay, or null.
select extract(epoch from min(replay_at) - tidegate.now())::float8 from tidegate.dead_letters where replay_at is not null

-- name: mark_replayed
-- Marks a dead letter as replayed, with the actor and what it became.
update tidegate.dead_letters
   set replayed_at = tidegate.now(), replayed_by = $2, replayed_into = $3, replay_at = null, replay_by = null,
       replay_error = null
 where id = $1

-- name: mark_refused
-- Marks a dead letter that cannot be replayed, with the reason; it is not retried.
update tidegate.dead_letters set replay_at = null, replay_by = null, replay_error = $2 where id = $1

-- name: mark_waiting
-- Schedules the replay of a dead letter after a delay.
update tidegate.dead_letters
   set replay_at = tidegate.now() + $2::bigint * interval '1 ms', replay_by = $3, replay_error = $4 where id = $1

-- name: describe_event
-- An event that is to be decided again: the state of its retry, and how many deliveries it has.
select e.id, r.retry_state,
       exists (select from tidegate.event_inbox i where i.ingress_sequence = e.ingress_sequence) as is_undecided,
       (select count(*) from tidegate.workflow_trigger_deliveries d
         where d.id between tidegate.first_of(e.id) and tidegate.last_of(e.id) and d.event_id = e.id) as deliveries
  from tidegate.workflow_events e left join tidegate.event_ingress_retries r on r.event_id = e.id
 where e.id = $1

-- name: count_anew
-- Counts the event's time to live and age from now on.
update tidegate.workflow_events set replayed_at = tidegate.now() where id = $1

-- name: replay_event
-- Makes a dead-lettered event due at its source's gate, in the source's current plan. Returns the id if it did. The caller has locked
-- the dead letter, so no other transaction does the same.
with due as materialized (
  select e.id, e.source, e.ingress_sequence, tidegate.now() as next_attempt_at, 'replayed by ' || $3::text as last_error,
         jsonb_build_object('reason', 'replay', 'dead_letter_id', $2::uuid) as metadata,
         coalesce((select s.plan_version from tidegate.event_scheduler_sources s where s.source = e.source), 0) as plan_version
    from tidegate.workflow_events e where e.id = $1
), held_before as (
  update tidegate.event_ingress_retries r
     set retry_state = 'scheduled', attempts = 1, next_attempt_at = due.next_attempt_at, reason = 'replay',
         last_error = due.last_error, metadata = due.metadata, plan_version = due.plan_version, replayed_from = $2::uuid,
         claim_generation = r.claim_generation + 1, updated_at = tidegate.now()
    from due where r.event_id = due.id and r.retry_state not in ('scheduled', 'running')
  returning r.event_id
), held_first as (
  insert into tidegate.event_ingress_retries
    (event_id, source, ingress_sequence, retry_state, attempts, next_attempt_at, reason, last_error, metadata, plan_version,
     replayed_from)
  select due.id, due.source, due.ingress_sequence, 'scheduled', 1, due.next_attempt_at, 'replay', due.last_error, due.metadata,
         due.plan_version, $2::uuid
    from due where not exists (select from tidegate.event_ingress_retries r where r.event_id = due.id)
  returning event_id
)
select event_id from held_before union all select event_id from held_first

-- name: describe_delivery
-- A delivery that is to be decided again, and its trigger.
select d.status, d.retry_state, d.trigger_id, t.status as trigger_status, t.deleted_at is not null as is_trigger_deleted
  from tidegate.workflow_trigger_deliveries d join tidegate.workflow_event_triggers t on t.id = d.trigger_id
 where d.id = $1

-- name: replay_delivery
-- Makes a dead-lettered delivery due, in its trigger's current plan; attempts start again at 0. Returns the id if it did.
update tidegate.workflow_trigger_deliveries d
   set status = 'matched', retry_state = 'scheduled', next_attempt_at = tidegate.now(), retry_attempts = 0,
       throttled_until = null, workflow_run_id = null, reason = 'replay', last_error = 'replayed by ' || $3::text,
       retry_metadata = jsonb_build_object('reason', 'replay', 'dead_letter_id', $2::uuid), replayed_from = $2::uuid,
       source = e.source, ingress_sequence = e.ingress_sequence, backlog_key = null, stale_at = null,
       plan_version = coalesce((select g.plan_version from tidegate.event_scheduler_triggers g
                                 where g.trigger_id = d.trigger_id), d.plan_version),
       claim_generation = d.claim_generation + 1, updated_at = tidegate.now()
  from tidegate.workflow_events e
 where d.id = $1 and e.id = d.event_id and d.status in ('failed', 'exhausted', 'skipped', 'cancelled')
   and d.retry_state not in ('scheduled', 'running')
returning d.id

-- name: describe_run
-- A run that is to resume, by its own id or a step's: what it is, and whether its workflow still exists.
select r.id, r.status, r.trigger_id, coalesce(r.concurrency_key, r.slot_key) as concurrency_key, w.slug as workflow, w.deleted_at is not null as is_workflow_deleted,
       r.event_id, r.error, r.finished_at, r.cancelled_by, r.attempts, r.window_id
  from tidegate.workflow_runs r join tidegate.workflow_definitions w on w.id = r.workflow_definition_id
 where r.id = $1 or r.id = (select s.workflow_run_id from tidegate.workflow_run_steps s where s.id = $1)

-- name: keep_story
-- Keeps the event of a run, and all that came of it, from being pruned until the commit.
select e.id from tidegate.workflow_events e
 where e.id = (select r.event_id from tidegate.workflow_runs r where r.id = $1) for key share

-- fragment: is_decided
-- The step is an approval that somebody has decided.
(s.kind = 'wait' and s.retry_metadata @> '{"reason": "approval"}' and s.retry_metadata ? 'events')

-- fragment: is_asked
-- The step is an approval.
(s.kind = 'wait' and s.retry_metadata @> '{"reason": "approval"}')

-- fragment: is_unfinished
-- The run had not finished the step; one that its function had cut off counts only if that came with the failure.
(s.status in ('pending', 'running', 'cancelled') and (s.error is distinct from 'cut off by the workflow' or s.updated_at >= f.at))

-- name: revive_steps
-- Resets what a failed or cancelled run had not finished. The step that it failed with ($2, or if that is not known one after which
-- none has succeeded) is pending again; those that waited, or were cut off with the failure, start again, and what cancels
-- the run is registered again, with the events that have done so. Finished steps stay, also those whose failure the function had caught. Of a step with children,
-- those that failed, or were cancelled with their parent, wait to be resumed (`resumes`), or started again if their run does not exist; those
-- that have not ended, or were retried by themselves, go on. An approval that was
-- decided before it was cut off with the failure has its decision again: it is not asked for twice. One that nobody has decided is asked for
-- again; its row stays, since later steps may be finished: the code that resumes the run may be another version, and asks for it before them.
-- Returns how many children had a run that does not exist any more.
with failure as materialized (
  select coalesce((select s.updated_at from tidegate.workflow_run_steps s where s.id = $2), r.finished_at)
         - interval '1 second' as at, r.status
    from tidegate.workflow_runs r where r.id = $1 and r.status in ('failed', 'cancelled')
), forgotten as (
  delete from tidegate.workflow_run_steps s using failure f
   where s.id between tidegate.first_of($1) and tidegate.last_of($1) and s.workflow_run_id = $1
     and {{is_unfinished}} and (s.kind not in ('child', 'map') or s.status = 'cancelled')
     and s.retry_metadata ->> 'reason' is distinct from 'cancel_on' and not {{is_asked}}
  returning s.id
), asked_again as (
  update tidegate.workflow_run_steps s
     set status = 'cancelled', retry_state = 'cancelled', next_attempt_at = null, retry_metadata = s.retry_metadata || '{"revived": true}',
         claim_generation = s.claim_generation + 1, updated_at = tidegate.now()
    from failure f
   where s.id between tidegate.first_of($1) and tidegate.last_of($1) and s.workflow_run_id = $1
     and {{is_unfinished}} and {{is_asked}} and not {{is_decided}}
), decided as (
  update tidegate.workflow_run_steps s
     set status = 'succeeded', retry_state = 'completed', error = null, claim_generation = s.claim_generation + 1, updated_at = tidegate.now()
    from failure f
   where s.id between tidegate.first_of($1) and tidegate.last_of($1) and s.workflow_run_id = $1
     and s.status = 'cancelled' and s.updated_at >= f.at and {{is_decided}}
), cancels as (
  update tidegate.workflow_run_steps s set status = 'pending', updated_at = tidegate.now() from failure
   where s.id between tidegate.first_of($1) and tidegate.last_of($1) and s.workflow_run_id = $1
     and s.kind = 'wait' and s.status = 'succeeded' and s.retry_metadata ->> 'reason' = 'cancel_on'
), revived as materialized (
  select s.id from tidegate.workflow_run_steps s, failure
   where s.id between tidegate.first_of($1) and tidegate.last_of($1) and s.workflow_run_id = $1
     and ((s.status = 'failed'
           and (s.id = $2 or (failure.status = 'cancelled' and s.kind in ('child', 'map') and s.updated_at >= failure.at)
                or ($2::uuid is null and failure.status = 'failed' and not exists (
                  select from tidegate.workflow_run_steps o
                   where o.id between tidegate.first_of($1) and tidegate.last_of($1) and o.workflow_run_id = $1
                     and o.status = 'succeeded' and o.updated_at > s.updated_at))))
          or (s.status = 'pending' and s.kind in ('child', 'map')))
), kept as (
  delete from tidegate.run_cancellations where run_id = $1
), again as (
  update tidegate.run_children c
     set status = case when k.goes_on then 'started' else 'waiting' end, event_id = case when k.goes_on then c.event_id end,
         child_run_id = case when k.goes_on then c.child_run_id end, resumes = k.id, result = null, error = null,
         updated_at = tidegate.now()
    from tidegate.run_children f
    left join lateral (select r.id, r.status in ('pending', 'running') as goes_on from tidegate.workflow_runs r
                        where r.id = f.child_run_id offset 0) k on true
   where f.step_id between tidegate.first_of($1) and tidegate.last_of($1) and f.status in ('failed', 'cancelled')
     and f.step_id in (select id from revived union all select id from forgotten)
     and c.step_id = f.step_id and c.position = f.position
  returning k.id is null and f.child_run_id is not null as is_gone
), reset as (
update tidegate.workflow_run_steps s
   set status = 'pending', retry_state = 'none', next_attempt_at = null, retry_attempts = 0, error = null, result = null,
       retry_metadata = case when s.kind in ('child', 'map') then s.retry_metadata || '{"revived": true}' else '{}' end, claim_generation = s.claim_generation + 1,
       created_at = case when s.kind in ('child', 'map') then s.created_at else tidegate.now() end,
       updated_at = tidegate.now()
  from revived where s.id = revived.id
)
select count(*) from again where is_gone

-- name: replay_run
-- Resumes a failed or cancelled run as the same run, not before its trigger or key is open again; its time and its retries are counted from
-- the start (`attempts` is kept: it shows that there may be steps). Returns the id if it did.
update tidegate.workflow_runs r
   set status = 'pending', error = null, output = null, warning = null, finished_at = null, started_at = null,
       deadline_at = null, not_before = null, crashes = 0, trials = null, retry_attempts = 0, cancel_requested_at = null, cancelled_by = null,
       is_probe = false, concurrency_key = $3, slot_key = case when $4::boolean then $3 end, replayed_from = $2::uuid, attempts = greatest(r.attempts, 1),
       next_attempt_at = greatest(
         tidegate.now(),
         (select g.closed_until from tidegate.event_scheduler_triggers g where g.trigger_id = r.trigger_id),
         (select h.until from tidegate.trigger_key_holds h
           where h.trigger_id = r.trigger_id and h.concurrency_key = $3)),
       claim_generation = r.claim_generation + 1, updated_at = tidegate.now()
 where r.id = $1 and r.status in ('failed', 'cancelled')
returning r.id

-- name: open_of_run
-- The newest dead letter of a run or one of its steps that was not replayed.
select l.id from tidegate.dead_letters l
 where l.replayed_at is null
   and l.subject_id = any (array[$1::uuid] || array(select s.id from tidegate.workflow_run_steps s
                                                     where s.id between tidegate.first_of($1) and tidegate.last_of($1)
                                                       and s.workflow_run_id = $1))
 order by l.id desc limit 1

-- name: wait_for_slot
-- Keeps a run that is to resume when its trigger has a free slot as a dead letter that is due after $4 ms.
insert into tidegate.dead_letters (id, kind, subject_id, event_id, reason, replay_at, replay_by, replay_error)
select tidegate.uuid7(), 'run', r.id, r.event_id, coalesce(split_part(r.error, E'\n', 1), r.status),
       tidegate.now() + $4::bigint * interval '1 ms', $2, $3
  from tidegate.workflow_runs r where r.id = $1
on conflict (kind, subject_id) where replayed_at is null do nothing

-- name: schedule_runs
-- Has failed or cancelled runs ($1) resume now, for those who ask ($2): their newest open dead letter is due, or they get one. Waits for
-- nobody: whoever has locked the letter replays it.
with asked as materialized (
  select r.id, r.event_id, coalesce(split_part(r.error, E'\n', 1), r.status) as reason, u.actor,
         (select l.id from tidegate.dead_letters l
           where l.replayed_at is null
             and l.subject_id = any (array[r.id] || array(select s.id from tidegate.workflow_run_steps s
                                                           where s.id between tidegate.first_of(r.id) and tidegate.last_of(r.id)
                                                             and s.workflow_run_id = r.id))
           order by l.id desc limit 1) as letter_id
    from unnest($1::uuid[], $2::text[]) as u (id, actor)
    join tidegate.workflow_runs r on r.id = u.id and r.status in ('failed', 'cancelled')
), free as materialized (
  select l.id from tidegate.dead_letters l where l.id in (select letter_id from asked) and l.replayed_at is null
   order by l.id for update skip locked
), due as (
  update tidegate.dead_letters l set replay_at = tidegate.now(), replay_by = a.actor, replay_error = null
    from asked a join free f on f.id = a.letter_id where l.id = f.id
)
insert into tidegate.dead_letters (id, kind, subject_id, event_id, reason, replay_at, replay_by)
select tidegate.uuid7(), 'run', a.id, a.event_id, a.reason, tidegate.now(), a.actor from asked a where a.letter_id is null
on conflict (kind, subject_id) where replayed_at is null do nothing
