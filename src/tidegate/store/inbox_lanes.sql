-- The lanes of the inbox: the events of one source with one priority.

-- fragment: of_lanes
-- The first undecided events of the lanes ($1, $2), at most so many of each ($3).
select q.ingress_sequence
  from unnest($1::text[], $2::bigint[], $3::bigint[]) as l (source, priority, most),
       lateral (select i.ingress_sequence from tidegate.event_inbox i
                 where i.source = l.source and i.priority = l.priority order by i.ingress_sequence limit l.most

-- fragment: others
-- Whether any lane but the given one ($1, $2) has undecided events. Its own entries, of which many may be dead, are not read: the order
-- has the planner begin at the neighbours in the index.
((select i.source from tidegate.event_inbox i where (i.source, i.priority) > ($1::text, $2::bigint)
   order by i.source, i.priority limit 1) is not null
 or (select i.source from tidegate.event_inbox i where (i.source, i.priority) < ($1::text, $2::bigint)
      order by i.source desc, i.priority desc limit 1) is not null)

-- name: has_others
-- Whether any lane but the given one has undecided events.
select {{others}}

-- name: claim_alone
-- As `events.claim_inbox`, at most $3 events, while no lane but the given one has undecided events; otherwise nothing. To ask by a
-- statement of its own would take a round trip for each batch of a backlog.
with oldest as materialized (
  select ingress_sequence from tidegate.event_inbox where not {{others}}
   order by ingress_sequence limit $3 for update skip locked
), {{events.claim_oldest}}

-- name: claim_others
-- As `events.claim_inbox`, at most $3 events, of the lanes beside the given one ($1, $2), which has a backlog; the first of each lane. Its
-- own entries in the index, of which many may be dead, are not read.
with after as materialized (
  select i.ingress_sequence from tidegate.event_inbox i where (i.source, i.priority) > ($1::text, $2::bigint)
   order by i.source, i.priority, i.ingress_sequence limit $3 for update skip locked
), before as materialized (
  select i.ingress_sequence from tidegate.event_inbox i where (i.source, i.priority) < ($1::text, $2::bigint)
   order by i.source, i.priority, i.ingress_sequence limit $3 for update skip locked
), oldest as materialized (
  select ingress_sequence from (select ingress_sequence from after union all select ingress_sequence from before) others
   order by ingress_sequence limit $3
), {{events.claim_oldest}}

-- name: waiting
-- The lanes that have undecided events, of at most $2 sources: by name, after the source $1, and then from the first name on. Each with the
-- weight of its source, its place in this order, and how many events it has, counted up to a bound: $2, or if there are many sources four
-- times a source's share. The index is walked from source to source, so that a backlog costs no more than a single event.
with recursive later (source, n) as (
  (select i.source, 1 from tidegate.event_inbox i where i.source > $1 order by i.source limit 1)
  union all
  select (select i.source from tidegate.event_inbox i where i.source > l.source order by i.source limit 1), l.n + 1
    from later l where l.source is not null and l.n < $2
), earlier (source, n) as (
  (select i.source, 1 from tidegate.event_inbox i
    where (select count(*) from later where source is not null) < $2 order by i.source limit 1)
  union all
  select (select i.source from tidegate.event_inbox i where i.source > e.source order by i.source limit 1), e.n + 1
    from earlier e where e.source < $1 and e.n < $2
), ring as materialized (
  select row_number() over (order by part, n) as place, source
    from (select 1 as part, n, source from later where source is not null
          union all select 2, n, source from earlier where source <= $1) both_parts
   order by part, n limit $2
), bound as materialized (
  select least($2, 4 * $2 / greatest(count(*), 1) + 1) as most from ring
)
select r.source, p.priority, coalesce(s.weight, 1) as weight, counted.waiting
  from ring r
  left join tidegate.event_scheduler_sources s on s.source = r.source
 cross join lateral (
   select generate_series((select i.priority from tidegate.event_inbox i where i.source = r.source order by i.priority limit 1),
                          (select i.priority from tidegate.event_inbox i where i.source = r.source order by i.priority desc limit 1))
     as priority) p
 cross join lateral (
   select count(*) as waiting
     from (select from tidegate.event_inbox i where i.source = r.source and i.priority = p.priority
            order by i.ingress_sequence limit (select most from bound)) w) counted
 where counted.waiting > 0
 order by r.place, p.priority

-- name: lock
-- Waits for the transactions that have claimed any of the first events of the lanes, and locks those.
select count(*) from ({{of_lanes}} for update) q) locked

-- name: claim
-- As `events.claim_inbox`, of the lanes; what they leave of $4 events is taken from the oldest of all.
with first as materialized (
  {{of_lanes}} for update skip locked) q
), rest as materialized (
  select i.ingress_sequence from tidegate.event_inbox i
   where i.ingress_sequence not in (select ingress_sequence from first)
   order by i.ingress_sequence limit greatest(0, $4::bigint - (select count(*) from first)) for update skip locked
), oldest as materialized (
  select ingress_sequence from first union all select ingress_sequence from rest
), {{events.claim_oldest}}

-- name: list
-- The first undecided events of the lanes, without locking them; what they leave of $4 events, from the oldest of all.
with first as materialized (
  {{of_lanes}}) q
), rest as (
  select i.ingress_sequence from tidegate.event_inbox i
   where i.ingress_sequence not in (select ingress_sequence from first)
   order by i.ingress_sequence limit greatest(0, $4::bigint - (select count(*) from first))
)
select ingress_sequence from first union all select ingress_sequence from rest order by 1

-- name: are_in_turn
-- As `locks.is_in_turn`, for events of several sources, of each of which the last is given: order is kept within a source ($1) and
-- priority ($2).
select pg_try_advisory_xact_lock(8703, 0)
   and not exists (select from unnest($1::text[], $2::bigint[], $3::bigint[]) as l (source, priority, last)
                    where exists (select from tidegate.event_inbox i
                                   where i.source = l.source and i.priority = l.priority and i.ingress_sequence < l.last))
