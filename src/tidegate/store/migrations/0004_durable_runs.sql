-- Durable runs: steps that are remembered, timers, cancellation, and a bound on runs that kill their workers.

alter table tidegate.workflow_runs
  add column cancel_requested_at timestamptz,
  add column cancelled_by        text,
  -- How often a worker died with it.
  add column crashes             bigint not null default 0,
  -- What it waits for, when a step is to be tried again.
  add column warning             text,
  -- How often its function failed with RetryAfter and was called anew, and when its time is over.
  add column retry_attempts      bigint not null default 0,
  add column deadline_at         timestamptz;

-- A step was told to come back later, for everyone: nothing of the trigger (or of one of its keys) is begun before.
alter table tidegate.event_scheduler_triggers
  add column closed_until  timestamptz,
  add column closed_reason text;
create table tidegate.trigger_key_holds (
  trigger_id      uuid        not null references tidegate.workflow_event_triggers (id),
  concurrency_key text        not null,
  until           timestamptz not null,
  reason          text        not null,
  primary key (trigger_id, concurrency_key)
);

-- Which workers are alive, and whose code each has. Nothing decides by it; health tells what nobody can run.
create table tidegate.workers (
  name        text primary key,
  definitions uuid[]      not null,
  started_at  timestamptz not null default tidegate.now(),
  seen_at     timestamptz not null default tidegate.now()
);

create index workflow_runs_crashing_idx on tidegate.workflow_runs (next_attempt_at)
  where status = 'pending' and crashes > 0;

-- A result is kept as it was returned: jsonb would order the keys anew and turn 1e20 into an integer, so that a function
-- that is called anew would see another value than the first time.
alter table tidegate.workflow_run_steps
  alter column result type json using result::json,
  add column kind text not null default 'step',
  add constraint workflow_run_steps_kind_check check (kind in ('step', 'sleep'));
