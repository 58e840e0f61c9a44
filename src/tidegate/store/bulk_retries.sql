-- fragment: events
-- Waiting events that the filters describe, with ids after $3 up to $4. Events that were published for a later time are among them
-- only if their reason is named: whoever forces or cancels what a limit or a pause holds does not mean them.
tidegate.event_ingress_retries r
 where r.retry_state = 'scheduled'
   and ($1::text is null or r.source = $1)
   and (r.reason = $2 or ($2::text is null and r.reason is distinct from 'scheduled'))
   and ($3::uuid is null or r.event_id > $3)
   and ($4::uuid is null or r.event_id <= $4)

-- fragment: deliveries
-- Waiting deliveries that the filters describe, with ids after $5 up to $6.
tidegate.workflow_trigger_deliveries d
 where d.retry_state = 'scheduled'
   and ($1::text is null
        or exists (select 1 from tidegate.workflow_events e where e.id = d.event_id and e.source = $1))
   and ($2::text is null or d.reason = $2)
   and ($3::uuid is null or d.trigger_id = $3)
   and ($4::text is null
        or d.trigger_id in (select t.id from tidegate.workflow_event_triggers t
                              join tidegate.workflow_definitions w on w.id = t.workflow_definition_id where w.slug = $4))
   and ($5::uuid is null or d.id > $5)
   and ($6::uuid is null or d.id <= $6)

-- fragment: steps
-- Steps that wait for a retry and that the filters describe, with ids after $6 up to $7. Timers are not among them, nor steps of a
-- run that is being cancelled.
tidegate.workflow_run_steps s
  join tidegate.workflow_runs r on r.id = s.workflow_run_id
 where s.retry_state = 'scheduled' and s.kind = 'step' and r.cancel_requested_at is null
   and ($1::text is null
        or exists (select 1 from tidegate.workflow_events e where e.id = r.event_id and e.source = $1))
   and ($2::text is null or s.retry_metadata ->> 'reason' = $2)
   and ($3::uuid is null or r.trigger_id = $3)
   and ($4::text is null
        or r.workflow_definition_id in (select w.id from tidegate.workflow_definitions w where w.slug = $4))
   and ($5::uuid is null or s.workflow_run_id = $5)
   and ($6::uuid is null or s.id > $6)
   and ($7::uuid is null or s.id <= $7)

-- name: count_events
-- How many waiting events the filters describe, and the last of them.
select count(*) as total, max(r.event_id::text)::uuid as last_id
  from {{events}}

-- name: match_events
-- The first of these events, in the order of their ids.
select r.event_id as id, null::uuid as trigger_id, null::uuid as workflow_run_id
  from {{events}}
 order by r.event_id
 limit $5

-- name: count_deliveries
-- How many waiting deliveries the filters describe, and the last of them.
select count(*) as total, max(d.id::text)::uuid as last_id
  from {{deliveries}}

-- name: match_deliveries
-- The first of these deliveries, in the order of their ids.
select d.id, d.trigger_id, null::uuid as workflow_run_id
  from {{deliveries}}
 order by d.id
 limit $7

-- name: count_steps
-- How many steps that wait for a retry the filters describe, and the last of them.
select count(*) as total, max(s.id::text)::uuid as last_id
  from {{steps}}

-- name: match_steps
-- The first of these steps, in the order of their ids.
select s.id, r.trigger_id, s.workflow_run_id
  from {{steps}}
 order by s.id
 limit $8
