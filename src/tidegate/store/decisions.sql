-- name: insert
-- Records decisions, in the transaction that took them.
insert into tidegate.event_decisions
  (event_id, at, stage, decision, reason, until, attempt, actor, trigger_id, detail)
select u.event_id, coalesce(u.at, tidegate.now()), u.stage, u.decision, u.reason, u.until, u.attempt, u.actor,
       u.trigger_id, u.detail::jsonb
  from unnest($1::uuid[], $2::timestamptz[], $3::text[], $4::text[], $5::text[], $6::timestamptz[], $7::bigint[],
              $8::text[], $9::uuid[], $10::text[])
    with ordinality as u (event_id, at, stage, decision, reason, until, attempt, actor, trigger_id, detail, n)
 order by u.n

-- name: list_of_event
-- What was decided about one event, in order.
select event_id, at, stage, decision, reason, until, attempt, actor, trigger_id, detail
  from tidegate.event_decisions where event_id = $1 order by id

-- name: list_recent
-- The newest decisions, before a given one, with what their events are called. Read from the end of the primary key.
select d.id, d.at, d.stage, d.decision, d.reason, d.until, d.attempt, d.actor, d.event_id, e.external_id, e.type, e.source,
       d.trigger_id, t.name as trigger, w.slug as workflow
  from (select * from tidegate.event_decisions
         where $1::bigint is null or id < $1 order by id desc limit $2) d
  left join tidegate.workflow_events e on e.id = d.event_id
  left join tidegate.workflow_event_triggers t on t.id = d.trigger_id
  left join tidegate.workflow_definitions w on w.id = t.workflow_definition_id
 order by d.id desc
