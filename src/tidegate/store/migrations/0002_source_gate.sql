-- The source gate: exact limits, pauses, breaker, places in line, and what was decided about held events.

alter table tidegate.event_scheduler_sources
  add column limit_set_by     text,
  add column ring             bigint[]      not null default '{}',
  add column ring_at          bigint        not null default 0,
  add column ring_width_us    bigint        not null default 0,
  add column drain_at         timestamptz,
  add column throttled_until  timestamptz,
  add column breaker_until    timestamptz,
  add column breaker_reason   text,
  add column failures         timestamptz[] not null default '{}',
  add column plan_version     bigint        not null default 0,
  add column is_replanning    boolean       not null default false,
  add column refused_at       timestamptz,
  add constraint event_scheduler_sources_whole_limit_check
    check ((rate_limit is null) = (interval_ms is null) and (rate_limit is null) = (pause_ms is null)),
  add constraint event_scheduler_sources_limit_origin_check check (limit_set_by in ('settings', 'operator')),
  add constraint event_scheduler_sources_pause_check
    check (paused_at is not null or (paused_until is null and pause_reason is null and paused_by is null)),
  set (fillfactor = 50);

-- `reason` is why it waits (rate_limit, paused, breaker_open); `plan_version` is the source's plan that its slot belongs
-- to: a row with an older one gets a new slot before it is looked at again.
alter table tidegate.event_ingress_retries
  add column ingress_sequence bigint not null default 0,
  add column plan_version     bigint not null default 0,
  add column reason           text;

alter table tidegate.event_scheduler_source_metrics
  add column passed bigint not null default 0;

drop index tidegate.event_ingress_retries_source_idx;
create index event_ingress_retries_source_idx
  on tidegate.event_ingress_retries (source, next_attempt_at, ingress_sequence) where retry_state = 'scheduled';
create index event_ingress_retries_arrival_idx
  on tidegate.event_ingress_retries (source, ingress_sequence) where retry_state = 'scheduled';

-- What was decided about an event beyond the plain way (accepted, delivered, run), in order. Written in the transaction
-- of the decision; nothing reads it to decide.
create table tidegate.event_decisions (
  id       bigint generated always as identity primary key,
  event_id uuid        not null,
  at       timestamptz not null default tidegate.now(),
  stage    text        not null,
  decision text        not null,
  reason   text,
  until    timestamptz,
  attempt  bigint,
  actor    text
);
create index event_decisions_event_idx on tidegate.event_decisions (event_id, id);

-- Exactly one row: tells installations apart where they share something (a Redis).
create table tidegate.installation (
  id          uuid    not null default gen_random_uuid(),
  is_only_row boolean primary key default true check (is_only_row)
);
insert into tidegate.installation default values;
