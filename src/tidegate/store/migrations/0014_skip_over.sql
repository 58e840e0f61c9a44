-- kind: expand
-- Triggers that skip what is over a rate, and that cancel the run before.

alter table tidegate.workflow_event_triggers
  -- Of the events (of a key) at most this many are taken in any sliding window; the others are skipped.
  add column skip_over_count bigint,
  add column skip_over_window_ms bigint,
  -- With `max_concurrency` 1: a new delivery cancels the unfinished run, and takes the place of those that wait.
  add column cancel_running boolean not null default false,
  add constraint workflow_event_triggers_skip_over_check
    check ((skip_over_count is null) = (skip_over_window_ms is null) and skip_over_count > 0 and skip_over_window_ms > 0) not valid;

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
