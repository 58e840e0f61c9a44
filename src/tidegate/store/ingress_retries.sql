-- name: list_scheduled
-- Waiting rows in the order in which they become due, after a given place; a null place means from the first.
select r.* from tidegate.event_ingress_retries r
 where r.retry_state = 'scheduled'
   and ($1::timestamptz is null or (r.next_attempt_at, r.event_id) > ($1, $2::uuid))
 order by r.next_attempt_at, r.event_id
 limit $3

-- name: hold
-- Keeps events that the gate refused, with their slots, in the transaction that decided so. Returns nothing to check: an
-- event leaves the inbox once, so it has no row yet.
insert into tidegate.event_ingress_retries
  (event_id, source, ingress_sequence, retry_state, attempts, next_attempt_at, reason, last_error, metadata,
   plan_version)
select u.event_id, u.source, u.ingress_sequence, u.retry_state, u.attempts, u.next_attempt_at, u.reason, u.last_error,
       u.metadata::jsonb, u.plan_version
  from unnest($1::uuid[], $2::text[], $3::bigint[], $4::text[], $5::bigint[], $6::timestamptz[], $7::text[],
              $8::text[], $9::text[], $10::bigint[])
    as u (event_id, source, ingress_sequence, retry_state, attempts, next_attempt_at, reason, last_error, metadata,
          plan_version)

-- name: due_sources
-- Sources with due events, the longest due first. The first 500 due events are enough, unless few sources have that many
-- that other sources may come after them: then the index is walked from source to source, and a backlog costs no more than a
-- single event.
with recursive first_due as materialized (
  select r.source, r.next_attempt_at from tidegate.event_ingress_retries r
   where r.retry_state = 'scheduled' and r.next_attempt_at <= tidegate.now() and r.reason is distinct from 'scheduled'
   order by r.next_attempt_at limit 500
), enough as materialized (
  select count(*) < 500 or count(distinct source) >= $1 as is_enough from first_due
), waiting (source) as (
  (select r.source from tidegate.event_ingress_retries r
    where r.retry_state = 'scheduled' and r.reason is distinct from 'scheduled' and not (select is_enough from enough)
    order by r.source limit 1)
  union all
  select (select r.source from tidegate.event_ingress_retries r
           where r.retry_state = 'scheduled' and r.reason is distinct from 'scheduled' and r.source > w.source
           order by r.source limit 1)
    from waiting w where w.source is not null
)
select found.source
  from (
    select source, min(next_attempt_at) as due_at from first_due where (select is_enough from enough) group by source
    union all
    select w.source, first.next_attempt_at
      from waiting w,
           lateral (select r.next_attempt_at from tidegate.event_ingress_retries r
                     where r.source = w.source and r.retry_state = 'scheduled' and r.reason is distinct from 'scheduled'
                     order by r.next_attempt_at limit 1) first
     where first.next_attempt_at <= tidegate.now()
  ) found
 order by found.due_at
 limit $1

-- name: take_due
-- Locks due events of a source, in the order of their slots, or that one of them ($4). The caller knows that no new plan is
-- in progress.
select r.event_id, r.attempts, r.reason, r.claim_generation, r.next_attempt_at
  from tidegate.event_ingress_retries r
 where r.source = $1 and r.retry_state = 'scheduled' and r.reason is distinct from 'scheduled' and r.next_attempt_at <= $2
   and ($4::uuid is null or r.event_id = $4)
 order by r.next_attempt_at, r.ingress_sequence
 limit $3
   for update of r skip locked

-- name: first_due
-- The event of a source whose slot has come first, not locked.
select r.event_id from tidegate.event_ingress_retries r
 where r.source = $1 and r.retry_state = 'scheduled' and r.reason is distinct from 'scheduled'
   and r.next_attempt_at <= tidegate.now()
 order by r.next_attempt_at, r.ingress_sequence
 limit 1

-- name: take_stale
-- Locks waiting events of a source whose slot belongs to an older plan, in the order of arrival, after a given one.
-- The event is looked up row by row: with a join, a plan created while the tables were small reads all history.
select r.event_id, r.attempts, r.next_attempt_at, r.ingress_sequence,
       (select coalesce(e.replayed_at, greatest(e.received_at, e.deliver_at)) from tidegate.workflow_events e
         where e.id = r.event_id) as received_at,
       (select e.correlation_id from tidegate.workflow_events e where e.id = r.event_id) as correlation_id
  from tidegate.event_ingress_retries r
 where r.source = $1 and r.retry_state = 'scheduled' and r.reason is distinct from 'scheduled' and r.plan_version < $2
   and r.ingress_sequence > $3
 order by r.ingress_sequence
 limit $4
   for update of r

-- name: keep_order
-- Reassigns the slots of a source's waiting events, from a given one on, in arrival order: workers that took batches at the
-- same time may have given the later events the earlier slots. Not when more than $3 stand behind it (it came very
-- late). Only rows of the current plan take part: the others get new slots anyway. One that changes meanwhile stays.
with waiting as materialized (
  select r.event_id, r.claim_generation, r.next_attempt_at, r.ingress_sequence
    from tidegate.event_ingress_retries r
   where r.source = $1 and r.retry_state = 'scheduled' and r.reason is distinct from 'scheduled' and r.ingress_sequence >= $2
     and r.plan_version = (select s.plan_version from tidegate.event_scheduler_sources s where s.source = $1)
   order by r.ingress_sequence limit $3::int + 1
), line as materialized (
  select w.*, row_number() over (order by w.ingress_sequence) as place,
         row_number() over (order by w.next_attempt_at, w.ingress_sequence) as turn
    from waiting w where (select count(*) from waiting) <= $3::int
)
update tidegate.event_ingress_retries r
   set next_attempt_at = slot.next_attempt_at, claim_generation = r.claim_generation + 1, updated_at = tidegate.now(),
       metadata = r.metadata || jsonb_build_object('until', slot.next_attempt_at)
  from line mine join line slot on slot.turn = mine.place
 where r.event_id = mine.event_id and r.claim_generation = mine.claim_generation and r.retry_state = 'scheduled'
   and r.next_attempt_at <> slot.next_attempt_at

-- name: list_arrived
-- The events that were published for a later time which has come, in the order of their times, not locked: ids and sources.
select r.event_id, r.source from tidegate.event_ingress_retries r
 where r.retry_state = 'scheduled' and r.reason = 'scheduled' and r.next_attempt_at <= tidegate.now()
 order by r.next_attempt_at, r.ingress_sequence
 limit $1

-- name: take_arrived
-- Locks those of the events that still wait for their time and have reached it, in the order of their times; each with a new
-- number in the order of arrival: it is from now on that it stands in its source's line.
select a.*, nextval('tidegate.ingress_sequence') as arrival
  from (select r.event_id, r.attempts, r.reason, r.claim_generation, r.next_attempt_at
          from tidegate.event_ingress_retries r
         where r.event_id = any ($1::uuid[]) and r.retry_state = 'scheduled' and r.reason = 'scheduled' and r.next_attempt_at <= $2
         order by r.next_attempt_at, r.ingress_sequence
           for update of r skip locked) a

-- name: join_line
-- Events that this transaction has locked stand in their source's line: they were refused at their time.
update tidegate.event_ingress_retries r
   set ingress_sequence = u.ingress_sequence, attempts = u.attempts, next_attempt_at = u.next_attempt_at, reason = u.reason,
       last_error = u.last_error, metadata = u.metadata::jsonb, plan_version = u.plan_version,
       claim_generation = r.claim_generation + 1, updated_at = tidegate.now()
  from unnest($1::uuid[], $2::bigint[], $3::bigint[], $4::timestamptz[], $5::text[], $6::text[], $7::text[], $8::bigint[])
    as u (event_id, ingress_sequence, attempts, next_attempt_at, reason, last_error, metadata, plan_version)
 where r.event_id = u.event_id and r.retry_state = 'scheduled'

-- name: settle
-- Writes what became of rows that this transaction has locked.
update tidegate.event_ingress_retries r
   set retry_state = u.retry_state, attempts = u.attempts, next_attempt_at = u.next_attempt_at, reason = u.reason,
       last_error = u.last_error, metadata = u.metadata::jsonb, plan_version = u.plan_version,
       claim_generation = r.claim_generation + 1, updated_at = tidegate.now()
  from unnest($1::uuid[], $2::text[], $3::bigint[], $4::timestamptz[], $5::text[], $6::text[], $7::text[],
              $8::bigint[])
    as u (event_id, retry_state, attempts, next_attempt_at, reason, last_error, metadata, plan_version)
 where r.event_id = u.event_id and r.retry_state = 'scheduled'

-- name: next_due
-- Seconds until the next waiting event that is not due yet, or null.
select extract(epoch from min(next_attempt_at) - tidegate.now())::float8
  from tidegate.event_ingress_retries
 where retry_state = 'scheduled' and next_attempt_at > tidegate.now()

-- name: cancel
-- Cancels events that wait, those with a given reason if one is given; locked in the order in which a new plan locks them.
-- Returns what it cancelled.
with waiting as materialized (
  select event_id from tidegate.event_ingress_retries
   where event_id = any ($1::uuid[]) and retry_state = 'scheduled' and ($3::text is null or reason = $3)
   order by source, ingress_sequence for update
)
update tidegate.event_ingress_retries r
   set retry_state = 'cancelled', last_error = $2, claim_generation = r.claim_generation + 1, updated_at = tidegate.now()
  from waiting w
 where r.event_id = w.event_id and r.retry_state = 'scheduled'
returning r.event_id, r.source, r.attempts

-- name: force
-- Makes events that wait due now, in their source's current plan; otherwise as `cancel`.
with waiting as materialized (
  select event_id from tidegate.event_ingress_retries
   where event_id = any ($1::uuid[]) and retry_state = 'scheduled' and ($2::text is null or reason = $2)
   order by source, ingress_sequence for update
)
update tidegate.event_ingress_retries r
   set next_attempt_at = tidegate.now(), claim_generation = r.claim_generation + 1, updated_at = tidegate.now(),
       plan_version = coalesce((select s.plan_version from tidegate.event_scheduler_sources s where s.source = r.source),
                               r.plan_version)
  from waiting w
 where r.event_id = w.event_id and r.retry_state = 'scheduled'
returning r.event_id, r.source, r.attempts

-- name: get
-- The retry row of an event.
select r.* from tidegate.event_ingress_retries r where r.event_id = $1

-- name: list_waiting
-- A page of waiting rows in the order in which they become due. When a row's source is paused without an end,
-- its ETA is null.
select r.event_id, e.external_id, e.type, r.source, e.correlation_id, r.retry_state, r.reason, r.attempts,
       r.next_attempt_at, r.last_error, r.metadata, r.created_at, r.updated_at,
       case when s.paused_at is not null and s.paused_until is null and r.reason is distinct from 'scheduled' then null
            else greatest(0, extract(epoch from r.next_attempt_at - tidegate.now()))::float8 end as eta_seconds
  from tidegate.event_ingress_retries r
  join tidegate.workflow_events e on e.id = r.event_id
  left join tidegate.event_scheduler_sources s on s.source = r.source
 where r.retry_state = 'scheduled'
   and ($1::text is null or r.source = $1)
   and ($2::text is null or r.reason = $2)
   and ($3::timestamptz is null or (r.next_attempt_at, r.event_id) > ($3, $4::uuid))
 order by r.next_attempt_at, r.event_id
 limit $5

-- name: list_settled
-- A page of rows that are no longer waiting, newest event first.
select r.event_id, e.external_id, e.type, r.source, e.correlation_id, r.retry_state, r.reason, r.attempts,
       null::timestamptz as next_attempt_at, r.last_error, r.metadata, r.created_at, r.updated_at,
       null::float8 as eta_seconds
  from tidegate.event_ingress_retries r
  join tidegate.workflow_events e on e.id = r.event_id
 where r.retry_state = $1
   and ($2::text is null or r.source = $2)
   and ($3::text is null or r.reason = $3)
   and ($4::uuid is null or r.event_id < $4)
 order by r.event_id desc
 limit $5

-- name: dead_letter
-- Dead letters for exhausted events.
insert into tidegate.dead_letters (id, kind, subject_id, event_id, reason, detail)
select tidegate.uuid7(), 'event', u.event_id, u.event_id, u.reason, u.detail::jsonb
  from unnest($1::uuid[], $2::text[], $3::text[]) as u (event_id, reason, detail)
on conflict (kind, subject_id) where replayed_at is null do nothing
