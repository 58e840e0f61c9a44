-- Breakers open on a share of the outcomes. `outcomes` are buckets of [ms since 1970, failed, succeeded], kept from the first
-- failure in a window on; `breaker_at` is when the breaker opened, `failed_trials` how many trials failed since its pause.
alter table tidegate.event_scheduler_sources
  add column outcomes       jsonb    not null default '[]',
  add column breaker_at     timestamptz,
  add column failed_trials  bigint   not null default 0,
  add column breaker        jsonb,
  add column breaker_set_by text;
alter table tidegate.event_scheduler_triggers
  add column outcomes       jsonb    not null default '[]',
  add column breaker_at     timestamptz,
  add column failed_trials  bigint   not null default 0,
  add column counting_until timestamptz;

update tidegate.event_scheduler_sources
   set outcomes = (select jsonb_agg(jsonb_build_array(floor(extract(epoch from at) * 1000)::bigint, 1, 0) order by at) from unnest(failures) at),
       breaker_at = case when breaker_state <> 'closed' then failures[cardinality(failures)] end
 where cardinality(failures) > 0;
update tidegate.event_scheduler_triggers
   set outcomes = (select jsonb_agg(jsonb_build_array(floor(extract(epoch from at) * 1000)::bigint, 1, 0) order by at) from unnest(failures) at),
       breaker_at = case when breaker_state <> 'closed' then failures[cardinality(failures)] end
 where cardinality(failures) > 0;

alter table tidegate.event_scheduler_sources  drop column failures;
alter table tidegate.event_scheduler_triggers drop column failures;

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
