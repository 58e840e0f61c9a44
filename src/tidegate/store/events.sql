-- fragment: input
-- The events to store, and the time. An empty array means null in every row; a type or source that all events share is given once.
-- The commit waits for the disk whatever the session's setting: a connection pooler may have dropped the setting or changed
-- sessions.
input as materialized (
  select u.id, u.external_id, coalesce(u.type, ($3::text[])[1]) as type, coalesce(u.source, ($4::text[])[1]) as source,
         u.occurred_at, u.payload, u.ttl_ms, coalesce(u.metadata, '{}') as metadata, u.correlation_id, u.traceparent, u.origin, u.priority,
         nextval('tidegate.ingress_sequence') as ingress_sequence
    from unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::timestamptz[], $6::text[], $7::bigint[],
                $8::text[], $9::text[], $10::text[], $11::text[], $12::bigint[])
      as u (id, external_id, type, source, occurred_at, payload, ttl_ms, metadata, correlation_id, traceparent, origin,
            priority)
), clock as materialized (
  select tidegate.now() as now where set_config('synchronous_commit', 'on', true) = 'on'
)

-- fragment: store_events
-- Stores the events of `input`.
insert into tidegate.workflow_events
  (id, external_id, type, source, occurred_at, received_at, ingress_sequence, payload, correlation_id, ttl_ms,
   metadata, traceparent, origin, priority)
select id, external_id, type, source, coalesce(occurred_at, now), now, ingress_sequence, payload::jsonb,
       coalesce(correlation_id, id::text), ttl_ms, metadata::jsonb, traceparent, origin::jsonb, priority
  from input, clock

-- fragment: name_events
-- Takes the producers' ids of `input`. Rows go in by these ids, so that two transactions with the same ids wait for each other instead
-- of deadlocking.
insert into tidegate.event_external_ids (external_id, source, event_id)
select external_id, source, id from input where external_id is not null order by external_id, source, ingress_sequence

-- fragment: event
-- The columns of an event, in the order of `model.event.Event`.
e.id, e.external_id, e.type, e.source, e.occurred_at, e.received_at, e.ingress_sequence, e.payload,
       e.correlation_id, e.ttl_ms, e.metadata, e.traceparent, e.replayed_at, e.deliver_at, e.origin, e.priority

-- fragment: filters
-- The filters of lists; null does not filter. $6 is the correlation id as an event's own id, if it may be one: the index has only
-- the correlation ids that are not the event's own id.
($1::text is null or e.type = $1)
   and ($2::text is null or e.source = $2)
   and ($3::text is null or (e.id = $6::uuid and e.correlation_id = $3)
        or (e.correlation_id = $3 and e.correlation_id <> e.id::text))

-- fragment: claim_oldest
-- Takes the events of `oldest` out of the inbox, for this transaction alone; rolled back, they are there again.
-- The arrays keep to index lookups: with joins, a plan created while the tables were small reads all history. The least and the
-- greatest id have the days decided once that are read, and not for each event.
-- The same statement takes the shared locks that let this transaction launch for their sources (as `locks.share`, in its order).
-- What those locks protect is read by a later statement: this one sees the tables as they were before it waited. What it
-- reads itself does not change. The time is read once the locks are held, and is returned with the first event.
claimed as (
  delete from tidegate.event_inbox where ingress_sequence = any (array(select ingress_sequence from oldest))
  returning event_id
), found as materialized (
  select id, external_id, type, source, occurred_at, received_at, ingress_sequence, payload, correlation_id, ttl_ms,
         nullif(metadata, '{}') as metadata, traceparent, origin, priority
    from tidegate.workflow_events
   where id = any (array(select event_id from claimed))
     and id >= (select event_id from claimed order by event_id limit 1)
     and id <= (select event_id from claimed order by event_id desc limit 1)
), shared as materialized (
  select pg_advisory_xact_lock_shared(k.class, k.key)
    from (select 8701 as class, hashtext(f.source) & 63 as key from found f
          union select c.class, c.key from (values (8701, hashtext('*') & 63), (8702, 0)) as c (class, key)
                 where exists (select from found)
          order by 1, 2) k
), moment as materialized (
  select tidegate.now() as now where (select count(*) from shared) > 0
)
select f.*, case when f.ingress_sequence = (select min(ingress_sequence) from found) then m.now end as now
  from found f, moment m order by f.ingress_sequence

-- name: insert
-- Stores events and their inbox rows, except those that are stored already; returns the ids that are new.
with {{input}}, named as (
  {{name_events}}
  on conflict do nothing
  returning event_id
), stored as (
  {{store_events}}
   where external_id is null or id in (select event_id from named)
  on conflict do nothing
  returning id, ingress_sequence, source, priority
), inboxed as (
  insert into tidegate.event_inbox (ingress_sequence, event_id, source, priority)
  select ingress_sequence, id, source, coalesce(priority, 1) from stored
)
select id from stored

-- name: insert_new
-- Stores events that are all expected to be new, in two thirds of the time that `insert` takes. If one is stored already, the
-- statement fails by a unique key and nothing is stored.
with {{input}}, named as (
  {{name_events}}
), stored as (
  {{store_events}}
)
insert into tidegate.event_inbox (ingress_sequence, event_id, source, priority)
select ingress_sequence, id, source, coalesce(priority, 1) from input

-- name: insert_later
-- As `insert`, for a batch in which some events ($13) are for a later time: at $14, or $15 ms from now. Those are not in the inbox: they
-- wait with the reason `scheduled`. A time that has passed already means now.
with {{input}}, later as materialized (
  select u.id, coalesce(u.deliver_at, clock.now + u.delay_ms * interval '1 ms') as deliver_at
    from unnest($13::uuid[], $14::timestamptz[], $15::bigint[]) as u (id, deliver_at, delay_ms), clock
), named as (
  {{name_events}}
  on conflict do nothing
  returning event_id
), stored as (
  insert into tidegate.workflow_events
    (id, external_id, type, source, occurred_at, received_at, ingress_sequence, payload, correlation_id, ttl_ms,
     metadata, traceparent, origin, priority, deliver_at)
  select id, external_id, type, source, coalesce(occurred_at, now), now, ingress_sequence, payload::jsonb,
         coalesce(correlation_id, id::text), ttl_ms, metadata::jsonb, traceparent, origin::jsonb, priority, later.deliver_at
    from input left join later using (id), clock
   where external_id is null or id in (select event_id from named)
  on conflict do nothing
  returning id, source, ingress_sequence, priority, received_at, deliver_at
), waiting as (
  insert into tidegate.event_ingress_retries
    (event_id, source, ingress_sequence, next_attempt_at, reason, last_error, metadata, created_at, updated_at)
  select id, source, ingress_sequence, deliver_at, 'scheduled', 'published for a later time',
         jsonb_build_object('reason', 'scheduled', 'until', deliver_at), received_at, received_at
    from stored where deliver_at > received_at
), recorded as (
  insert into tidegate.event_decisions (event_id, at, stage, decision, reason, until)
  select id, received_at, 'gate', 'scheduled', 'published for a later time', deliver_at
    from stored where deliver_at > received_at
), inboxed as (
  insert into tidegate.event_inbox (ingress_sequence, event_id, source, priority)
  select ingress_sequence, id, source, coalesce(priority, 1) from stored where deliver_at is null or deliver_at <= received_at
)
select id from stored

-- name: probe
-- Stores an event as publishing does, in a transaction that is rolled back: a check that publishing works.
with stored as (
  insert into tidegate.workflow_events (id, type, source, occurred_at, payload, correlation_id)
  values (tidegate.uuid7(), 'tidegate.probe', 'tidegate', tidegate.now(), '{}', 'probe')
  returning ingress_sequence, id, source
)
insert into tidegate.event_inbox (ingress_sequence, event_id, source) select ingress_sequence, id, source from stored

-- name: resolve
-- For events that were not new: the stored event with the same id or producer's id, and whether the bodies agree.
-- The time counts only when the repeat carries one; the correlation id names the request, not the content.
select u.id as given_id, e.id,
       e.id = u.id or (
         e.type = u.type and e.payload = u.payload::jsonb and e.metadata = u.metadata::jsonb
         and e.ttl_ms is not distinct from u.ttl_ms
         and (u.occurred_at is null or e.occurred_at = u.occurred_at)
         and e.deliver_at is not distinct from coalesce(u.deliver_at, e.received_at + u.delay_ms * interval '1 ms')) as same_body
  from unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::timestamptz[], $6::text[], $7::bigint[],
              $8::text[], $9::timestamptz[], $10::bigint[])
    as u (id, external_id, type, source, occurred_at, payload, ttl_ms, metadata, deliver_at, delay_ms),
  lateral (
    select * from tidegate.workflow_events where id = u.id
    union all
    select e.* from tidegate.event_external_ids x join tidegate.workflow_events e on e.id = x.event_id
     where x.external_id = u.external_id and x.source = u.source and x.event_id <> u.id
    limit 1
  ) e

-- name: claim_inbox
-- Takes the oldest undecided events out of the inbox.
with oldest as materialized (
  select ingress_sequence from tidegate.event_inbox order by ingress_sequence limit $1 for update skip locked
), {{claim_oldest}}

-- name: claim_inbox_one
-- Takes one given event out of the inbox; nothing when it has been decided meanwhile.
with given as materialized (
  select ingress_sequence from tidegate.event_inbox where ingress_sequence = $1 for update skip locked
), claimed as (
  delete from tidegate.event_inbox where ingress_sequence in (select ingress_sequence from given) returning event_id
)
select e.id, e.external_id, e.type, e.source, e.occurred_at, e.received_at, e.ingress_sequence, e.payload,
       e.correlation_id, e.ttl_ms, e.metadata, e.traceparent, e.replayed_at, e.deliver_at, e.origin, e.priority
  from claimed join tidegate.workflow_events e on e.id = claimed.event_id

-- name: first_in_lane
-- The first event of the lane of a given one in the inbox, locked: waits for the transaction that has claimed it, if any.
select first.ingress_sequence
  from tidegate.event_inbox i,
       lateral (select l.ingress_sequence from tidegate.event_inbox l where l.source = i.source and l.priority = i.priority
                 order by l.ingress_sequence limit 1 for update) first
 where i.ingress_sequence = $1

-- name: renumber
-- Delayed events have arrived: each has a new number in the order of arrival.
update tidegate.workflow_events e set ingress_sequence = u.ingress_sequence
  from unnest($1::uuid[], $2::bigint[]) as u (id, ingress_sequence)
 where e.id = u.id and e.id = any ($1::uuid[]) and e.id between $3 and $4

-- name: list_inbox
-- The oldest undecided events, without locking them.
select ingress_sequence from tidegate.event_inbox order by ingress_sequence limit $1

-- name: dead_letter
-- Takes an event that no batch can process out of the inbox and keeps it as a dead letter with the reason. Returns it
-- when it was still there.
with claimed as (
  delete from tidegate.event_inbox where ingress_sequence = $1 returning event_id
), buried as (
  insert into tidegate.dead_letters (id, kind, subject_id, event_id, reason)
  select tidegate.uuid7(), 'event', event_id, event_id, $2 from claimed
  on conflict (kind, subject_id) where replayed_at is null do nothing
)
select e.id, e.source, e.correlation_id from claimed join tidegate.workflow_events e on e.id = claimed.event_id

-- name: find
-- Events by our id or the producer's.
select {{event}}
  from tidegate.workflow_events e where e.id = $1::uuid
union all
select {{event}}
  from tidegate.event_external_ids x join tidegate.workflow_events e on e.id = x.event_id
 where x.external_id = $2 and e.id is distinct from $1::uuid
 limit 20

-- name: get_many
-- Events by our ids, of which $2 is the least and $3 the greatest: only their days are read.
select {{event}}
  from tidegate.workflow_events e where e.id = any ($1::uuid[]) and e.id between $2 and $3

-- name: correlation_id
-- The correlation id of one event, even when its other columns cannot be read.
select e.correlation_id from tidegate.workflow_events e where e.id = $1

-- name: set_traceparents
-- Names the traces of events that came without one.
update tidegate.workflow_events e set traceparent = u.traceparent
  from unnest($1::uuid[], $2::text[]) as u (id, traceparent)
 where e.id = u.id and e.id = any ($1::uuid[]) and e.id between $3 and $4

-- name: list
-- A page of events, newest first; null filters do not filter. $6 is the correlation id as an event's own id, if it may be one:
-- only correlations with others are in the index.
select {{event}}
  from tidegate.workflow_events e
 where {{filters}}
   and ($4::bigint is null or e.ingress_sequence < $4)
 order by e.ingress_sequence desc
 limit $5

-- name: list_between
-- The same for events received at or after $7 and before $8, by the time of their receipt. The cursor has that time ($9), too:
-- the page before ended within the events that share it.
select {{event}}
  from tidegate.workflow_events e
 where {{filters}}
   and e.received_at >= $7::timestamptz and e.received_at < $8::timestamptz
   and e.received_at <= coalesce($9::timestamptz, 'infinity')
   and ($9::timestamptz is null or (e.received_at, e.ingress_sequence) < ($9, $4::bigint))
 order by e.received_at desc, e.ingress_sequence desc
 limit $5
