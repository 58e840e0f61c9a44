-- Due runs by workflow. In each statement $1 are the workflows, $3 is the worker, $4 its lease in ms, $5 how many crashes make a suspect:
-- suspects are left to `runs.claim_suspect`.

-- name: due_workflows
-- Those of the given workflows that have due runs which the worker may claim: their slugs, whether concurrency keys divide
-- their runs, and the highest priority of their triggers. The longest due first; $2 of them at most.
select d.id, w.slug,
       exists (select from tidegate.workflow_event_triggers t
                where t.workflow_definition_id = d.id and t.concurrency_key is not null and t.max_concurrency is not null
                  and t.deleted_at is null) as has_keys,
       coalesce((select max(t.priority) from tidegate.workflow_event_triggers t
                  where t.workflow_definition_id = d.id and t.deleted_at is null), 1) as weight
  from unnest($1::uuid[]) as d (id) join tidegate.workflow_definitions w on w.id = d.id,
       lateral (select r.next_attempt_at from tidegate.workflow_runs r
                 where r.status = 'pending' and r.next_attempt_at <= tidegate.now() and r.workflow_definition_id = d.id
                   and r.crashes < $5::bigint and {{runs.is_for_worker}}
                 order by r.next_attempt_at, r.id limit 1) first
 order by first.next_attempt_at limit $2

-- name: list_due
-- The longest due runs of each of the workflows, at most so many of each ($2), the longest due first; not locked.
select d.id as workflow_definition_id, q.id, coalesce(q.concurrency_key, q.slot_key) as concurrency_key
  from unnest($1::uuid[], $2::bigint[]) as d (id, most),
       lateral (select r.id, r.concurrency_key, r.slot_key, r.next_attempt_at from tidegate.workflow_runs r
                 where r.status = 'pending' and r.next_attempt_at <= tidegate.now() and r.workflow_definition_id = d.id
                   and r.crashes < $5::bigint and {{runs.is_for_worker}}
                 order by r.next_attempt_at, r.id limit d.most) q
 order by q.next_attempt_at, q.id

-- name: claim
-- As `runs.claim_due`, of the given runs ($6, of which $7 is the least and $8 the greatest) alone; those that another worker has
-- claimed meanwhile are left out.
with due as materialized (
  select id from tidegate.workflow_runs r
   where r.id = any ($6::uuid[]) and r.id between $7 and $8 and status = 'pending' and next_attempt_at <= tidegate.now()
     and workflow_definition_id = any ($1::uuid[]) and crashes < $5::bigint and {{runs.is_for_worker}}
   order by id limit $2 for update skip locked
), {{runs.claim}}
