-- name: publish
-- Publishes the ends of runs ($1, of which $2 is the least id and $3 the greatest) as events, in the transaction that ends them;
-- not of runs that came of such an event. Returns the sources.
with clock as materialized (
  select tidegate.now() as now
), ended as materialized (
  select tidegate.uuid7() as id, 'tidegate.run.' || r.status as type, 'workflow.' || w.slug as source,
         nextval('tidegate.ingress_sequence') as ingress_sequence,
         jsonb_build_object(
           'run_id', r.id, 'workflow', w.slug, 'status', r.status, 'event_id', r.event_id, 'attempts', r.attempts,
           'error', left(split_part(ltrim(r.error, E' \r\n\t'), E'\n', 1), 1000),
           'output', case when octet_length(r.output::text) <= 65536 then r.output end, 'cancelled_by', r.cancelled_by,
           'started_at', r.started_at, 'finished_at', r.finished_at) as payload,
         r.correlation_id, e.traceparent, jsonb_build_object('run_id', r.id, 'event_id', r.event_id) as origin
    from tidegate.workflow_runs r
    join tidegate.workflow_definitions w on w.id = r.workflow_definition_id
    left join lateral (select e.type, e.traceparent, e.origin from tidegate.workflow_events e where e.id = r.event_id offset 0) e
      on true
   where r.id = any ($1::uuid[]) and r.id between $2 and $3
     and not coalesce(starts_with(e.type, 'tidegate.run.') or e.origin ? 'of_end', false)
), stored as (
  insert into tidegate.workflow_events
    (id, type, source, occurred_at, received_at, ingress_sequence, payload, correlation_id, traceparent, origin)
  select id, type, source, now, now, ingress_sequence, payload, coalesce(correlation_id, id::text), traceparent, origin
    from ended, clock
), inboxed as (
  insert into tidegate.event_inbox (ingress_sequence, event_id, source) select ingress_sequence, id, source from ended
)
select source from ended
