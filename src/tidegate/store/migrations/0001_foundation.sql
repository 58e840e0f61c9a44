-- kind: expand
-- The foundation: events and their inbox, definitions, triggers, deliveries, runs, steps, limits, and everything operators set.
--
-- How history is stored. Ids are UUIDv7, so they are ordered by time. Everything that comes of an event (its deliveries, their
-- runs, the runs' steps) has an id that begins with the same 8 bytes as the event's (`model/ids.py`): the prefix of one story. The
-- tables that grow are partitioned by ranges of these ids, one day each (UTC), so that one day of every table holds the same
-- stories and can be dropped as a whole. What still waits or runs is in a partition of its own (`..._live`), whatever its age: a
-- row moves to its day when its state becomes final, and back if it is replayed. `..._default` has the rows of days that have no
-- partition: nothing is refused because a partition is missing.

-- The one clock that schedules. Tests replace this function; nothing else may read the time to decide what is due.
create function tidegate.now() returns timestamptz
language sql stable parallel safe
as $$ select clock_timestamp() $$;

-- UUIDv7 for rows that SQL makes (Postgres before 18 has none of its own). The 12 bits behind the version are the fraction of the
-- millisecond, so that ids have the order in which one connection made them.
create function tidegate.uuid7() returns uuid
language sql volatile parallel safe
as $$
  select (overlay(lpad(to_hex(floor(extract(epoch from clock_timestamp()) * 4096000)::bigint), 15, '0') placing '7' from 13 for 0)
    || right(gen_random_uuid()::text, 17))::uuid
$$;

-- The first and the last id of the story that an id belongs to.
create function tidegate.first_of(id uuid) returns uuid
language sql immutable parallel safe
return (left(id::text, 18) || '-0000-000000000000')::uuid;

create function tidegate.last_of(id uuid) returns uuid
language sql immutable parallel safe
return (left(id::text, 18) || '-ffff-ffffffffffff')::uuid;

-- The first id of a day.
create function tidegate.first_of_day(day date) returns uuid
language sql immutable parallel safe
return (lpad(to_hex((extract(epoch from day::timestamp) * 1000)::bigint), 12, '0') || repeat('0', 20))::uuid;

-- Events -------------------------------------------------------------------------------------------------------------

create sequence tidegate.ingress_sequence as bigint;

create table tidegate.workflow_events (
  id               uuid        not null,
  external_id      text,
  type             text        not null,
  source           text        not null,
  occurred_at      timestamptz not null,
  received_at      timestamptz not null default tidegate.now(),
  ingress_sequence bigint      not null default nextval('tidegate.ingress_sequence'),
  payload          jsonb       not null,
  correlation_id   text        not null,
  ttl_ms           bigint,
  -- What it was published with (null: 1, the default).
  priority         bigint,
  metadata         jsonb       not null default '{}',
  traceparent      text,
  -- From here its time to live and its age are counted, if it was replayed.
  replayed_at      timestamptz,
  -- Not decided before this time, and its time to live and age are counted from then; null: decided as soon as possible.
  deliver_at       timestamptz,
  -- Where it comes from, unless from a producer: the run that published it and that run's event (`run_id`, `event_id`).
  origin           jsonb,
  constraint workflow_events_pkey primary key (id),
  -- The length is checked apart: counting up to 200 inside of the pattern takes thirty times as long.
  constraint workflow_events_type_check check (type ~ '^[A-Za-z0-9._~:/?#@&=+%-]+$' and length(type) <= 200),
  constraint workflow_events_source_check check (source ~ '^[A-Za-z0-9._~:/?#@&=+%-]+$' and length(source) <= 200),
  constraint workflow_events_external_id_check check (length(external_id) between 1 and 200),
  constraint workflow_events_correlation_id_check check (length(correlation_id) between 1 and 200),
  constraint workflow_events_payload_check check (jsonb_typeof(payload) = 'object'),
  constraint workflow_events_metadata_check check (jsonb_typeof(metadata) = 'object'),
  constraint workflow_events_ttl_check check (ttl_ms > 0),
  -- A time that a driver cannot read back would break every page and batch that meets the row.
  constraint workflow_events_occurred_at_check check (occurred_at >= '1900-01-01' and occurred_at < '9000-01-01'),
  constraint workflow_events_deliver_at_check check (deliver_at >= '1900-01-01' and deliver_at < '9000-01-01')
) partition by range (id);
create table tidegate.workflow_events_default partition of tidegate.workflow_events default;
create index workflow_events_source_idx on tidegate.workflow_events (source, ingress_sequence);
create index workflow_events_type_idx on tidegate.workflow_events (type, ingress_sequence);
create index workflow_events_arrival_idx on tidegate.workflow_events (received_at, ingress_sequence);
create index workflow_events_later_idx on tidegate.workflow_events (type, ingress_sequence) where deliver_at is not null;
-- Most events are in a correlation of their own: its id is theirs, and they are found by it.
create index workflow_events_correlation_idx on tidegate.workflow_events (correlation_id) where correlation_id <> id::text;

-- Publishing is idempotent per producer's id and source, over all days, as long as the event is kept. The producer's id leads, so
-- that it can be looked up alone. No partitions: a unique key over all of them would have to contain the day.
create table tidegate.event_external_ids (
  external_id text not null,
  source      text not null,
  event_id    uuid not null,
  constraint event_external_ids_pkey primary key (external_id, source)
);
-- In the order of time: retention deletes from its beginning.
create index event_external_ids_event_idx on tidegate.event_external_ids (event_id);

-- Accepted, not yet decided. The batch loop locks rows here, decides, and deletes them in the same transaction. The inbox is shared by
-- lanes: the events of one source with one priority.
create table tidegate.event_inbox (
  ingress_sequence bigint primary key,
  event_id         uuid   not null,
  source           text   collate "C" not null,
  priority         bigint not null default 1
) with (fillfactor = 90, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.1);
-- A batch takes from each lane without reading the rows of the others.
create index event_inbox_lane_idx on tidegate.event_inbox (source, priority, ingress_sequence);

-- Events that their source's gate held. `reason` is why it waits (rate_limit, paused, breaker_open); `plan_version` is the
-- source's plan that its slot belongs to: a row with an older one gets a new slot before it is decided again. An event that was
-- published for a later time has the reason `scheduled` until then: it is not in its source's line, and no plan moves it.
create table tidegate.event_ingress_retries (
  event_id         uuid        not null,
  source           text        not null,
  retry_state      text        not null default 'scheduled',
  attempts         bigint      not null default 0,
  next_attempt_at  timestamptz,
  last_error       text,
  metadata         jsonb       not null default '{}',
  claim_generation bigint      not null default 0,
  claimed_by       text,
  claim_expires_at timestamptz,
  ingress_sequence bigint      not null default 0,
  plan_version     bigint      not null default 0,
  reason           text,
  -- The dead letter whose replay made it wait again (no constraint: dead letters are deleted sooner or later).
  replayed_from    uuid,
  created_at       timestamptz not null default tidegate.now(),
  updated_at       timestamptz not null default tidegate.now(),
  constraint event_ingress_retries_state_check
    check (retry_state in ('none', 'scheduled', 'running', 'completed', 'cancelled', 'exhausted')),
  constraint event_ingress_retries_attempts_check check (attempts >= 0),
  constraint event_ingress_retries_waiting_check
    check (retry_state <> 'scheduled' or (next_attempt_at is not null
           and next_attempt_at between '1900-01-01' and '9000-01-01')),
  constraint event_ingress_retries_claim_check
    check ((retry_state = 'running') = (claim_expires_at is not null))
) partition by list (retry_state);
create table tidegate.event_ingress_retries_live partition of tidegate.event_ingress_retries
  (constraint event_ingress_retries_live_pkey primary key (event_id))
  for values in ('scheduled', 'running')
  with (fillfactor = 70, autovacuum_vacuum_insert_scale_factor = 0.02, autovacuum_vacuum_scale_factor = 0.05);
create table tidegate.event_ingress_retries_history partition of tidegate.event_ingress_retries
  (constraint event_ingress_retries_history_pkey primary key (event_id))
  for values in ('none', 'completed', 'cancelled', 'exhausted') partition by range (event_id);
create table tidegate.event_ingress_retries_default partition of tidegate.event_ingress_retries_history default;
-- What waits can be counted from this index alone.
create index event_ingress_retries_due_idx
  on tidegate.event_ingress_retries_live (next_attempt_at, event_id) include (source, reason)
  where retry_state = 'scheduled';
create index event_ingress_retries_lease_idx on tidegate.event_ingress_retries_live (claim_expires_at)
  where retry_state = 'running';
create index event_ingress_retries_source_idx
  on tidegate.event_ingress_retries_live (source, next_attempt_at, ingress_sequence)
  where retry_state = 'scheduled' and reason is distinct from 'scheduled';
create index event_ingress_retries_arrival_idx
  on tidegate.event_ingress_retries_live (source, ingress_sequence)
  where retry_state = 'scheduled' and reason is distinct from 'scheduled';
create index event_ingress_retries_later_idx
  on tidegate.event_ingress_retries_live (next_attempt_at, ingress_sequence)
  where retry_state = 'scheduled' and reason = 'scheduled';

-- What was decided about an event beyond accepted, delivered and run, in order. Written in the transaction of the decision;
-- nothing reads it to decide. `detail` says which triggers of the event's type did not fire, and why.
create sequence tidegate.event_decisions_sequence as bigint;
create table tidegate.event_decisions (
  id         bigint      not null default nextval('tidegate.event_decisions_sequence'),
  event_id   uuid        not null,
  at         timestamptz not null default tidegate.now(),
  stage      text        not null,
  decision   text        not null,
  reason     text,
  until      timestamptz,
  attempt    bigint,
  actor      text,
  trigger_id uuid,
  detail     jsonb,
  constraint event_decisions_pkey primary key (event_id, id)
) partition by range (event_id);
create table tidegate.event_decisions_default partition of tidegate.event_decisions default;
create index event_decisions_newest_idx on tidegate.event_decisions (id);

-- Events that are to be decided again, each at its time: rows, so that no process has to stay alive for a slow replay of many.
create table tidegate.event_replays (
  event_id   uuid primary key,
  replay_at  timestamptz not null,
  replay_by  text        not null,
  created_at timestamptz not null default tidegate.now()
);
create index event_replays_due_idx on tidegate.event_replays (replay_at, event_id);

-- Publish requests that were refused (409, 422, 429), kept for a while: why, by the producer's id. At most some per second and
-- process are written, and the newest stay. Nothing decides by it.
create table tidegate.publish_refusals (
  id          bigint generated always as identity primary key,
  at          timestamptz not null default tidegate.now(),
  status      bigint      not null,
  external_id text,
  type        text,
  source      text,
  reason      text        not null
);
create index publish_refusals_external_id_idx on tidegate.publish_refusals (external_id, id) where external_id is not null;
create index publish_refusals_at_idx on tidegate.publish_refusals (at);

-- Definitions and triggers -------------------------------------------------------------------------------------------

-- A deleted workflow stays as a row that its runs and triggers on record refer to; its name is free for another.
create table tidegate.workflow_definitions (
  id         uuid primary key,
  slug       text        not null,
  kind       text        not null default 'python',
  parameters jsonb       not null default '[]',
  config     jsonb       not null default '{}',
  version    bigint      not null default 1,
  created_by text        not null,
  updated_by text        not null,
  created_at timestamptz not null default tidegate.now(),
  updated_at timestamptz not null default tidegate.now(),
  deleted_at timestamptz,
  constraint workflow_definitions_slug_check check (slug ~ '^[A-Za-z0-9._-]{1,100}$'),
  constraint workflow_definitions_kind_check check (kind in ('python', 'http'))
);
create unique index workflow_definitions_slug_key on tidegate.workflow_definitions (slug) where deleted_at is null;

create table tidegate.workflow_event_triggers (
  id                     uuid primary key,
  workflow_definition_id uuid        not null references tidegate.workflow_definitions (id),
  name                   text        not null,
  event_type             text        not null,
  event_source           text        not null default '*',
  predicates             jsonb       not null default '[]',
  "where"                text,
  parameter_template     jsonb,
  idempotency_key        text,
  idempotency_window_ms  bigint      not null default 86400000,
  -- Renders the key by which it collects, and counts what waits (null: all of its events together).
  key                    text,
  -- How it collects events into windows: `debounce_ms`, `max_wait_ms`, `leading`, or `batch_size`, `batch_ms`; null: one run for each.
  collect                jsonb,
  -- Of the events (of a key) at most this many are taken in any sliding window; the others are skipped.
  skip_over_count        bigint,
  skip_over_window_ms    bigint,
  concurrency_key        text,
  throttle_count         bigint,
  throttle_window_ms     bigint,
  max_concurrency        bigint,
  -- What happens to a delivery that finds no concurrency slot: it waits in the queue, or is skipped.
  overlap                text        not null default 'queue',
  -- With `max_concurrency` 1: a new delivery cancels the unfinished run, and takes the place of those that wait.
  cancel_running         boolean     not null default false,
  -- The budgets that its launches spend, by name.
  budgets                text[]      not null default '{}',
  -- What may wait, of each key if there is one: `max_waiting`, `when_full`, `keep`, `max_wait_ms`; null: everything.
  backlog                jsonb,
  -- How long its runs hold their concurrency slots: until they end, or while they execute and not while they wait.
  holds                  text        not null default 'unfinished',
  -- The weight of its workflow among those that wait for the slots of a worker.
  priority               bigint      not null default 1,
  retry                  jsonb,
  breaker                jsonb,
  -- What the code said last time it registered this trigger: the same again changes nothing, so an operator's edit stays.
  declared               jsonb,
  status                 text        not null default 'active',
  version                bigint      not null default 1,
  created_by             text        not null,
  updated_by             text        not null,
  created_at             timestamptz not null default tidegate.now(),
  updated_at             timestamptz not null default tidegate.now(),
  deleted_at             timestamptz,
  constraint workflow_event_triggers_name_check check (length(name) between 1 and 100),
  constraint workflow_event_triggers_status_check check (status in ('active', 'disabled')),
  constraint workflow_event_triggers_window_check check (idempotency_window_ms >= 0),
  constraint workflow_event_triggers_skip_over_check
    check ((skip_over_count is null) = (skip_over_window_ms is null) and skip_over_count > 0 and skip_over_window_ms > 0),
  constraint workflow_event_triggers_throttle_check
    check ((throttle_count is null) = (throttle_window_ms is null) and throttle_count > 0 and throttle_window_ms > 0),
  constraint workflow_event_triggers_concurrency_check check (max_concurrency > 0),
  constraint workflow_event_triggers_overlap_check check (overlap in ('queue', 'skip')),
  constraint workflow_event_triggers_holds_check check (holds in ('unfinished', 'executing')),
  constraint workflow_event_triggers_priority_check check (priority between 1 and 10)
);
-- Launches ask for the triggers whose runs hold their slots while they execute.
create index workflow_event_triggers_holds_idx on tidegate.workflow_event_triggers (id) where holds = 'executing';
create unique index workflow_event_triggers_name_key
  on tidegate.workflow_event_triggers (workflow_definition_id, name) where deleted_at is null;

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

-- One number that every change of a definition or trigger raises; each batch reads it, so that no worker decides by an
-- outdated trigger. `run_ends` are the ends of runs that an active trigger asks for, as in `tidegate.run.failed`: only these are
-- published.
create table tidegate.registry_version (
  only_row boolean primary key default true check (only_row),
  version  bigint not null default 0,
  run_ends text[] not null default '{}'
);
insert into tidegate.registry_version default values;

create function tidegate.raise_registry_version() returns trigger
language plpgsql security definer set search_path = tidegate, pg_temp
as $$
begin
  update tidegate.registry_version
     set version = version + 1,
         run_ends = array(select s.status from unnest(array['succeeded', 'failed', 'cancelled']) as s (status)
                           where exists (select from tidegate.workflow_event_triggers t
                                          where t.status = 'active' and t.deleted_at is null
                                            and starts_with(t.event_type, 'tidegate.')
                                            and 'tidegate.run.' || s.status
                                                like replace(regexp_replace(t.event_type, '([\\%_])', '\\\1', 'g'), '*', '%')));
  return null;
end
$$;
create trigger raise_registry_version after insert or update or delete on tidegate.workflow_definitions
  for each statement execute function tidegate.raise_registry_version();
create trigger raise_registry_version after insert or update or delete on tidegate.workflow_event_triggers
  for each statement execute function tidegate.raise_registry_version();

-- Schedules: workflows that run by the clock. Each tick is an ordinary event, published by whoever locks the row.
create table tidegate.schedules (
  workflow_definition_id uuid primary key references tidegate.workflow_definitions (id),
  every_ms               bigint,
  cron                   text,
  timezone               text,
  next_at                timestamptz not null,
  last_at                timestamptz,
  -- What happens to a tick while an earlier run is unfinished, as the code says; its trigger decides by it.
  overlap                text        not null default 'allow',
  -- What an operator set; the code does not change it.
  paused_at              timestamptz,
  paused_until           timestamptz,
  pause_reason           text,
  paused_by              text,
  -- Ticks for which no event was published: because no worker ran (and which ones last), and because of a pause.
  missed_total           bigint      not null default 0,
  missed_from            timestamptz,
  missed_to              timestamptz,
  paused_total           bigint      not null default 0,
  created_at             timestamptz not null default tidegate.now(),
  updated_at             timestamptz not null default tidegate.now(),
  constraint schedules_overlap_check check (overlap in ('allow', 'queue', 'skip')),
  constraint schedules_pause_check
    check (paused_at is not null or (paused_until is null and pause_reason is null and paused_by is null)),
  constraint schedules_kind_check check ((every_ms is null) <> (cron is null)),
  constraint schedules_every_check check (every_ms >= 1000),
  constraint schedules_timezone_check check ((cron is null) = (timezone is null)),
  constraint schedules_next_check check (next_at between '1900-01-01' and '9000-01-01')
) with (fillfactor = 50);
create index schedules_due_idx on tidegate.schedules (next_at);

-- Deliveries, runs, steps --------------------------------------------------------------------------------------------
-- These rows refer to each other without foreign keys: each is written in the transaction that creates or locks what it refers to,
-- and asking again for each row was a fifth of the time of a run. `tidegate doctor` looks for rows that refer to nothing.

-- One row for each event and trigger: its id is computed from both (`model/ids.py`), so the primary key refuses a second one.
-- `reason` is why it waits (throttle, concurrency, budget, window, paused, breaker_open, source_paused); `plan_version` is the trigger's
-- plan that its slot belongs to: a row with an older one gets a new slot.
create table tidegate.workflow_trigger_deliveries (
  id               uuid        not null,
  trigger_id       uuid        not null,
  event_id         uuid        not null,
  trigger_version  bigint      not null default 1,
  -- The run it launched, or, when skipped, the run that its key had launched before.
  workflow_run_id  uuid,
  status           text        not null,
  attempts         bigint      not null default 0,
  dedupe_key       text,
  launched_at      timestamptz,
  last_error       text,
  throttled_until  timestamptz,
  retry_state      text        not null default 'none',
  next_attempt_at  timestamptz,
  retry_attempts   bigint      not null default 0,
  retry_metadata   jsonb       not null default '{}',
  claim_generation bigint      not null default 0,
  claimed_by       text,
  claim_expires_at timestamptz,
  reason           text,
  source           text,
  concurrency_key  text,
  -- The budget that holds it while it waits, the key of it, and what it will spend.
  budget           text,
  budget_key       text,
  budget_cost      bigint,
  -- The key by which it counts in its trigger's backlog, if that has a policy, and when it has waited too long.
  backlog_key      text,
  stale_at         timestamptz,
  -- The window it is collected in: the id of the delivery that opened it, and of the run that takes it.
  window_id        uuid,
  ingress_sequence bigint      not null default 0,
  plan_version     bigint      not null default 0,
  -- The dead letter whose replay made it wait again.
  replayed_from    uuid,
  created_at       timestamptz not null default tidegate.now(),
  updated_at       timestamptz not null default tidegate.now(),
  constraint workflow_trigger_deliveries_status_check check (status in
    ('matched', 'launched', 'throttled', 'paused', 'skipped', 'failed', 'exhausted', 'cancelled', 'collected')),
  constraint workflow_trigger_deliveries_launched_check
    check (status <> 'launched' or (workflow_run_id is not null and launched_at is not null)),
  constraint workflow_trigger_deliveries_state_check
    check (retry_state in ('none', 'scheduled', 'running', 'completed', 'cancelled', 'exhausted')),
  constraint workflow_trigger_deliveries_attempts_check check (attempts >= 0 and retry_attempts >= 0),
  constraint workflow_trigger_deliveries_waiting_check
    check (retry_state <> 'scheduled' or (next_attempt_at is not null
           and next_attempt_at between '1900-01-01' and '9000-01-01')),
  constraint workflow_trigger_deliveries_claim_check
    check ((retry_state = 'running') = (claim_expires_at is not null)),
  -- What is decided waits no more.
  constraint workflow_trigger_deliveries_final_check
    check (status not in ('launched', 'skipped', 'failed', 'exhausted', 'cancelled')
           or retry_state not in ('scheduled', 'running'))
) partition by list (retry_state);
create table tidegate.workflow_trigger_deliveries_live partition of tidegate.workflow_trigger_deliveries
  (constraint workflow_trigger_deliveries_live_pkey primary key (id))
  for values in ('scheduled', 'running')
  with (fillfactor = 90, autovacuum_vacuum_insert_scale_factor = 0.02);
create table tidegate.workflow_trigger_deliveries_history partition of tidegate.workflow_trigger_deliveries
  (constraint workflow_trigger_deliveries_history_pkey primary key (id))
  for values in ('none', 'completed', 'cancelled', 'exhausted') partition by range (id);
create table tidegate.workflow_trigger_deliveries_default partition of tidegate.workflow_trigger_deliveries_history default;
create index workflow_trigger_deliveries_trigger_idx on tidegate.workflow_trigger_deliveries (trigger_id, id);
-- The members of a window.
create index workflow_trigger_deliveries_window_idx on tidegate.workflow_trigger_deliveries (window_id) where window_id is not null;
create index workflow_trigger_deliveries_due_idx on tidegate.workflow_trigger_deliveries_live (next_attempt_at, id)
  where retry_state = 'scheduled';
create index workflow_trigger_deliveries_lease_idx on tidegate.workflow_trigger_deliveries_live (claim_expires_at)
  where retry_state = 'running';
create index workflow_trigger_deliveries_line_idx
  on tidegate.workflow_trigger_deliveries_live (trigger_id, next_attempt_at, ingress_sequence) include (reason, source)
  where retry_state = 'scheduled';
create index workflow_trigger_deliveries_arrival_idx
  on tidegate.workflow_trigger_deliveries_live (trigger_id, ingress_sequence) where retry_state = 'scheduled';
create index workflow_trigger_deliveries_slot_idx
  on tidegate.workflow_trigger_deliveries_live (trigger_id, concurrency_key, ingress_sequence)
  where retry_state = 'scheduled' and reason = 'concurrency';
-- Who stands in a trigger's line; the others hold up nobody.
create index workflow_trigger_deliveries_in_line_idx
  on tidegate.workflow_trigger_deliveries_live (trigger_id, ingress_sequence)
  where retry_state = 'scheduled' and reason not in ('concurrency', 'source_paused', 'budget') and reason <> 'window';
-- Who waits for a key of a budget, in the order of arrival.
create index workflow_trigger_deliveries_budget_idx
  on tidegate.workflow_trigger_deliveries_live (budget, budget_key, ingress_sequence)
  where retry_state = 'scheduled' and reason = 'budget';
create index workflow_trigger_deliveries_source_paused_idx
  on tidegate.workflow_trigger_deliveries_live (source) where retry_state = 'scheduled' and reason = 'source_paused';
-- What waits of a key of a trigger whose backlog has a policy, and what leaves when it has waited too long.
create index workflow_trigger_deliveries_backlog_idx
  on tidegate.workflow_trigger_deliveries_live (trigger_id, backlog_key, ingress_sequence)
  where retry_state = 'scheduled' and backlog_key <> '';
create index workflow_trigger_deliveries_stale_idx
  on tidegate.workflow_trigger_deliveries_live (stale_at) where retry_state = 'scheduled' and stale_at is not null;

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

-- A run has the id of the delivery that launched it, so that the primary key keeps a delivery from launching twice.
create table tidegate.workflow_runs (
  id                     uuid        not null,
  workflow_definition_id uuid        not null,
  delivery_id            uuid,
  event_id               uuid,
  -- The window whose events it is given (null: its own event alone). A rerun has the window of the run it repeats.
  window_id              uuid,
  correlation_id         text,
  status                 text        not null default 'pending',
  parameters             jsonb       not null default '{}',
  output                 jsonb,
  error                  text,
  attempts               bigint      not null default 0,
  next_attempt_at        timestamptz,
  claim_generation       bigint      not null default 0,
  claimed_by             text,
  claim_expires_at       timestamptz,
  -- A run of a trigger with a concurrency limit holds one of its slots (of its key, '' without one) until it ends. The slots in use
  -- are counted from these rows, under the trigger's lock.
  trigger_id             uuid,
  concurrency_key        text,
  -- Of a run that holds its slots while it executes, and not while it waits: the key that it takes when it resumes. It holds none while
  -- `concurrency_key` is null.
  slot_key               text,
  -- Whether it shows if its trigger, whose breaker is half open, has recovered.
  is_probe               boolean     not null default false,
  cancel_requested_at    timestamptz,
  cancelled_by           text,
  -- How often a worker died with it; and how often in a row while nothing else was executing there (null: never), which alone
  -- tells which of the runs of a dead worker killed it.
  crashes                bigint      not null default 0,
  trials                 bigint,
  -- What it waits for, when a step is to be tried again.
  warning                text,
  -- How often its function failed with RetryAfter and was called anew, and when its time is over.
  retry_attempts         bigint      not null default 0,
  deadline_at            timestamptz,
  -- How often other transactions have woken it: what it waits for has come. A run that is woken while it executes is due at once
  -- when it is suspended. No wake-up makes it due before `not_before`.
  wakes                  bigint      not null default 0,
  not_before             timestamptz,
  -- The dead letter whose replay resumed it.
  replayed_from          uuid,
  -- The run that an operator had executed again as this one.
  rerun_of               uuid,
  -- The version of the code that its recorded steps belong to (null: not known); those that did not fit them; since when it waits
  -- for a version that fits; steps recorded until `version_since` need not fit, as an operator has decided.
  version                text,
  misfits                text[],
  version_held_at        timestamptz,
  version_since          timestamptz,
  -- What its function has called it: an object of texts.
  tags                   jsonb,
  created_at             timestamptz not null default tidegate.now(),
  started_at             timestamptz,
  finished_at            timestamptz,
  updated_at             timestamptz not null default tidegate.now(),
  constraint workflow_runs_status_check check (status in ('pending', 'running', 'succeeded', 'failed', 'cancelled')),
  constraint workflow_runs_attempts_check check (attempts >= 0),
  constraint workflow_runs_waiting_check
    check (status <> 'pending' or (next_attempt_at is not null
           and next_attempt_at between '1900-01-01' and '9000-01-01')),
  constraint workflow_runs_claim_check check ((status = 'running') = (claim_expires_at is not null)),
  constraint workflow_runs_finished_check
    check ((status in ('succeeded', 'failed', 'cancelled')) = (finished_at is not null))
) partition by list (status);
create table tidegate.workflow_runs_live partition of tidegate.workflow_runs
  (constraint workflow_runs_live_pkey primary key (id))
  for values in ('pending', 'running') with (fillfactor = 80);
create table tidegate.workflow_runs_history partition of tidegate.workflow_runs
  (constraint workflow_runs_history_pkey primary key (id))
  for values in ('succeeded', 'failed', 'cancelled') partition by range (id);
create table tidegate.workflow_runs_default partition of tidegate.workflow_runs_history default;
-- What ended late is found when its day is dropped; the rows lie in the order in which they ended.
create index workflow_runs_finished_idx on tidegate.workflow_runs_history using brin (finished_at);
-- Most runs are in the correlation of their event alone, and are found by it.
create index workflow_runs_correlation_idx on tidegate.workflow_runs (correlation_id)
  where correlation_id is distinct from event_id::text;
create index workflow_runs_due_idx on tidegate.workflow_runs_live (next_attempt_at, id) where status = 'pending';
-- By workflow: a worker claims from each that has due runs, without reading those of the others.
create index workflow_runs_workflow_idx on tidegate.workflow_runs_live (workflow_definition_id, next_attempt_at, id)
  where status = 'pending';
create index workflow_runs_lease_idx on tidegate.workflow_runs_live (claim_expires_at) where status = 'running';
create index workflow_runs_crashing_idx on tidegate.workflow_runs_live (next_attempt_at)
  where status = 'pending' and crashes > 0;
create index workflow_runs_version_held_idx on tidegate.workflow_runs_live (version_held_at) where version_held_at is not null;
create index workflow_runs_tags_idx on tidegate.workflow_runs using gin (tags jsonb_path_ops) where tags is not null;
create index workflow_runs_window_idx on tidegate.workflow_runs_live (window_id) where window_id is not null;
create index workflow_runs_slot_idx on tidegate.workflow_runs_live (trigger_id, concurrency_key)
  where concurrency_key is not null and status in ('pending', 'running');

-- One row for each run and name: its id is computed from both, so the primary key refuses a second one. The steps of a run are found
-- by the ids of its story.
create table tidegate.workflow_run_steps (
  id               uuid        not null,
  workflow_run_id  uuid        not null,
  name             text        not null,
  kind             text        not null default 'step',
  status           text        not null default 'pending',
  -- As it was returned: jsonb would order the keys anew and turn 1e20 into an integer, so that a function that is called anew
  -- would see another value than the first time.
  result           json,
  error            text,
  retry_state      text        not null default 'none',
  next_attempt_at  timestamptz,
  retry_attempts   bigint      not null default 0,
  retry_metadata   jsonb       not null default '{}',
  claim_generation bigint      not null default 0,
  claimed_by       text,
  claim_expires_at timestamptz,
  created_at       timestamptz not null default tidegate.now(),
  updated_at       timestamptz not null default tidegate.now(),
  constraint workflow_run_steps_pkey primary key (id),
  constraint workflow_run_steps_name_check check (length(name) between 1 and 200),
  constraint workflow_run_steps_kind_check check (kind in ('step', 'sleep', 'publish', 'wait', 'child', 'map')),
  constraint workflow_run_steps_status_check
    check (status in ('pending', 'running', 'succeeded', 'failed', 'cancelled')),
  constraint workflow_run_steps_state_check
    check (retry_state in ('none', 'scheduled', 'running', 'completed', 'cancelled', 'exhausted')),
  constraint workflow_run_steps_attempts_check check (retry_attempts >= 0),
  constraint workflow_run_steps_waiting_check
    check (retry_state <> 'scheduled' or (next_attempt_at is not null
           and next_attempt_at between '1900-01-01' and '9000-01-01')),
  constraint workflow_run_steps_claim_check
    check ((retry_state = 'running') = (claim_expires_at is not null))
) partition by range (id);
create table tidegate.workflow_run_steps_default partition of tidegate.workflow_run_steps default;
create index workflow_run_steps_due_idx on tidegate.workflow_run_steps (next_attempt_at, id) include (kind)
  where retry_state = 'scheduled';
create index workflow_run_steps_lease_idx on tidegate.workflow_run_steps (claim_expires_at)
  where retry_state = 'running';

-- What runs wait for: one row for each pattern of a step that waits (`wait_for`, `wait_any`, `wait_all`), and for what cancels a run
-- (`mode` `cancel`). A row is deleted when the wait ends, in the same transaction: what is here is open. Events are looked up by type
-- and by the values (`key`) of the fields `paths` of their payload; `[]` are the waits that are found by the type alone. Events that came by
-- `after_sequence`, or before `since`, do not count. A pattern of `wait_all` keeps its event until the others have theirs.
create table tidegate.event_waits (
  id              uuid        primary key,
  workflow_run_id uuid        not null,
  step_id         uuid        not null,
  number          bigint      not null,
  mode            text        not null,
  event_type      text        not null,
  source          text        not null,
  paths           text        not null,
  key             text        not null,
  contained       jsonb       not null,
  where_text      text,
  after_sequence  bigint      not null,
  since           timestamptz,
  until           timestamptz,
  met_event_id    uuid,
  met_event       json,
  created_at      timestamptz not null default tidegate.now(),
  constraint event_waits_mode_check check (mode in ('event', 'first', 'all', 'cancel')),
  constraint event_waits_until_check check ((until is null) = (mode = 'cancel')),
  constraint event_waits_met_check check (met_event_id is null or mode = 'all')
) with (fillfactor = 90, autovacuum_vacuum_scale_factor = 0.02);
create index event_waits_key_idx on tidegate.event_waits (event_type, paths, key) where met_event_id is null;
create index event_waits_run_idx on tidegate.event_waits (workflow_run_id);

-- The runs that a run starts in its steps, one row for each: of a step of kind `child` one, of a `map` one for each item. They are
-- found by the parent's story. `waiting`: not started yet; the end of a child starts the next one of its step. `event_id` is the
-- start, `child_run_id` the run that it launches. A child that has ended stays as it is, whatever becomes of its run later.
create table tidegate.run_children (
  step_id      uuid        not null,
  position     bigint      not null default 0,
  run_id       uuid        not null,
  workflow     text        not null,
  parameters   jsonb       not null,
  status       text        not null default 'waiting',
  event_id     uuid,
  child_run_id uuid,
  -- Of a retried parent: the run that the child had before, and that resumes instead of a new one.
  resumes      uuid,
  result       json,
  error        text,
  created_at   timestamptz not null default tidegate.now(),
  updated_at   timestamptz not null default tidegate.now(),
  constraint run_children_pkey primary key (step_id, position),
  constraint run_children_status_check check (status in ('waiting', 'started', 'succeeded', 'failed', 'cancelled')),
  constraint run_children_started_check
    check ((event_id is null) = (child_run_id is null) and (status <> 'waiting' or event_id is null)
           and (status in ('waiting', 'failed') or event_id is not null))
) partition by range (step_id);
create table tidegate.run_children_default partition of tidegate.run_children default;
create index run_children_waiting_idx on tidegate.run_children (step_id, position) where status = 'waiting';
create index run_children_started_idx on tidegate.run_children (step_id, position) where status = 'started';
create index run_children_failed_idx on tidegate.run_children (step_id, position) where status in ('failed', 'cancelled');

-- Runs that were cancelled or timed out while children of theirs had not ended; the row is deleted once all of these are cancelled.
create table tidegate.run_cancellations (
  run_id     uuid primary key,
  reason     text        not null,
  created_at timestamptz not null default tidegate.now()
);

-- The runs of an event.
create function tidegate.runs_of(event_ids uuid[]) returns setof uuid
language sql stable parallel safe
as $$
  select r.id from unnest(event_ids) as e (id)
    join tidegate.workflow_runs r on r.id between tidegate.first_of(e.id) and tidegate.last_of(e.id) and r.event_id = e.id
$$;

-- The scheduler's shared state ---------------------------------------------------------------------------------------

-- A source's limit, pause and breaker. `ring` counts what passed over the interval, `drain_at` is the last slot given to a waiting
-- event, `spent_at` when the last admission was counted (nothing in the ring is younger, whatever the width of its buckets).
-- `outcomes` are buckets of [ms since 1970, failed, succeeded], kept from the first failure in a window on; `breaker_at` is when
-- the breaker opened, `failed_trials` how many trials failed since its pause.
create table tidegate.event_scheduler_sources (
  source          text primary key,
  rate_limit      bigint,
  interval_ms     bigint,
  pause_ms        bigint,
  limit_set_by    text,
  -- Its share of a batch, while several sources wait at the inbox.
  weight          bigint      not null default 1,
  -- How many of its events may be undecided or held, and what happens when one more is published.
  max_waiting     bigint,
  when_full       text,
  paused_at       timestamptz,
  paused_until    timestamptz,
  pause_reason    text,
  paused_by       text,
  ring            bigint[]    not null default '{}',
  ring_at         bigint      not null default 0,
  ring_width_us   bigint      not null default 0,
  spent_at        timestamptz,
  drain_at        timestamptz,
  throttled_until timestamptz,
  breaker         jsonb,
  breaker_set_by  text,
  breaker_state   text        not null default 'closed',
  breaker_until   timestamptz,
  breaker_reason  text,
  breaker_at      timestamptz,
  failed_trials   bigint      not null default 0,
  outcomes        jsonb       not null default '[]',
  plan_version    bigint      not null default 0,
  is_replanning   boolean     not null default false,
  refused_at      timestamptz,
  version         bigint      not null default 1,
  updated_by      text        not null,
  created_at      timestamptz not null default tidegate.now(),
  updated_at      timestamptz not null default tidegate.now(),
  constraint event_scheduler_sources_limit_check check (rate_limit > 0 and interval_ms > 0 and pause_ms >= 0),
  constraint event_scheduler_sources_whole_limit_check
    check ((rate_limit is null) = (interval_ms is null) and (rate_limit is null) = (pause_ms is null)),
  constraint event_scheduler_sources_limit_origin_check check (limit_set_by in ('settings', 'operator')),
  constraint event_scheduler_sources_weight_check check (weight between 1 and 100),
  constraint event_scheduler_sources_backlog_check
    check ((max_waiting is null) = (when_full is null) and max_waiting > 0 and when_full in ('refuse', 'drop_oldest', 'dead_letter')),
  constraint event_scheduler_sources_pause_check
    check (paused_at is not null or (paused_until is null and pause_reason is null and paused_by is null)),
  constraint event_scheduler_sources_breaker_check check (breaker_state in ('closed', 'open', 'half_open'))
) with (fillfactor = 50);
-- The sources that have a cap on what waits.
create index event_scheduler_sources_backlog_idx on tidegate.event_scheduler_sources (source) where max_waiting is not null;

-- The same of a trigger: its throttle is the same thing as a source's limit, under one row lock.
create table tidegate.event_scheduler_triggers (
  trigger_id     uuid primary key references tidegate.workflow_event_triggers (id),
  paused_at      timestamptz,
  paused_until   timestamptz,
  pause_reason   text,
  paused_by      text,
  ring           bigint[]    not null default '{}',
  ring_at        bigint      not null default 0,
  ring_width_us  bigint      not null default 0,
  spent_at       timestamptz,
  drain_at       timestamptz,
  breaker_state  text        not null default 'closed',
  breaker_until  timestamptz,
  breaker_reason text,
  breaker_at     timestamptz,
  failed_trials  bigint      not null default 0,
  outcomes       jsonb       not null default '[]',
  counting_until timestamptz,
  -- The run that shows whether the trigger has recovered; nobody else is launched until it has ended.
  probe_run_id   uuid,
  -- A step was told to come back later, for everyone: nothing of the trigger is begun before.
  closed_until   timestamptz,
  closed_reason  text,
  plan_version   bigint      not null default 0,
  is_replanning  boolean     not null default false,
  refused_at     timestamptz,
  -- When its limits were changed last, some of its runs held their slots only while they executed.
  lends_slots    boolean     not null default false,
  version        bigint      not null default 1,
  created_at     timestamptz not null default tidegate.now(),
  updated_at     timestamptz not null default tidegate.now(),
  constraint event_scheduler_triggers_pause_check
    check (paused_at is not null or (paused_until is null and pause_reason is null and paused_by is null)),
  constraint event_scheduler_triggers_breaker_check check (breaker_state in ('closed', 'open', 'half_open'))
) with (fillfactor = 50);
-- Triggers with a failure in their window: only their runs that succeed are counted, so nothing is written for others.
create index event_scheduler_triggers_counting_idx on tidegate.event_scheduler_triggers (trigger_id) where counting_until is not null;

-- Runs that succeeded while their trigger counts, one row for each transaction that ended some: nobody waits for a trigger's row.
-- The next failure takes them into `outcomes`.
create table tidegate.trigger_successes (
  trigger_id uuid        not null,
  at         timestamptz not null,
  succeeded  bigint      not null
);
create index trigger_successes_trigger_idx on tidegate.trigger_successes (trigger_id);

-- As `closed_until`, for one concurrency key of a trigger.
create table tidegate.trigger_key_holds (
  trigger_id      uuid        not null references tidegate.workflow_event_triggers (id),
  concurrency_key text        not null,
  until           timestamptz not null,
  reason          text        not null,
  primary key (trigger_id, concurrency_key)
);

-- The windows that are open, or whose events are needed: those that wait to be launched, and whose run is unfinished. A window has the id
-- of the delivery that opened it, which waits for all of them, and of the run that takes them. `open`: takes events until `closes_at`.
-- `quiet`: of a trigger with `leading`, its one event was launched at once; the next before `closes_at` opens a window. `closed`: waits to
-- be launched. `taken`: by the run. `ended`: nothing was launched. Changed under the trigger's lock.
create table tidegate.trigger_windows (
  id              uuid        primary key,
  trigger_id      uuid        not null references tidegate.workflow_event_triggers (id),
  key             text        not null,
  state           text        not null,
  -- Of the delivery that opened it.
  event_id        uuid        not null,
  size            bigint      not null,
  opened_at       timestamptz not null,
  closes_at       timestamptz not null,
  -- The least id of its events: a day before it has none of them.
  oldest_event_id uuid        not null,
  -- The last to arrive, whose payload gives the arguments (null: it left the window, and is looked for again).
  last_event_id   uuid,
  last_sequence   bigint      not null,
  -- When the first of its events expires, by its `ttl_ms`.
  expires_at      timestamptz,
  -- The trigger's version by which its events were matched.
  trigger_version bigint      not null,
  closed_at       timestamptz,
  -- When to ask whether its events are still needed.
  forget_at       timestamptz,
  constraint trigger_windows_state_check check (state in ('open', 'quiet', 'closed', 'taken', 'ended')),
  constraint trigger_windows_size_check check (size >= 0),
  constraint trigger_windows_forget_check check ((forget_at is null) = (state in ('open', 'closed')))
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02);
-- Of a trigger and key one window takes events.
create unique index trigger_windows_open_key on tidegate.trigger_windows (trigger_id, key) where state in ('open', 'quiet');
create index trigger_windows_forget_idx on tidegate.trigger_windows (forget_at) where forget_at is not null;
create index trigger_windows_oldest_idx on tidegate.trigger_windows (oldest_event_id);

-- What was taken of each trigger and key with `skip_over`, counted like the throttle. Written under the trigger's lock; a key that is idle
-- is forgotten.
create table tidegate.trigger_rates (
  trigger_id    uuid        not null references tidegate.workflow_event_triggers (id),
  key           text        not null,
  ring          bigint[]    not null default '{}',
  ring_at       bigint      not null default 0,
  ring_width_us bigint      not null default 0,
  spent_at      timestamptz,
  forget_at     timestamptz not null,
  primary key (trigger_id, key)
) with (fillfactor = 70);
create index trigger_rates_forget_idx on tidegate.trigger_rates (forget_at);

-- Named limits that triggers share; everything about a budget is decided under its row lock.
create table tidegate.budgets (
  name         text primary key,
  -- What each key may spend in any sliding interval (null: any amount), and how many unfinished runs may hold it.
  rate_limit   bigint,
  interval_ms  bigint,
  concurrency  bigint,
  -- A template and a CEL expression over the event; null: one key, the empty text, and a cost of 1.
  key          text,
  cost         text,
  paused_at    timestamptz,
  paused_until timestamptz,
  pause_reason text,
  paused_by    text,
  -- What the code said last time it registered this budget: the same again changes nothing, so an operator's edit stays.
  declared     jsonb,
  version      bigint      not null default 1,
  created_by   text        not null,
  updated_by   text        not null,
  created_at   timestamptz not null default tidegate.now(),
  updated_at   timestamptz not null default tidegate.now(),
  constraint budgets_name_check check (length(name) between 1 and 100),
  constraint budgets_rate_check
    check ((rate_limit is null) = (interval_ms is null) and rate_limit > 0 and interval_ms > 0),
  constraint budgets_concurrency_check check (concurrency > 0),
  constraint budgets_limits_check check (rate_limit is not null or concurrency is not null),
  constraint budgets_pause_check
    check (paused_at is not null or (paused_until is null and pause_reason is null and paused_by is null))
);
create trigger raise_registry_version
  after insert or delete or update of rate_limit, interval_ms, concurrency, key, cost on tidegate.budgets
  for each statement execute function tidegate.raise_registry_version();

-- What was spent of each key within the interval. Protected by the lock on the budget's row; removed when nothing is left of it.
create table tidegate.budget_keys (
  budget         text        not null,
  key            text        not null,
  ring           bigint[]    not null default '{}',
  ring_at        bigint      not null default 0,
  ring_width_us  bigint      not null default 0,
  spent_at       timestamptz,
  drain_at       timestamptz,
  -- What is kept for a delivery that needs several budgets and was passed on from line to line, until it is launched or that time.
  reserved_for   uuid,
  reserved_cost  bigint,
  reserved_until timestamptz,
  -- A run asked everyone to wait: nothing is spent before. Then one run goes first, until it has ended or for a while.
  closed_until   timestamptz,
  closed_reason  text,
  probe_run_id   uuid,
  probe_until    timestamptz,
  updated_at     timestamptz not null default tidegate.now(),
  primary key (budget, key)
) with (fillfactor = 50);
create index budget_keys_probe_idx on tidegate.budget_keys (probe_run_id) where probe_run_id is not null;
create index budget_keys_idle_idx on tidegate.budget_keys (budget, updated_at);

-- Who holds a slot of a budget's key: a run, or one of its steps (`step_id`, which for the run is its own id). Only those of unfinished
-- runs count, and of a step that is called only while its run has the claim by which it is (null: its turn has come, and its run is
-- due), so that none is lost when a process dies.
create table tidegate.budget_holders (
  run_id           uuid not null,
  budget           text not null,
  key              text not null,
  step_id          uuid not null,
  step             text,
  claim_generation bigint,
  primary key (run_id, budget, step_id)
);
create index budget_holders_key_idx on tidegate.budget_holders (budget, key);

-- Steps that wait in the line of a budget (`key` null: in none, since it cannot be evaluated what they need), and those whose turn has
-- come (`granted_at`): what they need is spent, and their runs are due.
create table tidegate.budget_steps (
  step_id         uuid        primary key,
  run_id          uuid        not null,
  name            text        not null,
  budget          text        not null,
  key             text,
  cost            bigint,
  -- The number of the last event that was stored when the step came: its place among the deliveries that wait for the same key.
  place           bigint      not null,
  moves           bigint      not null default 0,
  next_attempt_at timestamptz not null,
  -- What the step asked for: the names of its budgets, and the keys and costs that were given with it.
  asked           jsonb       not null,
  granted_at      timestamptz,
  created_at      timestamptz not null default tidegate.now(),
  constraint budget_steps_line_check check ((key is null) = (cost is null))
) with (fillfactor = 70);
create index budget_steps_line_idx on tidegate.budget_steps (budget, key, place, step_id) where granted_at is null;
create index budget_steps_due_idx on tidegate.budget_steps (next_attempt_at) where granted_at is null;
create index budget_steps_run_idx on tidegate.budget_steps (run_id);

-- The runs that are due and wait for a concurrency slot, which they gave back while they waited: each in the line of one key of its
-- trigger, or of a budget, since it became due. A row counts while its run is unfinished and holds no slot.
create table tidegate.slot_waits (
  run_id     uuid        primary key,
  trigger_id uuid,
  budget     text,
  key        text        not null,
  since      timestamptz not null,
  constraint slot_waits_line_check check ((trigger_id is null) <> (budget is null))
);
create index slot_waits_trigger_idx on tidegate.slot_waits (trigger_id, key, since) where trigger_id is not null;
create index slot_waits_budget_idx on tidegate.slot_waits (budget, key, since) where budget is not null;

create table tidegate.event_scheduler_source_metrics (
  source         text primary key,
  total          bigint      not null default 0,
  passed         bigint      not null default 0,
  throttled      bigint      not null default 0,
  dropped        bigint      not null default 0,
  failures       bigint      not null default 0,
  total_lag_ms   bigint      not null default 0,
  last_lag_ms    bigint      not null default 0,
  max_lag_ms     bigint      not null default 0,
  last_event_at  timestamptz,
  updated_at     timestamptz not null default tidegate.now()
) with (fillfactor = 50);

create table tidegate.event_scheduler_trigger_metrics (
  trigger_id  uuid primary key references tidegate.workflow_event_triggers (id),
  filtered    bigint      not null default 0,
  matched     bigint      not null default 0,
  launched    bigint      not null default 0,
  throttled   bigint      not null default 0,
  skipped     bigint      not null default 0,
  failed      bigint      not null default 0,
  paused      bigint      not null default 0,
  collected   bigint      not null default 0,
  last_status text,
  last_error  text,
  updated_at  timestamptz not null default tidegate.now()
) with (fillfactor = 50);

-- Which workers are alive, and whose code each has, in which version (null: it has none). A run that has begun on a version is
-- claimed by workers that have it, while there are any; health tells what nobody can run. `reconciled_at` is when it last took back
-- what dead workers held.
create table tidegate.workers (
  name          text primary key,
  definitions   uuid[]      not null,
  versions      text[]      not null default '{}',
  -- How many runs it executes at a time, and its release.
  slots         bigint      not null,
  version       text        not null,
  -- Which runs it takes: the workflows whose code it has and whose runs it leaves out, and the slots that it reserves, by slug.
  left_out      text[]      not null default '{}',
  reserved      jsonb       not null default '{}',
  -- How often it sends a heartbeat.
  heartbeat_ms  bigint      not null,
  started_at    timestamptz not null default tidegate.now(),
  seen_at       timestamptz not null default tidegate.now(),
  reconciled_at timestamptz not null default tidegate.now()
);

-- Which processes are alive, and the newest schema version that the code of each knows. A migration that removes what older
-- code needs waits for those that know less. The row is written before the process begins its work.
create table tidegate.processes (
  id             uuid        primary key,
  name           text        not null,
  kind           text        not null,
  version        text        not null,
  schema_version bigint      not null,
  -- How long it would keep finished rows, in seconds (0: for ever); null: it removes none.
  retention_events_seconds       bigint,
  retention_dead_letters_seconds bigint,
  retention_audit_seconds        bigint,
  started_at     timestamptz not null default tidegate.now(),
  seen_at        timestamptz not null default tidegate.now()
);

-- Exactly one row: tells installations apart where they share something (a Redis).
create table tidegate.installation (
  id           uuid    not null default gen_random_uuid(),
  is_only_row  boolean primary key default true check (is_only_row),
  -- Signs the links of approvals; made with the first one, and never changed. A secret, stored like those of webhooks.
  approval_key text
);
insert into tidegate.installation default values;

-- What operators act on ----------------------------------------------------------------------------------------------

-- A dead letter that was replayed stays on record; when its subject fails for good again, that is a new one. `replay_at` is when it
-- is to be replayed: rows, so that no process has to stay alive for a slow replay of many.
create table tidegate.dead_letters (
  id            uuid primary key,
  kind          text        not null,
  subject_id    uuid        not null,
  event_id      uuid,
  reason        text        not null,
  detail        jsonb       not null default '{}',
  created_at    timestamptz not null default tidegate.now(),
  replay_at     timestamptz,
  replay_by     text,
  replay_error  text,
  replayed_at   timestamptz,
  replayed_by   text,
  replayed_into uuid,
  constraint dead_letters_kind_check check (kind in ('event', 'delivery', 'step', 'run')),
  constraint dead_letters_replay_check check (replay_at is null or replay_by is not null),
  constraint dead_letters_replayed_check check (replayed_at is null or replayed_by is not null)
);
create unique index dead_letters_open_key on tidegate.dead_letters (kind, subject_id) include (created_at)
  where replayed_at is null;
create index dead_letters_created_idx on tidegate.dead_letters (created_at);
create index dead_letters_subject_idx on tidegate.dead_letters (subject_id);
create index dead_letters_event_idx on tidegate.dead_letters (event_id);
create index dead_letters_replay_idx on tidegate.dead_letters (replay_at, id) where replay_at is not null;

-- Webhooks: how the signed requests of a source are checked. Whoever checks an HMAC must have the secrets, so they are stored,
-- encrypted when there is a key for it. The first is the current one, the others were replaced and hold until their `until`.
create table tidegate.webhooks (
  source            text primary key,
  scheme            text not null,
  event_type        text,
  tolerance_seconds bigint,
  secrets           jsonb not null,
  version           bigint not null default 1,
  created_by        text not null,
  created_at        timestamptz not null default tidegate.now(),
  updated_by        text not null,
  updated_at        timestamptz not null default tidegate.now(),
  constraint webhooks_scheme_check check (scheme in ('standard', 'github', 'stripe')),
  constraint webhooks_tolerance_check check ((scheme = 'github') = (tolerance_seconds is null)),
  constraint webhooks_tolerance_range_check check (tolerance_seconds between 1 and 3600),
  constraint webhooks_secrets_check check (jsonb_typeof(secrets) = 'array' and jsonb_array_length(secrets) between 1 and 5)
);

-- What a token may be used for is bounded by scopes, sources, a rate and networks.
create table tidegate.api_tokens (
  id           uuid primary key,
  name         text        not null,
  secret_hash  bytea       not null unique,
  scopes       text[]      not null,
  sources      text[],
  rate         text,
  networks     text[],
  created_by   text        not null,
  created_at   timestamptz not null default tidegate.now(),
  expires_at   timestamptz,
  revoked_at   timestamptz,
  last_used_at timestamptz,
  constraint api_tokens_scopes_check check (scopes <@ array['publish', 'read', 'operate', 'admin'])
);

create table tidegate.audit_log (
  id         uuid primary key,
  at         timestamptz not null default tidegate.now(),
  actor      text        not null,
  action     text        not null,
  subject    text        not null,
  before     jsonb,
  after      jsonb,
  token_id   uuid,
  address    text
);
create index audit_log_at_idx on tidegate.audit_log (at);
create index audit_log_subject_idx on tidegate.audit_log (subject, id);
create index audit_log_actor_idx on tidegate.audit_log (actor, id);

-- The audit log is append-only: the database itself refuses to change or delete its rows, whoever asks. Old rows go by one
-- function, which knows no other condition than their age.
create function tidegate.refuse_audit_change() returns trigger
language plpgsql
as $$
begin
  if tg_op = 'DELETE' and current_setting('tidegate.is_pruning_audit', true) = 'on' then
    return old;
  end if;
  raise exception 'audit_log is append-only: % is refused', lower(tg_op)
    using errcode = 'insufficient_privilege', hint = 'tidegate prune --audit AGE deletes what is older than AGE';
end
$$;
create trigger audit_log_append_only before update or delete on tidegate.audit_log
  for each row execute function tidegate.refuse_audit_change();
create trigger audit_log_not_truncated before truncate on tidegate.audit_log
  for each statement execute function tidegate.refuse_audit_change();

-- Deletes rows that are older than `older_seconds`, the oldest first, at most `most`; how many.
create function tidegate.prune_audit(older_seconds bigint, most bigint) returns bigint
language plpgsql
as $$
declare
  deleted bigint;
begin
  if older_seconds is null or older_seconds < 0 then
    raise exception 'older_seconds: must be 0 or more' using errcode = 'invalid_parameter_value';
  end if;
  -- Set here and not on the function, which only a superuser may do. If the delete fails, this is undone with it.
  perform set_config('tidegate.is_pruning_audit', 'on', true);
  delete from tidegate.audit_log
   where id in (select a.id from tidegate.audit_log a where a.at < tidegate.now() - older_seconds * interval '1 s'
                 order by a.at limit most);
  get diagnostics deleted = row_count;
  perform set_config('tidegate.is_pruning_audit', 'off', true);
  return deleted;
end
$$;

-- Days of history ----------------------------------------------------------------------------------------------------
-- Adding and dropping a day needs locks that stop everyone else for a moment. So the functions give up soon, and callers try again, each
-- time with one statement that is a transaction of its own: a process that is frozen or cut off holds none of these locks. They run
-- with the rights of the schema's owner: workers need no right to change the schema.

-- The tables whose partitions are days, in the order in which a day is dropped: the runs that are kept decide about the rest, and
-- the events, which everything refers to, go last.
create function tidegate.day_tables() returns table (parent text, name text, key text)
language sql immutable
as $$
  values ('workflow_runs_history', 'workflow_runs', 'id'),
         ('workflow_run_steps', 'workflow_run_steps', 'id'),
         ('run_children', 'run_children', 'step_id'),
         ('workflow_trigger_deliveries_history', 'workflow_trigger_deliveries', 'id'),
         ('event_ingress_retries_history', 'event_ingress_retries', 'event_id'),
         ('event_decisions', 'event_decisions', 'event_id'),
         ('workflow_events', 'workflow_events', 'id')
$$;

-- The days that have a partition in any of the tables.
create function tidegate.days() returns setof date
language sql stable
as $$
  select distinct to_date(right(c.relname, 8), 'YYYYMMDD')
    from tidegate.day_tables() t
    join pg_catalog.pg_inherits i on i.inhparent = format('tidegate.%I', t.parent)::regclass
    join pg_catalog.pg_class c on c.oid = i.inhrelid
   where c.relname ~ '_[0-9]{8}$'
$$;

-- Adds the partitions of one day. False when they exist, or when rows of that day are in a default partition, where they stay.
create function tidegate.add_day(day date) returns boolean
language plpgsql security definer set search_path = tidegate, pg_temp set lock_timeout = '200ms'
as $$
declare
  t        record;
  is_taken boolean;
  low      uuid := tidegate.first_of_day(add_day.day);
  high     uuid := tidegate.first_of_day(add_day.day + 1);
begin
  perform pg_advisory_xact_lock(8704, 0);
  if add_day.day in (select tidegate.days()) then
    return false;
  end if;
  for t in select * from tidegate.day_tables() loop
    execute format('select exists (select from tidegate.%I where %I >= %L and %I < %L)', t.name || '_default', t.key, low, t.key,
                   high) into is_taken;
    if is_taken then
      return false;
    end if;
  end loop;
  for t in select * from tidegate.day_tables() loop
    -- Attached, and not created as a partition: that would lock the table against everyone.
    execute format('create table tidegate.%I (like tidegate.%I including defaults including constraints)',
                   t.name || to_char(add_day.day, '_YYYYMMDD'), t.parent);
    execute format('alter table tidegate.%I attach partition tidegate.%I for values from (%L) to (%L)', t.parent,
                   t.name || to_char(add_day.day, '_YYYYMMDD'), low, high);
  end loop;
  return true;
end
$$;

-- The stories of a day that must be kept: something of them is alive, a dead letter needs them, they are in a window that is open, waits,
-- or whose run is unfinished, or a run ended at `since` or later.
-- Once the day's runs are dropped, the runs that were kept are in the default partition: they decide about the other tables, whatever
-- `since` is then. Returns the first id of each story.
create function tidegate.needed_stories(day date, since timestamptz) returns setof uuid
language plpgsql stable security definer set search_path = tidegate, pg_temp
as $$
declare
  low  uuid := tidegate.first_of_day(needed_stories.day);
  high uuid := tidegate.first_of_day(needed_stories.day + 1);
  part text := 'workflow_runs' || to_char(needed_stories.day, '_YYYYMMDD');
begin
  return query
    select tidegate.first_of(i.event_id) from tidegate.event_inbox i where i.event_id >= low and i.event_id < high
    union
    select tidegate.first_of(r.event_id) from tidegate.event_ingress_retries r
     where r.retry_state in ('scheduled', 'running') and r.event_id >= low and r.event_id < high
    union
    select tidegate.first_of(d.id) from tidegate.workflow_trigger_deliveries d
     where d.retry_state in ('scheduled', 'running') and d.id >= low and d.id < high
    union
    select tidegate.first_of(d.id) from tidegate.workflow_trigger_deliveries d
     where d.window_id = any (array(select w.id from tidegate.trigger_windows w where w.oldest_event_id < high))
       and d.id >= low and d.id < high
    union
    -- Once the day's deliveries are dropped, those that were kept for a window decide about the rest.
    select tidegate.first_of(d.id) from tidegate.workflow_trigger_deliveries_default d
     where d.window_id is not null and d.id >= low and d.id < high
    union
    select tidegate.first_of(r.id) from tidegate.workflow_runs r
     where r.status in ('pending', 'running') and r.id >= low and r.id < high
    union
    select tidegate.first_of(r.id) from tidegate.workflow_runs_default r where r.id >= low and r.id < high
    union
    select tidegate.first_of(p.event_id) from tidegate.event_replays p where p.event_id >= low and p.event_id < high
    union
    select tidegate.first_of(l.event_id) from tidegate.dead_letters l where l.event_id >= low and l.event_id < high
    union
    select tidegate.first_of(l.subject_id) from tidegate.dead_letters l where l.subject_id >= low and l.subject_id < high;
  -- The day alone is read, by the index of ends: through the table, a plan for any day would read all of its rows.
  if to_regclass(format('tidegate.%I', part)) is not null then
    return query execute format('select distinct tidegate.first_of(r.id) from tidegate.%I r where r.finished_at >= $1', part)
      using since;
  end if;
end
$$;

-- Drops one day of one table (`name` as in `day_tables`). Rows of stories that are needed move to the default partition. Returns how
-- many moved; null, and nothing is done, when there is no such partition.
create function tidegate.drop_day(name text, day date, since timestamptz) returns bigint
language plpgsql security definer set search_path = tidegate, pg_temp set lock_timeout = '200ms'
as $$
declare
  t      record;
  part   text := drop_day.name || to_char(drop_day.day, '_YYYYMMDD');
  low    uuid := tidegate.first_of_day(drop_day.day);
  high   uuid := tidegate.first_of_day(drop_day.day + 1);
  needed uuid[];
  moved  bigint;
begin
  select * into strict t from tidegate.day_tables() d where d.name = drop_day.name;
  perform pg_advisory_xact_lock(8704, 0);
  -- First the lock, then what is needed: nothing of the day becomes alive in between.
  execute format('lock table only tidegate.%I in access exclusive mode', t.parent);
  if to_regclass(format('tidegate.%I', part)) is null then
    return null;
  end if;
  needed := array(select distinct n from tidegate.needed_stories(drop_day.day, drop_day.since) n);
  execute format('alter table tidegate.%I detach partition tidegate.%I', t.parent, part);
  execute format(
    'insert into tidegate.%I select h.* from unnest($1) as n (first),
       lateral (select * from tidegate.%I where %I between n.first and tidegate.last_of(n.first)) h',
    t.name || '_default', part, t.key) using needed;
  get diagnostics moved = row_count;
  if drop_day.name = 'workflow_events' then
    delete from tidegate.event_external_ids x
     where x.event_id >= low and x.event_id < high and tidegate.first_of(x.event_id) <> all (needed);
  end if;
  execute format('drop table tidegate.%I', part);
  return moved;
end
$$;

revoke execute on function tidegate.add_day, tidegate.needed_stories, tidegate.drop_day from public;

-- The first days; workers add the next ones in time.
select tidegate.add_day((tidegate.now() at time zone 'UTC')::date + n) from generate_series(0, 1) n;

-- Publishing from SQL ------------------------------------------------------------------------------------------------

-- How many events of a source are undecided or held, counted no further than `most`. Whoever publishes for a source with a cap asks this, and
-- holds the lock until the commit: so none of them counts while another adds. Volatile, so that it sees what the one before has committed.
create function tidegate.waiting_events(source text, most bigint) returns bigint
language plpgsql volatile
as $$
begin
  perform pg_advisory_xact_lock(8704, hashtext(waiting_events.source));
  return (select count(*) from (
            (select from tidegate.event_inbox i where i.source = waiting_events.source limit waiting_events.most)
            union all
            (select from tidegate.event_ingress_retries r
              where r.source = waiting_events.source and r.retry_state = 'scheduled' and r.reason is distinct from 'scheduled'
              limit waiting_events.most)) w);
end
$$;

-- The oldest events of a source that are undecided or held, as many as `number`, leave with a reason (`said`), but not those that a worker is
-- deciding right now. Those behind them in the source's line move up, so that none waits for the slot of one that has left. Returns
-- how many left. The caller holds the lock of `waiting_events`.
create function tidegate.drop_oldest_events(source text, number bigint, said text) returns bigint
language plpgsql volatile
as $$
#variable_conflict use_column
declare
  clock timestamptz := tidegate.now();
  freed timestamptz[];
  total bigint;
  moved record;
begin
  -- Rows of sources are locked before those of events: see store/locks.py.
  perform from tidegate.event_scheduler_sources s where s.source = drop_oldest_events.source for update;
  with undecided as materialized (
    select i.ingress_sequence, i.event_id from tidegate.event_inbox i where i.source = drop_oldest_events.source
     order by i.ingress_sequence limit drop_oldest_events.number for update skip locked
  ), held as materialized (
    select r.ingress_sequence, r.event_id, r.next_attempt_at from tidegate.event_ingress_retries r
     where r.source = drop_oldest_events.source and r.retry_state = 'scheduled' and r.reason is distinct from 'scheduled' and r.reason <> 'replay'
     order by r.ingress_sequence limit drop_oldest_events.number for update skip locked
  ), oldest as materialized (
    select o.* from (select u.ingress_sequence, u.event_id, null::timestamptz as next_attempt_at from undecided u
                     union all select h.ingress_sequence, h.event_id, h.next_attempt_at from held h) o
     order by o.ingress_sequence limit drop_oldest_events.number
  ), taken as (
    delete from tidegate.event_inbox i where i.ingress_sequence in (select o.ingress_sequence from oldest o where o.next_attempt_at is null)
    returning i.event_id, i.ingress_sequence
  ), dropped as (
    insert into tidegate.event_ingress_retries (event_id, source, ingress_sequence, retry_state, reason, last_error, metadata)
    select t.event_id, drop_oldest_events.source, t.ingress_sequence, 'exhausted', 'backlog_full', said,
           jsonb_build_object('reason', 'backlog_full', 'message', said)
      from taken t
  ), left_line as (
    update tidegate.event_ingress_retries r
       set retry_state = 'exhausted', next_attempt_at = null, reason = 'backlog_full', last_error = said,
           metadata = jsonb_build_object('reason', 'backlog_full', 'message', said), claim_generation = r.claim_generation + 1,
           updated_at = clock
     where r.event_id in (select o.event_id from oldest o where o.next_attempt_at is not null) and r.retry_state = 'scheduled'
  ), told as (
    insert into tidegate.event_decisions (event_id, at, stage, decision, reason)
    select o.event_id, clock, 'gate', 'dropped', said from oldest o
  )
  select count(*), array_agg(o.next_attempt_at) filter (where o.next_attempt_at is not null) into total, freed from oldest o;
  if freed is not null then
    with line as materialized (
      select r.event_id, r.next_attempt_at, row_number() over (order by r.ingress_sequence) as place
        from tidegate.event_ingress_retries r
       where r.source = drop_oldest_events.source and r.retry_state = 'scheduled' and r.reason is distinct from 'scheduled'
    ), times as materialized (
      select t.at, row_number() over (order by t.at) as place
        from (select l.next_attempt_at as at from line l union all select unnest(freed)) t
    ), up as (
      update tidegate.event_ingress_retries r
         set next_attempt_at = t.at, claim_generation = r.claim_generation + 1, updated_at = clock,
             metadata = r.metadata || jsonb_build_object('until', t.at)
        from line l join times t on t.place = l.place
       where r.event_id = l.event_id and r.retry_state = 'scheduled' and r.next_attempt_at <> t.at
    )
    select max(t.at) as before, max(t.at) filter (where t.place <= (select count(*) from line)) as after into moved from times t;
    update tidegate.event_scheduler_sources s
       set drain_at = case when moved.after is not null then s.drain_at - (moved.before - moved.after) end, updated_at = clock
     where s.source = drop_oldest_events.source;
  end if;
  return total;
end
$$;

-- New events of a source that is full become dead letters, which can be replayed. Returns how many.
create function tidegate.dead_letter_events(ids uuid[], said text) returns bigint
language plpgsql volatile
as $$
#variable_conflict use_column
declare
  total bigint;
begin
  with taken as (
    delete from tidegate.event_inbox i
     where i.ingress_sequence in (select e.ingress_sequence from tidegate.workflow_events e where e.id = any (ids))
       and i.event_id = any (ids)
    returning i.event_id
  ), buried as (
    insert into tidegate.dead_letters (id, kind, subject_id, event_id, reason)
    select tidegate.uuid7(), 'event', t.event_id, t.event_id, said from taken t
    on conflict (kind, subject_id) where replayed_at is null do nothing
  ), told as (
    insert into tidegate.event_decisions (event_id, at, stage, decision, reason)
    select t.event_id, tidegate.now(), 'gate', 'dead_lettered', said from taken t
  )
  select count(*) into total from taken;
  return total;
end
$$;

-- Publishes an event inside the caller's own transaction and returns its id: rolled back means not published.
-- The same id and source again returns the first event's id; with another body it raises unique_violation.
-- With `deliver_at`, or `delay_ms` from now, it is decided at that time, and waits until then as `scheduled`.
-- With a `priority` from 1 to 10 (null: 1), an event gets as much of the share of its source, while several wait. Of an id that was
-- published before, the first priority stays.
-- It sends no NOTIFY (that would serialise the commits of all callers): workers see the event at their next look.
create function tidegate.publish(
  type           text,
  source         text,
  payload        jsonb       default '{}',
  id             text        default null,
  occurred_at    timestamptz default null,
  correlation_id text        default null,
  ttl_ms         bigint      default null,
  metadata       jsonb       default '{}',
  deliver_at     timestamptz default null,
  delay_ms       bigint      default null,
  priority       bigint      default null
) returns text
language plpgsql security definer set search_path = tidegate, pg_temp
as $$
#variable_conflict use_column
declare
  new_id   uuid := tidegate.uuid7();
  clock    timestamptz := tidegate.now();
  at       timestamptz;
  first    record;
  sequence bigint;
  is_new   boolean := true;
  backlog  record;
  waiting  bigint;
  said     text;
begin
  if publish.payload is null or jsonb_typeof(publish.payload) <> 'object' then
    raise exception 'payload: must be a JSON object' using errcode = 'invalid_parameter_value';
  end if;
  if octet_length(publish.payload::text) > 262144 then
    raise exception 'payload: is % bytes; at most 262144 are allowed', octet_length(publish.payload::text)
      using errcode = 'program_limit_exceeded';
  end if;
  if publish.metadata is null or jsonb_typeof(publish.metadata) <> 'object'
     or octet_length(publish.metadata::text) > 16384 then
    raise exception 'metadata: must be a JSON object of at most 16384 bytes'
      using errcode = 'invalid_parameter_value';
  end if;
  -- A number or depth that a driver cannot read back would break every page and batch that meets the row.
  if jsonb_path_exists(publish.payload, '$.** ? (@ > 9223372036854775807 || @ < -9223372036854775808)') then
    raise exception 'payload: holds a number beyond 64 bits; send it as text' using errcode = 'invalid_parameter_value';
  end if;
  if jsonb_path_exists(publish.metadata, '$.** ? (@ > 9223372036854775807 || @ < -9223372036854775808)') then
    raise exception 'metadata: holds a number beyond 64 bits; send it as text'
      using errcode = 'invalid_parameter_value';
  end if;
  if jsonb_path_exists(publish.payload, '$.**{64 to last} ? (@.type() == "object" || @.type() == "array")') then
    raise exception 'payload: is nested deeper than 64 levels' using errcode = 'invalid_parameter_value';
  end if;
  if jsonb_path_exists(publish.metadata, '$.**{64 to last} ? (@.type() == "object" || @.type() == "array")') then
    raise exception 'metadata: is nested deeper than 64 levels' using errcode = 'invalid_parameter_value';
  end if;
  if octet_length(publish.payload::text) > 40000 and (select count(*) from
     jsonb_path_query(publish.payload, 'strict $.** ? (@.type() == "object").keyvalue()')) > 10000 then
    raise exception 'payload: has more than 10000 keys' using errcode = 'invalid_parameter_value';
  end if;
  if publish.type is null or publish.type !~ '^[A-Za-z0-9._~:/?#@&=+%-]{1,200}$' then
    raise exception 'type: expected 1 to 200 letters, digits or . _ ~ : / ? # @ & = + %% -'
      using errcode = 'invalid_parameter_value';
  end if;
  if starts_with(publish.type, 'tidegate.') then
    raise exception 'type: types that begin with tidegate. are reserved' using errcode = 'invalid_parameter_value';
  end if;
  if publish.source is null or publish.source !~ '^[A-Za-z0-9._~:/?#@&=+%-]{1,200}$' then
    raise exception 'source: expected 1 to 200 letters, digits or . _ ~ : / ? # @ & = + %% -'
      using errcode = 'invalid_parameter_value';
  end if;
  if starts_with(publish.source, 'tidegate.') then
    raise exception 'source: sources that begin with tidegate. are reserved' using errcode = 'invalid_parameter_value';
  end if;
  if publish.id is not null and (publish.id !~ '\S' or length(publish.id) > 200 or publish.id ~ '[[:cntrl:]]') then
    raise exception 'id: must be text of 1 to 200 characters without control characters'
      using errcode = 'invalid_parameter_value';
  end if;
  if publish.correlation_id is not null and (publish.correlation_id !~ '\S' or length(publish.correlation_id) > 200
     or publish.correlation_id ~ '[[:cntrl:]]') then
    raise exception 'correlation_id: must be text of 1 to 200 characters without control characters'
      using errcode = 'invalid_parameter_value';
  end if;
  if publish.ttl_ms is not null and publish.ttl_ms not between 1 and 315360000000 then
    raise exception 'ttl_ms: must be a whole number from 1 to 315360000000'
      using errcode = 'invalid_parameter_value';
  end if;
  if publish.occurred_at is not null and not publish.occurred_at
     between tidegate.now() - interval '3650 days' and tidegate.now() + interval '1 day' then
    raise exception 'occurred_at: must lie within the last 3650 days and at most 1 day(s) ahead'
      using errcode = 'invalid_parameter_value';
  end if;
  if publish.deliver_at is not null and publish.delay_ms is not null then
    raise exception 'delay_ms: cannot be combined with deliver_at' using errcode = 'invalid_parameter_value';
  end if;
  if publish.delay_ms is not null and publish.delay_ms not between 0 and 31622400000 then
    raise exception 'delay_ms: must be a whole number from 0 to 31622400000' using errcode = 'invalid_parameter_value';
  end if;
  if publish.deliver_at is not null and not publish.deliver_at
     between clock - interval '3650 days' and clock + interval '366 days' then
    raise exception 'deliver_at: must lie within the last 3650 days and at most 366 days ahead'
      using errcode = 'invalid_parameter_value';
  end if;
  if publish.priority not between 1 and 10 then
    raise exception 'priority: must be a whole number from 1 to 10' using errcode = 'invalid_parameter_value';
  end if;
  at := coalesce(publish.deliver_at, clock + publish.delay_ms * interval '1 ms');

  -- If the day of the event is being added right now, wait for its end: an insert that has begun would be refused then.
  if to_regclass('tidegate.workflow_events' || to_char(clock_timestamp() at time zone 'UTC', '_YYYYMMDD')) is null then
    lock table tidegate.workflow_events_default in row exclusive mode;
  end if;

  if publish.id is not null then
    insert into tidegate.event_external_ids (external_id, source, event_id)
    values (publish.id, publish.source, new_id)
    on conflict (external_id, source) do nothing;
    is_new := found;
  end if;

  if is_new then
    insert into tidegate.workflow_events as e
      (id, external_id, type, source, occurred_at, received_at, payload, correlation_id, ttl_ms, priority, metadata, deliver_at)
    values (new_id, publish.id, publish.type, publish.source, coalesce(publish.occurred_at, clock), clock, publish.payload,
            coalesce(publish.correlation_id, new_id::text), publish.ttl_ms, publish.priority, publish.metadata, at)
    returning e.ingress_sequence into sequence;
    if at > clock then
      insert into tidegate.event_ingress_retries
        (event_id, source, ingress_sequence, next_attempt_at, reason, last_error, metadata)
      values (new_id, publish.source, sequence, at, 'scheduled', 'published for a later time',
              jsonb_build_object('reason', 'scheduled', 'until', at));
      insert into tidegate.event_decisions (event_id, at, stage, decision, reason, until)
      values (new_id, clock, 'gate', 'scheduled', 'published for a later time', at);
    else
      insert into tidegate.event_inbox (ingress_sequence, event_id, source, priority)
      values (sequence, new_id, publish.source, coalesce(publish.priority, 1));
      select s.max_waiting, s.when_full into backlog from tidegate.event_scheduler_sources s
       where s.source = publish.source and s.max_waiting is not null;
      if found then
        waiting := tidegate.waiting_events(publish.source, backlog.max_waiting + 1000);
        said := format(
          'source %s is full: at most %s of its events may wait (max_waiting)', publish.source, backlog.max_waiting);
        if waiting > backlog.max_waiting and backlog.when_full = 'refuse' then
          raise exception '%; publish again later', said using errcode = 'configuration_limit_exceeded';
        elsif waiting > backlog.max_waiting and backlog.when_full = 'drop_oldest' then
          perform tidegate.drop_oldest_events(
            publish.source, waiting - backlog.max_waiting, format('%s, and the oldest leaves for event %s', said, new_id));
        elsif waiting > backlog.max_waiting then
          perform tidegate.dead_letter_events(array[new_id], said || ', and what is over becomes a dead letter');
        end if;
      end if;
    end if;
    return new_id::text;
  end if;

  select e.id, e.type = publish.type and e.payload = publish.payload and e.metadata = publish.metadata
         and e.ttl_ms is not distinct from publish.ttl_ms
         and (publish.occurred_at is null or e.occurred_at = publish.occurred_at)
         and e.deliver_at is not distinct from
             coalesce(publish.deliver_at, e.received_at + publish.delay_ms * interval '1 ms') as same_body
    into strict first
    from tidegate.event_external_ids x join tidegate.workflow_events e on e.id = x.event_id
   where x.external_id = publish.id and x.source = publish.source;
  if not first.same_body then
    raise exception 'id: % was published before by source % with another body, as event %',
      publish.id, publish.source, first.id using errcode = 'unique_violation';
  end if;
  return first.id::text;
end
$$;
