-- fragment: arrival
-- An event without its payload: when it met its source's gate first, and whether it starts one given trigger.
e.id, e.type, e.source, e.ingress_sequence, e.received_at, greatest(e.received_at, e.deliver_at) as at,
       e.origin is not null and e.origin ->> 'trigger_id' is not null as is_start

-- fragment: last_before
-- The sequence of the last event that was received before $2.
(select l.ingress_sequence from tidegate.workflow_events l
                                                       where l.received_at < $2::timestamptz
                                                       order by l.received_at desc, l.ingress_sequence desc limit 1)

-- name: of_type
-- The newest $3 events of a type ($1) up to the last event that was received before $2. The caller drops those that were received outside
-- of its span: with times as conditions, a plan may read all events in between. The type is a range of one, not equal to it: a plan for
-- equality expects few events while a day has no statistics, and reads and sorts them all.
select {{arrival}}
  from tidegate.workflow_events e
 where e.type >= $1 and (e.type, e.ingress_sequence) <= ($1, {{last_before}})
 order by e.type desc, e.ingress_sequence desc
 limit $3

-- name: of_source
-- The same of a source ($1).
select {{arrival}}
  from tidegate.workflow_events e
 where e.source >= $1 and (e.source, e.ingress_sequence) <= ($1, {{last_before}})
 order by e.source desc, e.ingress_sequence desc
 limit $3

-- name: of_all
-- The newest $3 events in a span of time.
select {{arrival}}
  from tidegate.workflow_events e
 where e.received_at >= $1::timestamptz and e.received_at < $2::timestamptz
 order by e.received_at desc, e.ingress_sequence desc
 limit $3

-- name: delivered
-- The statuses of those of the deliveries that exist; $2 is the least of their ids and $3 the greatest.
select d.id, d.status from tidegate.workflow_trigger_deliveries d where d.id = any ($1::uuid[]) and d.id between $2 and $3

-- name: undecided
-- Those of the events ($1, with their sequences $2) that wait to be decided.
select r.event_id from tidegate.event_ingress_retries r
 where r.event_id = any ($1::uuid[]) and r.retry_state in ('scheduled', 'running')
union all
select i.event_id from tidegate.event_inbox i where i.ingress_sequence = any ($2::bigint[])

-- name: waiting_for
-- The events of the first $2 deliveries that wait at triggers that use a budget ($1), and of steps that wait for it and gave no key or
-- cost of their own.
(select d.event_id
  from tidegate.workflow_event_triggers t,
       lateral (select d.event_id, d.next_attempt_at, d.ingress_sequence from tidegate.workflow_trigger_deliveries d
                 where d.trigger_id = t.id and d.retry_state = 'scheduled'
                 order by d.next_attempt_at, d.ingress_sequence limit $2) d
 where t.deleted_at is null and $1 = any (t.budgets)
 order by d.next_attempt_at, d.ingress_sequence limit $2)
union all
(select r.event_id
   from tidegate.budget_steps p join tidegate.workflow_runs r on r.id = p.run_id and r.status in ('pending', 'running')
  where p.granted_at is null and p.budget = $1 and r.event_id is not null
    and not p.asked -> 'keys' ? $1 and not p.asked -> 'costs' ? $1
  order by p.place limit $2)
limit $2
