-- Backlogs of triggers: how many deliveries wait, and those that leave for a newcomer or because they are too old. Of a trigger without `key` (an
-- empty key here) every waiting delivery counts, of one with it those that began to wait by that key. A start counts, and never leaves;
-- a delivery that is being replayed does neither until it is decided. The caller holds the triggers' locks.

-- fragment: droppable
-- Whether a delivery may leave.
d.retry_state = 'scheduled' and d.reason <> 'replay'
   and not exists (select from tidegate.workflow_events e where e.id = d.event_id and e.origin ? 'trigger_id')

-- fragment: changed
-- A delivery that has left, as `LeftDelivery` has it.
d.id, d.event_id, d.retry_attempts, d.trigger_id, d.concurrency_key, w.reason, d.budget, d.budget_key,
       case when w.reason in ('throttle', 'paused', 'breaker_open') then w.next_attempt_at end as freed_at

-- fragment: told
-- The lines of the events' stories; $1 is the time.
told as (
  insert into tidegate.event_decisions (event_id, at, stage, decision, reason, attempt, trigger_id)
  select l.event_id, $1, 'deliver', 'skipped', l.last_error, l.retry_attempts, l.trigger_id from gone l
)

-- name: waiting
-- How many deliveries of triggers ($1) and keys ($2) wait, counted no further than $3 of each.
select u.trigger_id, u.key,
       case when u.key = '' then
         (select count(*) from (select from tidegate.workflow_trigger_deliveries d
                                 where d.trigger_id = u.trigger_id and d.retry_state = 'scheduled' and d.reason <> 'replay' limit u.most) w)
       else
         (select count(*) from (select from tidegate.workflow_trigger_deliveries d
                                 where d.trigger_id = u.trigger_id and d.backlog_key = u.key and d.backlog_key <> '' and d.retry_state = 'scheduled'
                                   and d.reason <> 'replay' limit u.most) w)
       end as waiting
  from unnest($1::uuid[], $2::text[], $3::bigint[]) as u (trigger_id, key, most)

-- name: leave_oldest
-- The oldest deliveries of triggers ($2) and keys ($3), as many as $4 of each, are skipped with a text ($5). Returns them.
with oldest as materialized (
  select w.id, w.reason, w.next_attempt_at, u.said
    from unnest($2::uuid[], $3::text[], $4::bigint[], $5::text[]) as u (trigger_id, key, number, said),
         lateral ((select d.id, d.reason, d.next_attempt_at from tidegate.workflow_trigger_deliveries d
                    where u.key = '' and d.trigger_id = u.trigger_id and {{droppable}}
                    order by d.ingress_sequence limit u.number)
                  union all
                  (select d.id, d.reason, d.next_attempt_at from tidegate.workflow_trigger_deliveries d
                    where u.key <> '' and d.trigger_id = u.trigger_id and d.backlog_key = u.key and d.backlog_key <> '' and {{droppable}}
                    order by d.ingress_sequence limit u.number)) w
), gone as (
  update tidegate.workflow_trigger_deliveries d
     set status = 'skipped', retry_state = 'none', next_attempt_at = null, throttled_until = null, reason = 'backlog_full',
         last_error = w.said, claim_generation = d.claim_generation + 1, updated_at = $1
    from oldest w where d.id = w.id and d.retry_state = 'scheduled'
  returning {{changed}}, d.last_error
), {{told}}
select g.id, g.event_id, g.retry_attempts, g.trigger_id, g.concurrency_key, g.reason, g.budget, g.budget_key, g.freed_at from gone g

-- name: supersede
-- Of triggers ($2) and keys ($3) only the latest waits: what came before the newcomer ($4 its event, $5 its place in the order of arrival), or
-- before a later one that waits already, is skipped. Returns it.
with older as materialized (
  select w.id, w.reason, w.next_attempt_at, case when l.ingress_sequence > u.place then l.event_id else u.event_id end as by_event
    from unnest($2::uuid[], $3::text[], $4::uuid[], $5::bigint[]) as u (trigger_id, key, event_id, place)
   cross join lateral (select d.event_id, d.ingress_sequence from tidegate.workflow_trigger_deliveries d
                        where u.key = '' and d.trigger_id = u.trigger_id and {{droppable}}
                        union all
                       select d.event_id, d.ingress_sequence from tidegate.workflow_trigger_deliveries d
                        where u.key <> '' and d.trigger_id = u.trigger_id and d.backlog_key = u.key and d.backlog_key <> '' and {{droppable}}
                        order by ingress_sequence desc limit 1) l
   cross join lateral (select d.id, d.reason, d.next_attempt_at from tidegate.workflow_trigger_deliveries d
                        where u.key = '' and d.trigger_id = u.trigger_id and d.ingress_sequence < greatest(u.place, l.ingress_sequence)
                          and {{droppable}}
                        union all
                       select d.id, d.reason, d.next_attempt_at from tidegate.workflow_trigger_deliveries d
                        where u.key <> '' and d.trigger_id = u.trigger_id and d.backlog_key = u.key and d.backlog_key <> ''
                          and d.ingress_sequence < greatest(u.place, l.ingress_sequence) and {{droppable}}) w
), gone as (
  update tidegate.workflow_trigger_deliveries d
     set status = 'skipped', retry_state = 'none', next_attempt_at = null, throttled_until = null, reason = 'superseded',
         last_error = 'event ' || w.by_event || ' came later, and the trigger keeps the latest (keep)',
         claim_generation = d.claim_generation + 1, updated_at = $1
    from older w where d.id = w.id and d.retry_state = 'scheduled'
  returning {{changed}}, d.last_error
), {{told}}
select g.id, g.event_id, g.retry_attempts, g.trigger_id, g.concurrency_key, g.reason, g.budget, g.budget_key, g.freed_at from gone g

-- name: close_up
-- Those in a trigger's line move up into the times ($2) of those that have left it, in the order of arrival. Nothing moves if more than $3 are
-- in line. Returns how many are, and the last time of the line before and after.
with line as materialized (
  select d.id, d.next_attempt_at, row_number() over (order by d.ingress_sequence) as place
    from (select d.id, d.next_attempt_at, d.ingress_sequence from tidegate.workflow_trigger_deliveries d
           where d.trigger_id = $1 and d.retry_state = 'scheduled'
             and d.reason not in ('concurrency', 'source_paused', 'budget') and d.reason in ('throttle', 'paused', 'breaker_open')
           limit $3::int + 1) d
), times as materialized (
  select t.at, row_number() over (order by t.at) as place
    from (select l.next_attempt_at as at from line l union all select unnest($2::timestamptz[])) t
), up as (
  update tidegate.workflow_trigger_deliveries d
     set next_attempt_at = t.at, claim_generation = d.claim_generation + 1, updated_at = tidegate.now(),
         throttled_until = case when d.status = 'throttled' then t.at end,
         retry_metadata = d.retry_metadata || jsonb_build_object('until', t.at)
    from line l join times t on t.place = l.place
   where d.id = l.id and d.retry_state = 'scheduled' and d.next_attempt_at <> t.at and (select count(*) from line) <= $3::int
)
select (select count(*) from line) as number, max(t.at) as before,
       max(t.at) filter (where t.place <= (select count(*) from line)) as after
  from times t

-- name: list_stale
-- Deliveries that have waited too long, the longest first, at most $1: with their trigger and its name, not locked.
select d.id, d.trigger_id, f.slug || '/' || t.name as trigger
  from tidegate.workflow_trigger_deliveries d
  join tidegate.workflow_event_triggers t on t.id = d.trigger_id
  join tidegate.workflow_definitions f on f.id = t.workflow_definition_id
 where d.retry_state = 'scheduled' and d.stale_at <= tidegate.now()
 order by d.stale_at limit $1

-- name: leave_stale
-- Those of the deliveries ($2) that have waited too long, at the time $1, are skipped. Returns them.
with late as materialized (
  select d.id, d.reason, d.next_attempt_at from tidegate.workflow_trigger_deliveries d
   where d.id = any ($2::uuid[]) and d.retry_state = 'scheduled' and d.stale_at <= $1
   order by d.trigger_id, d.ingress_sequence for update of d
), gone as (
  update tidegate.workflow_trigger_deliveries d
     set status = 'skipped', retry_state = 'none', next_attempt_at = null, throttled_until = null, reason = 'max_wait',
         last_error = $3 || coalesce(': ' || d.last_error, ''), claim_generation = d.claim_generation + 1, updated_at = $1
    from late w where d.id = w.id and d.retry_state = 'scheduled'
  returning {{changed}}, d.last_error
), {{told}}
select g.id, g.event_id, g.retry_attempts, g.trigger_id, g.concurrency_key, g.reason, g.budget, g.budget_key, g.freed_at from gone g

-- name: next_stale
-- Seconds until the next delivery has waited too long, or null.
select extract(epoch from min(d.stale_at) - tidegate.now())::float8 from tidegate.workflow_trigger_deliveries d
 where d.retry_state = 'scheduled' and d.stale_at is not null

-- name: filling
-- Triggers, and of those with `key` the fullest key, of which at least the share $1 of what may wait does; at most $2.
select t.id as trigger_id, f.slug as workflow, t.name, b.backlog_key as key, b.waiting, (t.backlog ->> 'max_waiting')::bigint as max_waiting,
       t.backlog ->> 'when_full' as when_full
  from tidegate.workflow_event_triggers t
  join tidegate.workflow_definitions f on f.id = t.workflow_definition_id
 cross join lateral (select coalesce(case when t.key is not null then d.backlog_key end, '') as backlog_key, count(*) as waiting
                       from tidegate.workflow_trigger_deliveries d
                      where d.trigger_id = t.id and d.retry_state = 'scheduled' and d.reason <> 'replay'
                        and (t.key is null or d.backlog_key <> '')
                      group by 1 order by 2 desc limit 1) b
 where t.backlog ->> 'max_waiting' is not null and t.deleted_at is null and t.status = 'active'
   and b.waiting >= $1::float8 * (t.backlog ->> 'max_waiting')::bigint
 order by b.waiting / (t.backlog ->> 'max_waiting')::float8 desc, t.id
 limit $2
