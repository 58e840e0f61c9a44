-- kind: expand
-- Named budgets, shared by triggers.

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

-- The runs that hold a slot of a budget's key. Only those that are unfinished count, so that none is lost when a process dies.
create table tidegate.budget_holders (
  run_id uuid not null,
  budget text not null,
  key    text not null,
  primary key (run_id, budget)
);
create index budget_holders_key_idx on tidegate.budget_holders (budget, key);

alter table tidegate.workflow_event_triggers add column budgets text[] not null default '{}';
