-- Schedules: workflows that run by the clock. Each tick is an ordinary event, published by whoever locks the row.

create table tidegate.schedules (
  workflow_definition_id uuid primary key references tidegate.workflow_definitions (id),
  every_ms               bigint,
  cron                   text,
  timezone               text,
  next_at                timestamptz not null,
  last_at                timestamptz,
  created_at             timestamptz not null default tidegate.now(),
  updated_at             timestamptz not null default tidegate.now(),
  constraint schedules_kind_check check ((every_ms is null) <> (cron is null)),
  constraint schedules_every_check check (every_ms >= 1000),
  constraint schedules_timezone_check check ((cron is null) = (timezone is null)),
  constraint schedules_next_check check (next_at between '1900-01-01' and '9000-01-01')
) with (fillfactor = 50);
create index schedules_due_idx on tidegate.schedules (next_at);
