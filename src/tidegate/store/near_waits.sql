-- name: awaited_types
-- The types of events that runs wait for, at most $1; each is read from the index once.
with recursive found as (
  (select w.event_type, 1 as n from tidegate.event_waits w where w.met_event_id is null order by w.event_type, w.paths, w.key limit 1)
  union all
  select w.event_type, f.n + 1
    from found f,
         lateral (select w.event_type from tidegate.event_waits w
                   where w.event_type > f.event_type and w.met_event_id is null
                   order by w.event_type, w.paths, w.key limit 1) w
   where f.n < $1::bigint
)
select event_type from found

-- name: by_key
-- Open waits for events with these types, fields and values, of each at most $4.
select {{side}}
  from unnest($1::text[], $2::text[], $3::text[]) as u (event_type, paths, key),
       lateral (select w.* from tidegate.event_waits w
                 where w.event_type = u.event_type and w.paths = u.paths and w.key = u.key and w.met_event_id is null
                 limit $4::bigint) w,
       {{of_run}}

-- name: by_fields
-- Open waits for events with these types, by these fields, whatever their values are; of each at most $3.
select {{side}}
  from unnest($1::text[], $2::text[]) as u (event_type, paths),
       lateral (select w.* from tidegate.event_waits w
                 where w.event_type = u.event_type and w.paths = u.paths and w.met_event_id is null
                 order by w.event_type, w.paths, w.key limit $3::bigint) w,
       {{of_run}}

-- name: of_run
-- The open waits of a run.
select {{side}} from tidegate.event_waits w, {{of_run}} where w.workflow_run_id = $1 and w.met_event_id is null

-- fragment: side
-- A wait, as far as near misses are told by it: the pattern is kept with its step.
w.workflow_run_id as run_id, r.workflow, r.source, s.name as step, w.mode, s.retry_metadata -> 'waits_for' -> w.number::integer as pattern,
       w.after_sequence, w.since, w.until, r.parameters

-- fragment: of_run
-- The run and the step of a wait.
lateral (select d.slug as workflow, r.parameters, e.source
           from tidegate.workflow_runs r
           join tidegate.workflow_definitions d on d.id = r.workflow_definition_id
           left join tidegate.workflow_events e on e.id = r.event_id
          where r.id = w.workflow_run_id and r.status in ('pending', 'running') offset 0) r,
       lateral (select s.name, s.retry_metadata from tidegate.workflow_run_steps s where s.id = w.step_id offset 0) s

-- name: event_types
-- The types of the events of the days since the one that begins with the id $1, at most $2; each is read from the index once.
with recursive found as (
  (select e.type, 1 as n from tidegate.workflow_events e where e.id >= $1::uuid order by e.type limit 1)
  union all
  select e.type, f.n + 1
    from found f,
         lateral (select e.type from tidegate.workflow_events e where e.type > f.type and e.id >= $1::uuid order by e.type limit 1) e
   where f.n < $2::bigint
)
select type from found

-- name: recent_events
-- Of the newest $4 events of each of the types, of the days since the one that begins with the id $3: those that contain one of the
-- values $2, which come first, or lack one of the fields $5; at most $6. With whether each has passed its gate. One by one, so that the plan
-- cannot sort all events of a type.
with recursive newest as (
  select u.type, e.id, e.ingress_sequence, 1 as n
    from unnest($1::text[]) as u (type),
         lateral (select e.id, e.ingress_sequence from tidegate.workflow_events e where e.type = u.type and e.id >= $3::uuid
                   order by e.ingress_sequence desc limit 1) e
  union all
  select f.type, e.id, e.ingress_sequence, f.n + 1
    from newest f,
         lateral (select e.id, e.ingress_sequence from tidegate.workflow_events e
                   where e.type = f.type and e.ingress_sequence < f.ingress_sequence and e.id >= $3::uuid
                   order by e.ingress_sequence desc limit 1) e
   where f.n < $4::bigint
)
select {{events.event}},
       (select i.event_id from tidegate.event_inbox i where i.ingress_sequence = e.ingress_sequence) is null
         and (select h.event_id from tidegate.event_ingress_retries h
               where h.event_id = e.id and h.retry_state <> 'completed' limit 1) is null as has_passed
  from newest f, lateral (select e.* from tidegate.workflow_events e where e.id = f.id offset 0) e,
       lateral (select e.payload @> any (array(select v::jsonb from unnest($2::text[]) as t (v))) as has_value offset 0) c
 where c.has_value or not e.payload ?& $5::text[]
 order by c.has_value desc, e.ingress_sequence desc limit $6::bigint
