-- kind: expand
-- Windows: a trigger that collects events and gives them to one run.

alter table tidegate.workflow_event_triggers
  -- Renders the key by which it collects (null: all of its events together).
  add column key text,
  -- How it collects events into windows: `debounce_ms`, `max_wait_ms`, `leading`, or `batch_size`, `batch_ms`; null: one run for each.
  add column collect jsonb;

alter table tidegate.event_scheduler_trigger_metrics add column collected bigint not null default 0;

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
