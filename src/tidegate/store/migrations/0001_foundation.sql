-- The foundation: events and their inbox, definitions, triggers, deliveries, runs, steps, and durable retry state.

-- The one clock that schedules. Tests replace this function; nothing else may read the time to decide what is due.
create function tidegate.now() returns timestamptz
language sql stable parallel safe
as $$ select clock_timestamp() $$;

-- UUIDv7 for rows that SQL makes (Postgres before 18 has none of its own).
create function tidegate.uuid7() returns uuid
language sql volatile parallel safe
as $$
  select encode(
    set_byte(set_byte(overlay(uuid_send(gen_random_uuid())
      placing substring(int8send((extract(epoch from clock_timestamp()) * 1000)::bigint) from 3) from 1 for 6),
      6, (get_byte(uuid_send(gen_random_uuid()), 0) & 15) | 112),
      8, (get_byte(uuid_send(gen_random_uuid()), 1) & 63) | 128),
    'hex')::uuid
$$;

-- Events -------------------------------------------------------------------------------------------------------------

create sequence tidegate.ingress_sequence as bigint;

create table tidegate.workflow_events (
  id               uuid primary key,
  external_id      text,
  type             text        not null,
  source           text        not null,
  occurred_at      timestamptz not null,
  received_at      timestamptz not null default tidegate.now(),
  ingress_sequence bigint      not null default nextval('tidegate.ingress_sequence'),
  payload          jsonb       not null,
  correlation_id   text        not null,
  ttl_ms           bigint,
  metadata         jsonb       not null default '{}',
  traceparent      text,
  constraint workflow_events_type_check check (type ~ '^[A-Za-z0-9._~:/?#@&=+%-]{1,200}$'),
  constraint workflow_events_source_check check (source ~ '^[A-Za-z0-9._~:/?#@&=+%-]{1,200}$'),
  constraint workflow_events_external_id_check check (length(external_id) between 1 and 200),
  constraint workflow_events_correlation_id_check check (length(correlation_id) between 1 and 200),
  constraint workflow_events_payload_check check (jsonb_typeof(payload) = 'object'),
  constraint workflow_events_metadata_check check (jsonb_typeof(metadata) = 'object'),
  constraint workflow_events_ttl_check check (ttl_ms > 0),
  -- A time that a driver cannot read back would break every page and batch that meets the row.
  constraint workflow_events_occurred_at_check check (occurred_at >= '1900-01-01' and occurred_at < '9000-01-01')
);
-- Publishing is idempotent per producer's id and source; the id leads, so that it can be looked up alone.
create unique index workflow_events_external_id_key on tidegate.workflow_events (external_id, source)
  where external_id is not null;
create index workflow_events_source_idx on tidegate.workflow_events (source, ingress_sequence);
create index workflow_events_type_idx on tidegate.workflow_events (type, ingress_sequence);
create index workflow_events_correlation_idx on tidegate.workflow_events (correlation_id);
create unique index workflow_events_sequence_key on tidegate.workflow_events (ingress_sequence);

-- Accepted, not yet decided. The batch loop locks rows here, decides, and deletes them in the same transaction.
create table tidegate.event_inbox (
  ingress_sequence bigint primary key,
  event_id         uuid not null references tidegate.workflow_events (id)
) with (fillfactor = 90, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.1);

create table tidegate.event_ingress_retries (
  event_id         uuid primary key references tidegate.workflow_events (id),
  source           text        not null,
  retry_state      text        not null default 'scheduled',
  attempts         bigint      not null default 0,
  next_attempt_at  timestamptz,
  last_error       text,
  metadata         jsonb       not null default '{}',
  claim_generation bigint      not null default 0,
  claimed_by       text,
  claim_expires_at timestamptz,
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
) with (fillfactor = 70);
create index event_ingress_retries_due_idx on tidegate.event_ingress_retries (next_attempt_at, event_id)
  where retry_state = 'scheduled';
create index event_ingress_retries_lease_idx on tidegate.event_ingress_retries (claim_expires_at)
  where retry_state = 'running';
create index event_ingress_retries_source_idx on tidegate.event_ingress_retries (source, next_attempt_at)
  where retry_state = 'scheduled';

-- Definitions and triggers -------------------------------------------------------------------------------------------

create table tidegate.workflow_definitions (
  id         uuid primary key,
  slug       text        not null unique,
  kind       text        not null default 'python',
  parameters jsonb       not null default '[]',
  config     jsonb       not null default '{}',
  version    bigint      not null default 1,
  created_by text        not null,
  updated_by text        not null,
  created_at timestamptz not null default tidegate.now(),
  updated_at timestamptz not null default tidegate.now(),
  constraint workflow_definitions_slug_check check (slug ~ '^[A-Za-z0-9._-]{1,100}$'),
  constraint workflow_definitions_kind_check check (kind in ('python', 'http'))
);

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
  concurrency_key        text,
  throttle_count         bigint,
  throttle_window_ms     bigint,
  max_concurrency        bigint,
  retry                  jsonb,
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
  constraint workflow_event_triggers_throttle_check
    check ((throttle_count is null) = (throttle_window_ms is null) and throttle_count > 0 and throttle_window_ms > 0),
  constraint workflow_event_triggers_concurrency_check check (max_concurrency > 0)
);
create unique index workflow_event_triggers_name_key
  on tidegate.workflow_event_triggers (workflow_definition_id, name) where deleted_at is null;

-- One number that every change of a definition or trigger raises; each batch reads it, so that no worker decides by an
-- outdated trigger.
create table tidegate.registry_version (
  only_row boolean primary key default true check (only_row),
  version  bigint not null default 0
);
insert into tidegate.registry_version default values;

create function tidegate.raise_registry_version() returns trigger
language plpgsql security definer set search_path = tidegate, pg_temp
as $$
begin
  update tidegate.registry_version set version = version + 1;
  return null;
end
$$;
create trigger raise_registry_version after insert or update or delete on tidegate.workflow_definitions
  for each statement execute function tidegate.raise_registry_version();
create trigger raise_registry_version after insert or update or delete on tidegate.workflow_event_triggers
  for each statement execute function tidegate.raise_registry_version();

-- Deliveries, runs, steps --------------------------------------------------------------------------------------------

create table tidegate.workflow_trigger_deliveries (
  id               uuid primary key,
  trigger_id       uuid        not null references tidegate.workflow_event_triggers (id),
  event_id         uuid        not null references tidegate.workflow_events (id),
  trigger_version  bigint      not null default 1,
  -- The run it launched, or, when skipped, the run that its key had launched before. The constraint that ties a run to
  -- its delivery is workflow_runs.delivery_id; a second one the other way round would only cost.
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
  created_at       timestamptz not null default tidegate.now(),
  updated_at       timestamptz not null default tidegate.now(),
  constraint workflow_trigger_deliveries_once_key unique (event_id, trigger_id),
  constraint workflow_trigger_deliveries_status_check check (status in
    ('matched', 'launched', 'throttled', 'paused', 'skipped', 'failed', 'exhausted', 'cancelled')),
  constraint workflow_trigger_deliveries_launched_check
    check (status <> 'launched' or (workflow_run_id is not null and launched_at is not null)),
  constraint workflow_trigger_deliveries_state_check
    check (retry_state in ('none', 'scheduled', 'running', 'completed', 'cancelled', 'exhausted')),
  constraint workflow_trigger_deliveries_attempts_check check (attempts >= 0 and retry_attempts >= 0),
  constraint workflow_trigger_deliveries_waiting_check
    check (retry_state <> 'scheduled' or (next_attempt_at is not null
           and next_attempt_at between '1900-01-01' and '9000-01-01')),
  constraint workflow_trigger_deliveries_claim_check
    check ((retry_state = 'running') = (claim_expires_at is not null))
) with (fillfactor = 90);
create index workflow_trigger_deliveries_due_idx on tidegate.workflow_trigger_deliveries (next_attempt_at, id)
  where retry_state = 'scheduled';
create index workflow_trigger_deliveries_lease_idx on tidegate.workflow_trigger_deliveries (claim_expires_at)
  where retry_state = 'running';
create index workflow_trigger_deliveries_dedupe_idx on tidegate.workflow_trigger_deliveries (trigger_id, dedupe_key)
  where dedupe_key is not null;

create table tidegate.workflow_runs (
  id                     uuid primary key,
  workflow_definition_id uuid        not null references tidegate.workflow_definitions (id),
  delivery_id            uuid        references tidegate.workflow_trigger_deliveries (id),
  event_id               uuid        references tidegate.workflow_events (id),
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
  created_at             timestamptz not null default tidegate.now(),
  started_at             timestamptz,
  finished_at            timestamptz,
  updated_at             timestamptz not null default tidegate.now(),
  constraint workflow_runs_delivery_key unique (delivery_id),
  constraint workflow_runs_status_check check (status in ('pending', 'running', 'succeeded', 'failed', 'cancelled')),
  constraint workflow_runs_attempts_check check (attempts >= 0),
  constraint workflow_runs_waiting_check
    check (status <> 'pending' or (next_attempt_at is not null
           and next_attempt_at between '1900-01-01' and '9000-01-01')),
  constraint workflow_runs_claim_check check ((status = 'running') = (claim_expires_at is not null)),
  constraint workflow_runs_finished_check
    check ((status in ('succeeded', 'failed', 'cancelled')) = (finished_at is not null))
) with (fillfactor = 80);
create index workflow_runs_due_idx on tidegate.workflow_runs (next_attempt_at, id) where status = 'pending';
create index workflow_runs_lease_idx on tidegate.workflow_runs (claim_expires_at) where status = 'running';
create index workflow_runs_event_idx on tidegate.workflow_runs (event_id);

create table tidegate.workflow_run_steps (
  id               uuid primary key,
  workflow_run_id  uuid        not null references tidegate.workflow_runs (id),
  name             text        not null,
  status           text        not null default 'pending',
  result           jsonb,
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
  constraint workflow_run_steps_name_key unique (workflow_run_id, name),
  constraint workflow_run_steps_name_check check (length(name) between 1 and 200),
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
) with (fillfactor = 80);
create index workflow_run_steps_due_idx on tidegate.workflow_run_steps (next_attempt_at, id)
  where retry_state = 'scheduled';
create index workflow_run_steps_lease_idx on tidegate.workflow_run_steps (claim_expires_at)
  where retry_state = 'running';

-- The scheduler's shared state ---------------------------------------------------------------------------------------

create table tidegate.event_scheduler_sources (
  source        text primary key,
  rate_limit    bigint,
  interval_ms   bigint,
  pause_ms      bigint,
  paused_at     timestamptz,
  paused_until  timestamptz,
  pause_reason  text,
  paused_by     text,
  breaker_state text        not null default 'closed',
  version       bigint      not null default 1,
  updated_by    text        not null,
  created_at    timestamptz not null default tidegate.now(),
  updated_at    timestamptz not null default tidegate.now(),
  constraint event_scheduler_sources_limit_check check (rate_limit > 0 and interval_ms > 0 and pause_ms >= 0),
  constraint event_scheduler_sources_breaker_check check (breaker_state in ('closed', 'open', 'half_open'))
);

create table tidegate.event_scheduler_triggers (
  trigger_id    uuid primary key references tidegate.workflow_event_triggers (id),
  paused_at     timestamptz,
  paused_until  timestamptz,
  pause_reason  text,
  paused_by     text,
  breaker_state text        not null default 'closed',
  version       bigint      not null default 1,
  created_at    timestamptz not null default tidegate.now(),
  updated_at    timestamptz not null default tidegate.now(),
  constraint event_scheduler_triggers_breaker_check check (breaker_state in ('closed', 'open', 'half_open'))
);

create table tidegate.event_scheduler_source_metrics (
  source         text primary key,
  total          bigint      not null default 0,
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
  last_status text,
  last_error  text,
  updated_at  timestamptz not null default tidegate.now()
) with (fillfactor = 50);

create table tidegate.dead_letters (
  id          uuid primary key,
  kind        text        not null,
  subject_id  uuid        not null,
  event_id    uuid        references tidegate.workflow_events (id),
  reason      text        not null,
  detail      jsonb       not null default '{}',
  created_at  timestamptz not null default tidegate.now(),
  replayed_at timestamptz,
  replayed_by text,
  constraint dead_letters_kind_check check (kind in ('event', 'delivery', 'step', 'run')),
  constraint dead_letters_subject_key unique (kind, subject_id)
);
create index dead_letters_created_idx on tidegate.dead_letters (created_at);

create table tidegate.audit_log (
  id         uuid primary key,
  at         timestamptz not null default tidegate.now(),
  actor      text        not null,
  action     text        not null,
  subject    text        not null,
  before     jsonb,
  after      jsonb
);
create index audit_log_at_idx on tidegate.audit_log (at);

create table tidegate.api_tokens (
  id           uuid primary key,
  name         text        not null,
  secret_hash  bytea       not null unique,
  scopes       text[]      not null,
  sources      text[],
  created_by   text        not null,
  created_at   timestamptz not null default tidegate.now(),
  expires_at   timestamptz,
  revoked_at   timestamptz,
  last_used_at timestamptz,
  constraint api_tokens_scopes_check check (scopes <@ array['publish', 'read', 'operate', 'admin'])
);

-- Publishing from SQL ------------------------------------------------------------------------------------------------

-- Publishes an event inside the caller's own transaction and returns its id: rolled back means not published.
-- The same id and source again returns the first event's id; with another body it raises unique_violation.
-- It sends no NOTIFY (that would serialise the commits of all callers): workers see the event at their next look.
create function tidegate.publish(
  type           text,
  source         text,
  payload        jsonb       default '{}',
  id             text        default null,
  occurred_at    timestamptz default null,
  correlation_id text        default null,
  ttl_ms         bigint      default null,
  metadata       jsonb       default '{}'
) returns text
language plpgsql security definer set search_path = tidegate, pg_temp
as $$
#variable_conflict use_column
declare
  new_id   uuid := tidegate.uuid7();
  first    record;
  sequence bigint;
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
  if publish.source is null or publish.source !~ '^[A-Za-z0-9._~:/?#@&=+%-]{1,200}$' then
    raise exception 'source: expected 1 to 200 letters, digits or . _ ~ : / ? # @ & = + %% -'
      using errcode = 'invalid_parameter_value';
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

  insert into tidegate.workflow_events as e
    (id, external_id, type, source, occurred_at, payload, correlation_id, ttl_ms, metadata)
  values (new_id, publish.id, publish.type, publish.source, coalesce(publish.occurred_at, tidegate.now()),
          publish.payload, coalesce(publish.correlation_id, new_id::text), publish.ttl_ms, publish.metadata)
  on conflict (external_id, source) where external_id is not null do nothing
  returning e.ingress_sequence into sequence;

  if sequence is not null then
    insert into tidegate.event_inbox (ingress_sequence, event_id) values (sequence, new_id);
    return new_id::text;
  end if;

  select e.id, e.type = publish.type and e.payload = publish.payload and e.metadata = publish.metadata
         and e.ttl_ms is not distinct from publish.ttl_ms
         and (publish.occurred_at is null or e.occurred_at = publish.occurred_at) as same_body
    into strict first
    from tidegate.workflow_events e
   where e.external_id = publish.id and e.source = publish.source;
  if not first.same_body then
    raise exception 'id: % was published before by source % with another body, as event %',
      publish.id, publish.source, first.id using errcode = 'unique_violation';
  end if;
  return first.id::text;
end
$$;
