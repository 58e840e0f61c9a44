-- name: beat
-- A worker is alive and has the code of these definitions.
insert into headgate.workers as w (name, definitions, seen_at)
values ($1, $2::uuid[], headgate.now())
on conflict (name) do update set definitions = excluded.definitions, seen_at = excluded.seen_at

-- name: leave
-- A worker has stopped.
delete from headgate.workers where name = $1

-- name: forget
-- Workers that have not been seen for so long ($1 ms) are gone.
delete from headgate.workers where seen_at < headgate.now() - $1::bigint * interval '1 ms'

-- name: unserved
-- Workflows with due runs that no worker seen within $1 ms has the code of: how many, and since when.
select d.slug as workflow, count(*) as waiting, min(r.next_attempt_at) as since
  from headgate.workflow_runs r
  join headgate.workflow_definitions d on d.id = r.workflow_definition_id
 where r.status = 'pending' and r.next_attempt_at <= headgate.now() - $2::bigint * interval '1 ms'
   and not exists (select 1 from headgate.workers w
                    where w.seen_at > headgate.now() - $1::bigint * interval '1 ms' and d.id = any (w.definitions))
 group by d.slug order by d.slug
