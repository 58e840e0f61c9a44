-- Many transactions write these rows: a transaction writes them last, the triggers before the sources, each in a fixed order.

-- fragment: count
-- Adds what a batch saw to the totals. `seen` has at most one row: `triggers` and `sources`, each a JSON list of objects.
-- `after_triggers` has the sources written after the triggers.
counted_triggers as (
  insert into tidegate.event_scheduler_trigger_metrics as m
    (trigger_id, filtered, matched, launched, throttled, skipped, failed, paused, collected, last_status, last_error, updated_at)
  select u.*, tidegate.now()
    from seen, json_to_recordset(seen.triggers)
      as u (trigger_id uuid, filtered bigint, matched bigint, launched bigint, throttled bigint, skipped bigint,
            failed bigint, paused bigint, collected bigint, last_status text, last_error text)
   order by u.trigger_id
  on conflict (trigger_id) do update
     set filtered = m.filtered + excluded.filtered, matched = m.matched + excluded.matched,
         launched = m.launched + excluded.launched, throttled = m.throttled + excluded.throttled,
         skipped = m.skipped + excluded.skipped, failed = m.failed + excluded.failed,
         paused = m.paused + excluded.paused, collected = m.collected + excluded.collected, last_status = excluded.last_status,
         last_error = coalesce(excluded.last_error, m.last_error), updated_at = excluded.updated_at
  returning 1
), counted_sources as (
  insert into tidegate.event_scheduler_source_metrics as m
    (source, total, passed, throttled, dropped, failures, total_lag_ms, last_lag_ms, max_lag_ms, last_event_at, updated_at)
  select u.*, tidegate.now()
    from seen, (select count(*) from counted_triggers) as after_triggers, json_to_recordset(seen.sources)
      as u (source text, total bigint, passed bigint, throttled bigint, dropped bigint, failures bigint,
            total_lag_ms bigint, last_lag_ms bigint, max_lag_ms bigint, last_event_at timestamptz)
   order by u.source
  on conflict (source) do update
     set total = m.total + excluded.total, passed = m.passed + excluded.passed,
         throttled = m.throttled + excluded.throttled, dropped = m.dropped + excluded.dropped,
         failures = m.failures + excluded.failures, total_lag_ms = m.total_lag_ms + excluded.total_lag_ms,
         last_lag_ms = excluded.last_lag_ms, max_lag_ms = greatest(m.max_lag_ms, excluded.max_lag_ms),
         last_event_at = greatest(m.last_event_at, excluded.last_event_at), updated_at = excluded.updated_at
)

-- name: add
-- Adds what a batch saw of triggers ($1) and sources ($2) to their totals.
with seen as materialized (
  select $1::text::json as triggers, $2::text::json as sources
), {{count}}
select
