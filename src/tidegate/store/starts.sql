-- name: list_of_story
-- The starts in the story of a run, and the trigger that each is for.
select e.id, (e.origin->>'trigger_id')::uuid
  from tidegate.workflow_events e
 where e.id between tidegate.first_of($1) and tidegate.last_of($1) and e.origin ? 'trigger_id'

-- name: unlaunched
-- Those of the starts ($1, and the runs $2 that they are to launch) that are decided and have launched no run and wait for nothing, with the
-- reason.
select u.run_id,
       coalesce(d.last_error, i.last_error,
                (select l.reason from tidegate.dead_letters l
                  where l.kind = 'event' and l.subject_id = u.event_id and l.replayed_at is null),
                'the trigger of the workflow was disabled or deleted') as reason
  from unnest($1::uuid[], $2::uuid[]) as u (event_id, run_id)
  left join lateral (select d.retry_state, d.last_error from tidegate.workflow_trigger_deliveries d
                      where d.id = u.run_id offset 0) d on true
  left join lateral (select i.retry_state, i.last_error from tidegate.event_ingress_retries i
                      where i.event_id = u.event_id offset 0) i on true
 where coalesce(d.retry_state, 'none') not in ('scheduled', 'running')
   and coalesce(i.retry_state, 'none') not in ('scheduled', 'running')
   and not exists (select from tidegate.workflow_runs r where r.id = u.run_id offset 0)
   and not exists (select from tidegate.workflow_events e join tidegate.event_inbox b on b.ingress_sequence = e.ingress_sequence
                    where e.id = u.event_id)
