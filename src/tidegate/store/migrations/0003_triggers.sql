-- Triggers and deliveries: throttles, concurrency, breakers, idempotency keys, versions, and why an event fired nothing.

alter table tidegate.workflow_event_triggers
  add column breaker  jsonb,
  -- What the code said last time it registered this trigger: the same again changes nothing, so an operator's edit stays.
  add column declared jsonb;

-- Every version of a trigger, with who made it and when. Written by the database, so that no way of writing forgets it.
create table tidegate.workflow_event_trigger_versions (
  trigger_id uuid        not null references tidegate.workflow_event_triggers (id),
  version    bigint      not null,
  definition jsonb       not null,
  changed_by text        not null,
  changed_at timestamptz not null default tidegate.now(),
  primary key (trigger_id, version)
);

create function tidegate.keep_trigger_version() returns trigger
language plpgsql security definer set search_path = tidegate, pg_temp
as $$
begin
  insert into tidegate.workflow_event_trigger_versions (trigger_id, version, definition, changed_by, changed_at)
  values (new.id, new.version,
          to_jsonb(new) - array['id', 'workflow_definition_id', 'version', 'declared', 'created_by', 'updated_by',
                                'created_at', 'updated_at'],
          new.updated_by, new.updated_at)
  on conflict (trigger_id, version) do update
     set definition = excluded.definition, changed_by = excluded.changed_by, changed_at = excluded.changed_at;
  return null;
end
$$;
create trigger keep_trigger_version after insert or update on tidegate.workflow_event_triggers
  for each row execute function tidegate.keep_trigger_version();
insert into tidegate.workflow_event_trigger_versions (trigger_id, version, definition, changed_by, changed_at)
select t.id, t.version,
       to_jsonb(t) - array['id', 'workflow_definition_id', 'version', 'declared', 'created_by', 'updated_by',
                           'created_at', 'updated_at'],
       t.updated_by, t.updated_at
  from tidegate.workflow_event_triggers t;

-- A trigger's throttle is the same thing as a source's limit: a ring of launches and a place in line, under one row lock.
alter table tidegate.event_scheduler_triggers
  add column ring           bigint[]      not null default '{}',
  add column ring_at        bigint        not null default 0,
  add column ring_width_us  bigint        not null default 0,
  add column drain_at       timestamptz,
  add column breaker_until  timestamptz,
  add column breaker_reason text,
  add column failures       timestamptz[] not null default '{}',
  -- The run that shows whether the trigger has recovered; nobody else is launched until it has ended.
  add column probe_run_id   uuid,
  add column plan_version   bigint        not null default 0,
  add column is_replanning  boolean       not null default false,
  add column refused_at     timestamptz,
  add constraint event_scheduler_triggers_pause_check
    check (paused_at is not null or (paused_until is null and pause_reason is null and paused_by is null)),
  set (fillfactor = 50);

-- `reason` is why it waits (throttle, concurrency, paused, breaker_open, source_paused); `plan_version` is the trigger's
-- plan that its slot belongs to: a row with an older one gets a new slot.
alter table tidegate.workflow_trigger_deliveries
  add column reason           text,
  add column source           text,
  add column concurrency_key  text,
  add column ingress_sequence bigint not null default 0,
  add column plan_version     bigint not null default 0,
  -- What is decided waits no more.
  add constraint workflow_trigger_deliveries_final_check
    check (status not in ('launched', 'skipped', 'failed', 'exhausted', 'cancelled')
           or retry_state not in ('scheduled', 'running'));
create index workflow_trigger_deliveries_line_idx
  on tidegate.workflow_trigger_deliveries (trigger_id, next_attempt_at, ingress_sequence) where retry_state = 'scheduled';
create index workflow_trigger_deliveries_arrival_idx
  on tidegate.workflow_trigger_deliveries (trigger_id, ingress_sequence) where retry_state = 'scheduled';
create index workflow_trigger_deliveries_slot_idx
  on tidegate.workflow_trigger_deliveries (trigger_id, concurrency_key, ingress_sequence)
  where retry_state = 'scheduled' and reason = 'concurrency';
-- Who stands in a trigger's line; the others hold up nobody.
create index workflow_trigger_deliveries_in_line_idx
  on tidegate.workflow_trigger_deliveries (trigger_id, ingress_sequence)
  where retry_state = 'scheduled' and reason not in ('concurrency', 'source_paused');
create index workflow_trigger_deliveries_source_paused_idx
  on tidegate.workflow_trigger_deliveries (source) where retry_state = 'scheduled' and reason = 'source_paused';
create index workflow_trigger_deliveries_trigger_idx on tidegate.workflow_trigger_deliveries (trigger_id, id);
drop index tidegate.workflow_trigger_deliveries_dedupe_idx;

-- One launch per trigger and key, until the key expires (null: never).
create table tidegate.trigger_idempotency_keys (
  trigger_id  uuid not null references tidegate.workflow_event_triggers (id),
  dedupe_key  text not null,
  delivery_id uuid,
  run_id      uuid,
  expires_at  timestamptz,
  created_at  timestamptz not null default tidegate.now(),
  primary key (trigger_id, dedupe_key)
) with (fillfactor = 80);
create index trigger_idempotency_keys_expiry_idx on tidegate.trigger_idempotency_keys (expires_at)
  where expires_at is not null;

-- A run of a trigger with a concurrency limit holds one of its slots (of its key, '' without one) until it ends. The
-- slots in use are counted from these rows, under the trigger's lock.
alter table tidegate.workflow_runs
  add column trigger_id      uuid,
  add column concurrency_key text,
  add column is_probe        boolean not null default false;
create index workflow_runs_slot_idx on tidegate.workflow_runs (trigger_id, concurrency_key)
  where concurrency_key is not null and status in ('pending', 'running');

-- `detail` says which triggers of an event's type did not fire, and why.
alter table tidegate.event_decisions
  add column trigger_id uuid,
  add column detail     jsonb;
