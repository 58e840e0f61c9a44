-- name: insert
-- Records decisions, in the transaction that took them.
insert into headgate.event_decisions
  (event_id, at, stage, decision, reason, until, attempt, actor, trigger_id, detail)
select u.event_id, coalesce(u.at, headgate.now()), u.stage, u.decision, u.reason, u.until, u.attempt, u.actor,
       u.trigger_id, u.detail::jsonb
  from unnest($1::uuid[], $2::timestamptz[], $3::text[], $4::text[], $5::text[], $6::timestamptz[], $7::bigint[],
              $8::text[], $9::uuid[], $10::text[])
    with ordinality as u (event_id, at, stage, decision, reason, until, attempt, actor, trigger_id, detail, n)
 order by u.n

-- name: list_of_event
-- What was decided about one event, in order.
select event_id, at, stage, decision, reason, until, attempt, actor, trigger_id, detail
  from headgate.event_decisions where event_id = $1 order by id
