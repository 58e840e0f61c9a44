-- fragment: trigger
-- A trigger as its record has it.
t.id, t.workflow_definition_id, w.slug as workflow, t.name, t.event_type, t.event_source, t.predicates,
       t."where", t.parameter_template, t.idempotency_key, t.idempotency_window_ms, t.concurrency_key,
       t.throttle_count, t.throttle_window_ms, t.max_concurrency, t.retry, t.breaker, t.overlap, t.key, t.collect, t.priority,
       t.skip_over_count, t.skip_over_window_ms, t.cancel_running, t.budgets, t.backlog, t.holds, t.status, t.version,
       t.created_by, t.updated_by, t.created_at, t.updated_at

-- fragment: triggers
-- Triggers with their workflow.
tidegate.workflow_event_triggers t
  join tidegate.workflow_definitions w on w.id = t.workflow_definition_id

-- fragment: definition
-- A workflow as its record has it.
id, slug, kind, parameters, config, version, created_by, updated_by, created_at, updated_at
  from tidegate.workflow_definitions

-- name: registry_version
-- The number that every change of a definition or trigger raises.
select version from tidegate.registry_version

-- name: list_active
-- Every active trigger with its workflow, in a stable order.
select {{trigger}}, w.parameters as parameter_names
  from {{triggers}}
 where t.status = 'active' and t.deleted_at is null
 order by t.created_at, t.id

-- name: list_of_workflow
-- A page of the triggers of one workflow, oldest first, after a given one ($2).
select {{trigger}}
  from {{triggers}}
 where w.slug = $1 and t.deleted_at is null
   and ($2::uuid is null
        or (t.created_at, t.id) > (select a.created_at, a.id from tidegate.workflow_event_triggers a where a.id = $2))
 order by t.created_at, t.id
 limit $3

-- name: list_all
-- A page of the triggers that are not deleted, by workflow and name, after a given one ($1).
select {{trigger}}
  from {{triggers}}
 where t.deleted_at is null
   and ($1::uuid is null
        or (w.slug, t.name) > (select b.slug, a.name from tidegate.workflow_event_triggers a
                                 join tidegate.workflow_definitions b on b.id = a.workflow_definition_id where a.id = $1))
 order by w.slug, t.name
 limit $2

-- name: get
-- One trigger, unless it is deleted.
select {{trigger}}
  from {{triggers}}
 where t.id = $1 and t.deleted_at is null

-- name: create
-- Creates a trigger; nothing when its workflow has one of that name. Returns its id.
insert into tidegate.workflow_event_triggers
  (id, workflow_definition_id, name, event_type, event_source, predicates, "where", parameter_template,
   idempotency_key, idempotency_window_ms, concurrency_key, throttle_count, throttle_window_ms, max_concurrency, retry,
   breaker, overlap, key, collect, priority, skip_over_count, skip_over_window_ms, cancel_running, budgets, backlog, holds,
   status, created_by, updated_by)
values ($1, $2, $3, $4, $5, $6::text::jsonb, $7, $8::text::jsonb, $9, $10, $11, $12, $13, $14, $15::text::jsonb,
        $16::text::jsonb, $17, $18, $19::text::jsonb, $20, $21, $22, $23, $24::text[], $25::text::jsonb, $26, $27, $28, $28)
on conflict (workflow_definition_id, name) where deleted_at is null do nothing
returning id

-- name: update
-- Makes a trigger as given; nothing when it is deleted or another of its workflow has the name. Returns its id.
update tidegate.workflow_event_triggers t
   set name = $2, event_type = $3, event_source = $4, predicates = $5::text::jsonb, "where" = $6,
       parameter_template = $7::text::jsonb, idempotency_key = $8, idempotency_window_ms = $9, concurrency_key = $10,
       throttle_count = $11, throttle_window_ms = $12, max_concurrency = $13, retry = $14::text::jsonb,
       breaker = $15::text::jsonb, overlap = $16, key = $17, collect = $18::text::jsonb, priority = $19,
       skip_over_count = $20, skip_over_window_ms = $21, cancel_running = $22, budgets = $23::text[], backlog = $24::text::jsonb,
       holds = $25, status = $26, version = t.version + 1, updated_by = $27, updated_at = tidegate.now()
 where t.id = $1 and t.deleted_at is null
   and not exists (select 1 from tidegate.workflow_event_triggers o
                    where o.workflow_definition_id = t.workflow_definition_id and o.name = $2 and o.id <> t.id
                      and o.deleted_at is null)
returning t.id

-- name: delete
-- Marks a trigger as deleted; its deliveries and versions stay. Returns its id.
update tidegate.workflow_event_triggers t
   set deleted_at = tidegate.now(), version = t.version + 1, updated_by = $2, updated_at = tidegate.now()
 where t.id = $1 and t.deleted_at is null
returning t.id

-- name: list_versions
-- The versions of a trigger, newest first.
select v.version, v.definition, v.changed_by, v.changed_at
  from tidegate.workflow_event_trigger_versions v
 where v.trigger_id = $1 and ($2::bigint is null or v.version < $2)
 order by v.version desc
 limit $3

-- name: states
-- The pause, breaker and waiting deliveries of triggers, and how many of their runs wait for a slot to go on.
select t.id as trigger_id, g.paused_at, g.paused_until, g.pause_reason, g.paused_by,
       coalesce(g.breaker_state, 'closed') as breaker_state, g.breaker_until, g.breaker_reason, g.probe_run_id,
       w.waiting, w.next_attempt_at,
       (select count(*) from tidegate.slot_waits q join tidegate.workflow_runs r on {{slot_lines.is_waiting}}
         where r.trigger_id = t.id) as resuming
  from unnest($1::uuid[]) as t (id)
  left join tidegate.event_scheduler_triggers g on g.trigger_id = t.id,
       lateral (select count(*) as waiting, min(d.next_attempt_at) as next_attempt_at
                  from tidegate.workflow_trigger_deliveries d
                 where d.trigger_id = t.id and d.retry_state = 'scheduled') w

-- name: upsert_definition
-- Creates or updates a definition; one that is the same already, or of another kind, is left alone. Returns its id when
-- it wrote.
insert into tidegate.workflow_definitions as w (id, slug, kind, parameters, config, created_by, updated_by)
values ($1, $2, $3, $4::text::jsonb, $5::text::jsonb, $6, $6)
on conflict (slug) where deleted_at is null do update
   set kind = excluded.kind, parameters = excluded.parameters, config = excluded.config, version = w.version + 1,
       updated_by = excluded.updated_by, updated_at = tidegate.now()
 where w.kind = excluded.kind and (w.parameters, w.config) is distinct from (excluded.parameters, excluded.config)
returning id

-- name: delete_definition
-- Marks a workflow as deleted; what it did stays, of its config only what is given. Returns its id.
update tidegate.workflow_definitions w
   set deleted_at = tidegate.now(), config = $2::text::jsonb, version = w.version + 1, updated_by = $3,
       updated_at = tidegate.now()
 where w.id = $1 and w.deleted_at is null
returning w.id

-- name: list_unfinished_runs
-- Some runs of a workflow that have not ended.
(select r.id from tidegate.workflow_runs r where r.workflow_definition_id = $1 and r.status = 'running' limit $2)
union all
(select r.id from tidegate.workflow_runs r where r.workflow_definition_id = $1 and r.status = 'pending' limit $2)
limit $2

-- name: list_of_kind
-- The workflows of one kind.
select id, slug from tidegate.workflow_definitions where kind = $1 and deleted_at is null order by slug

-- name: upsert_trigger
-- What code says about a workflow's trigger of that name: creates it or makes it so. When the code has said the same
-- before ($28), nothing changes: what an operator has edited, or deleted, since then stays. A row of which is not known
-- what the code said is compared field by field. Returns the id when it wrote.
insert into tidegate.workflow_event_triggers as t
  (id, workflow_definition_id, name, event_type, event_source, predicates, "where", parameter_template,
   idempotency_key, idempotency_window_ms, concurrency_key, throttle_count, throttle_window_ms, max_concurrency, retry,
   breaker, overlap, key, collect, priority, skip_over_count, skip_over_window_ms, cancel_running, budgets, backlog, holds,
   created_by, updated_by, declared)
select $1, $2, $3, $4, $5, $6::text::jsonb, $7, $8::text::jsonb, $9, $10, $11, $12, $13, $14, $15::text::jsonb,
       $16::text::jsonb, $17, $18, $19::text::jsonb, $20, $21, $22, $23, $24::text[], $25::text::jsonb, $26, $27, $27, $28::text::jsonb
 where exists (select 1 from tidegate.workflow_event_triggers o
                where o.workflow_definition_id = $2 and o.name = $3 and o.deleted_at is null)
    or (select o.declared from tidegate.workflow_event_triggers o
         where o.workflow_definition_id = $2 and o.name = $3 and o.deleted_at is not null
         order by o.deleted_at desc, o.id desc limit 1) is distinct from $28::text::jsonb
on conflict (workflow_definition_id, name) where deleted_at is null do update
   set event_type = excluded.event_type, event_source = excluded.event_source, predicates = excluded.predicates,
       "where" = excluded."where", parameter_template = excluded.parameter_template,
       idempotency_key = excluded.idempotency_key, idempotency_window_ms = excluded.idempotency_window_ms,
       concurrency_key = excluded.concurrency_key, throttle_count = excluded.throttle_count,
       throttle_window_ms = excluded.throttle_window_ms, max_concurrency = excluded.max_concurrency,
       retry = excluded.retry, breaker = excluded.breaker, overlap = excluded.overlap, key = excluded.key,
       collect = excluded.collect, priority = excluded.priority, skip_over_count = excluded.skip_over_count,
       skip_over_window_ms = excluded.skip_over_window_ms, cancel_running = excluded.cancel_running,
       budgets = excluded.budgets, backlog = excluded.backlog, holds = excluded.holds,
       declared = excluded.declared,
       version = t.version + 1, updated_by = excluded.updated_by, updated_at = tidegate.now()
 where t.declared <> excluded.declared
    or (t.declared is null
        and (t.event_type, t.event_source, t.predicates, t."where", t.parameter_template, t.idempotency_key,
             t.idempotency_window_ms, t.concurrency_key, t.throttle_count, t.throttle_window_ms, t.max_concurrency,
             t.retry, t.breaker, t.overlap, t.key, t.collect, t.priority, t.skip_over_count,
             t.skip_over_window_ms, t.cancel_running, t.budgets, t.backlog, t.holds)
            is distinct from
            (excluded.event_type, excluded.event_source, excluded.predicates, excluded."where",
             excluded.parameter_template, excluded.idempotency_key, excluded.idempotency_window_ms,
             excluded.concurrency_key, excluded.throttle_count, excluded.throttle_window_ms, excluded.max_concurrency,
             excluded.retry, excluded.breaker, excluded.overlap, excluded.key, excluded.collect, excluded.priority,
             excluded.skip_over_count, excluded.skip_over_window_ms, excluded.cancel_running, excluded.budgets, excluded.backlog,
             excluded.holds))
returning t.id

-- name: adopt
-- Keeps what the code said beside a trigger that was the same already but did not know it. The definition does not
-- change, so its version stays.
update tidegate.workflow_event_triggers
   set declared = $3::text::jsonb
 where workflow_definition_id = $1 and name = $2 and deleted_at is null and declared is null

-- name: list_definitions
-- A page of workflows, by slug.
select {{definition}} where deleted_at is null and ($1::text is null or slug > $1) order by slug limit $2

-- name: get_definition
-- One workflow by its slug.
select {{definition}} where slug = $1 and deleted_at is null
