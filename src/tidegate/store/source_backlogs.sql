-- name: list
-- The sources that have a cap on what waits.
select s.source, s.max_waiting, s.when_full from tidegate.event_scheduler_sources s where s.max_waiting is not null

-- name: lock
-- Those of the sources ($1) that have a cap, with it and how many of their events wait, counted no further than $2 beyond it. From here on
-- until the commit nobody else publishes for them.
select s.source, s.max_waiting, s.when_full, tidegate.waiting_events(s.source, s.max_waiting + $2::bigint) as waiting
  from (select s.source, s.max_waiting, s.when_full from tidegate.event_scheduler_sources s
         where s.source = any ($1::text[]) and s.max_waiting is not null order by hashtext(s.source), s.source offset 0) s

-- name: known
-- Those of the producers' ids ($1) of sources ($2) that were published before.
select x.external_id, x.source from unnest($1::text[], $2::text[]) as u (external_id, source)
  join tidegate.event_external_ids x on x.external_id = u.external_id and x.source = u.source

-- name: drop_oldest
-- The oldest waiting events of a source leave. Returns how many.
select tidegate.drop_oldest_events($1, $2, $3)

-- name: dead_letter
-- New events of a source that is full become dead letters. Returns how many.
select tidegate.dead_letter_events($1::uuid[], $2)

-- name: set
-- A cap on what waits of a source, or none (nulls).
insert into tidegate.event_scheduler_sources as s (source, max_waiting, when_full, updated_by)
values ($1, $2, $3, $4)
on conflict (source) do update
   set max_waiting = excluded.max_waiting, when_full = excluded.when_full, version = s.version + 1, updated_by = excluded.updated_by,
       updated_at = tidegate.now()

-- name: filling
-- The sources of which at least the share $1 of what may wait does, the fullest first; at most $2.
select s.source, w.waiting, s.max_waiting, s.when_full
  from tidegate.event_scheduler_sources s
 cross join lateral (select (select count(*) from (select from tidegate.event_inbox i where i.source = s.source limit s.max_waiting) u)
                          + (select count(*) from (select from tidegate.event_ingress_retries r
                              where r.source = s.source and r.retry_state = 'scheduled' and r.reason is distinct from 'scheduled'
                              limit s.max_waiting) h) as waiting) w
 where s.max_waiting is not null and w.waiting >= $1::float8 * s.max_waiting
 order by w.waiting / s.max_waiting::float8 desc, s.source
 limit $2
