-- name: registry_version
-- The number that every change of a definition or trigger raises.
select version from headgate.registry_version

-- name: list_active
-- Every active trigger with its workflow, in a stable order.
select t.id, t.workflow_definition_id, w.slug as workflow, t.name, t.event_type, t.event_source, t.predicates,
       t."where", t.parameter_template, t.idempotency_key, t.idempotency_window_ms, t.concurrency_key,
       t.throttle_count, t.throttle_window_ms, t.max_concurrency, t.retry, t.status, t.version, t.created_by,
       t.updated_by, t.created_at, t.updated_at, w.parameters as parameter_names
  from headgate.workflow_event_triggers t
  join headgate.workflow_definitions w on w.id = t.workflow_definition_id
 where t.status = 'active' and t.deleted_at is null
 order by t.created_at, t.id

-- name: list_of_workflow
-- The triggers of one workflow.
select t.id, t.workflow_definition_id, w.slug as workflow, t.name, t.event_type, t.event_source, t.predicates,
       t."where", t.parameter_template, t.idempotency_key, t.idempotency_window_ms, t.concurrency_key,
       t.throttle_count, t.throttle_window_ms, t.max_concurrency, t.retry, t.status, t.version, t.created_by,
       t.updated_by, t.created_at, t.updated_at
  from headgate.workflow_event_triggers t
  join headgate.workflow_definitions w on w.id = t.workflow_definition_id
 where w.slug = $1 and t.deleted_at is null
 order by t.created_at, t.id

-- name: upsert_definition
-- Creates or updates a definition; one that is the same already is left alone. Returns its id when it wrote.
insert into headgate.workflow_definitions as w (id, slug, kind, parameters, config, created_by, updated_by)
values ($1, $2, $3, $4::text::jsonb, $5::text::jsonb, $6, $6)
on conflict (slug) do update
   set kind = excluded.kind, parameters = excluded.parameters, config = excluded.config, version = w.version + 1,
       updated_by = excluded.updated_by, updated_at = headgate.now()
 where (w.kind, w.parameters, w.config) is distinct from (excluded.kind, excluded.parameters, excluded.config)
returning id

-- name: upsert_trigger
-- Creates or updates a workflow's trigger of that name; one that is the same already is left alone.
insert into headgate.workflow_event_triggers as t
  (id, workflow_definition_id, name, event_type, event_source, predicates, "where", parameter_template,
   idempotency_key, idempotency_window_ms, concurrency_key, throttle_count, throttle_window_ms, max_concurrency, retry,
   created_by, updated_by)
values ($1, $2, $3, $4, $5, $6::text::jsonb, $7, $8::text::jsonb, $9, $10, $11, $12, $13, $14, $15::text::jsonb,
        $16, $16)
on conflict (workflow_definition_id, name) where deleted_at is null do update
   set event_type = excluded.event_type, event_source = excluded.event_source, predicates = excluded.predicates,
       "where" = excluded."where", parameter_template = excluded.parameter_template,
       idempotency_key = excluded.idempotency_key, idempotency_window_ms = excluded.idempotency_window_ms,
       concurrency_key = excluded.concurrency_key, throttle_count = excluded.throttle_count,
       throttle_window_ms = excluded.throttle_window_ms, max_concurrency = excluded.max_concurrency,
       retry = excluded.retry, version = t.version + 1, updated_by = excluded.updated_by, updated_at = headgate.now()
 where (t.event_type, t.event_source, t.predicates, t."where", t.parameter_template, t.idempotency_key,
        t.idempotency_window_ms, t.concurrency_key, t.throttle_count, t.throttle_window_ms, t.max_concurrency,
        t.retry)
       is distinct from
       (excluded.event_type, excluded.event_source, excluded.predicates, excluded."where",
        excluded.parameter_template, excluded.idempotency_key, excluded.idempotency_window_ms,
        excluded.concurrency_key, excluded.throttle_count, excluded.throttle_window_ms, excluded.max_concurrency,
        excluded.retry)

-- name: list_definitions
-- Every workflow.
select id, slug, kind, parameters, config, version, created_by, updated_by, created_at, updated_at
  from headgate.workflow_definitions order by slug

-- name: get_definition
-- One workflow by its slug.
select id, slug, kind, parameters, config, version, created_by, updated_by, created_at, updated_at
  from headgate.workflow_definitions where slug = $1
