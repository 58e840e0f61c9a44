-- name: orphans
-- Rows that wait without a reason or without a way to resume, by invariant: how many, and one of them. Every count is 0 in a
-- consistent database. Rows that changed within the last $1 ms do not count: the next step may be in progress.
with clock as materialized (
  select tidegate.now() as now, tidegate.now() - $1::bigint * interval '1 ms' as cut
), held_triggers as materialized (
  select g.trigger_id from tidegate.event_scheduler_triggers g, clock
   where g.is_replanning or g.breaker_state <> 'closed' or g.closed_until > now
      or (g.paused_at is not null and (g.paused_until is null or g.paused_until > now))
), found as (
  select 'events_held_and_undecided' as name, r.event_id::text as subject
    from tidegate.event_ingress_retries r join tidegate.event_inbox i on i.event_id = r.event_id
   where r.retry_state in ('scheduled', 'running')
  union all
  select 'events_without_a_slot', r.event_id::text
    from tidegate.event_ingress_retries r join tidegate.event_scheduler_sources s on s.source = r.source
   where r.retry_state = 'scheduled' and r.reason is distinct from 'scheduled' and r.plan_version < s.plan_version
     and not s.is_replanning
  union all
  select 'events_claimed_by_nobody', r.event_id::text from tidegate.event_ingress_retries r, clock
   where r.retry_state = 'running' and r.claim_expires_at <= cut
  union all
  select 'deliveries_without_a_time', d.id::text from tidegate.workflow_trigger_deliveries d
   where d.status in ('matched', 'throttled', 'paused') and d.retry_state not in ('scheduled', 'running')
  union all
  select 'deliveries_without_a_slot', d.id::text
    from tidegate.workflow_trigger_deliveries d join tidegate.event_scheduler_triggers g on g.trigger_id = d.trigger_id
   where d.retry_state = 'scheduled' and d.plan_version < g.plan_version and not g.is_replanning
  union all
  select 'deliveries_claimed_by_nobody', d.id::text from tidegate.workflow_trigger_deliveries d, clock
   where d.retry_state = 'running' and d.claim_expires_at <= cut
  union all
  select 'deliveries_of_deleted_triggers', d.id::text
    from tidegate.workflow_trigger_deliveries d join tidegate.workflow_event_triggers t on t.id = d.trigger_id, clock
   where d.retry_state = 'scheduled' and t.deleted_at <= cut
  union all
  select 'deliveries_waiting_for_a_free_slot', d.id::text
    from tidegate.workflow_trigger_deliveries d join tidegate.workflow_event_triggers t on t.id = d.trigger_id, clock
   where d.retry_state = 'scheduled' and d.reason = 'concurrency' and d.next_attempt_at > now and d.updated_at <= cut
     and d.trigger_id not in (select trigger_id from held_triggers)
     and not exists (select from tidegate.trigger_key_holds h
                      where h.trigger_id = d.trigger_id and h.concurrency_key = d.concurrency_key and h.until > cut)
     and not exists (select from tidegate.workflow_runs r
                      where r.trigger_id = d.trigger_id and r.concurrency_key = d.concurrency_key
                        and (r.status in ('pending', 'running') or r.finished_at > cut))
     and not exists (select from tidegate.slot_waits q where q.trigger_id = d.trigger_id and q.key = d.concurrency_key)
  union all
  select 'deliveries_waiting_for_no_budget', d.id::text
    from tidegate.workflow_trigger_deliveries d left join tidegate.budgets b on b.name = d.budget, clock
   where d.retry_state = 'scheduled' and d.reason = 'budget' and b.name is null and d.updated_at <= cut
  union all
  select 'deliveries_waiting_for_a_free_budget_slot', d.id::text
    from (select distinct on (o.budget, o.budget_key) o.* from tidegate.workflow_trigger_deliveries o
           where o.retry_state = 'scheduled' and o.reason = 'budget' and o.budget_key is not null
           order by o.budget, o.budget_key, o.ingress_sequence) d
    join tidegate.budgets b on b.name = d.budget, clock
   where b.rate_limit is null and b.paused_at is null and d.next_attempt_at > now and d.updated_at <= cut
     and d.trigger_id not in (select trigger_id from held_triggers)
     and not exists (select from tidegate.budget_holders h join tidegate.workflow_runs r on r.id = h.run_id
                      where h.budget = d.budget and h.key = d.budget_key
                        and (r.status in ('pending', 'running') or r.finished_at > cut))
     and not exists (select from tidegate.budget_keys s
                      where s.budget = d.budget and s.key = d.budget_key and s.updated_at > cut)
     and not exists (select from tidegate.budget_steps p
                      where p.granted_at is null and p.budget = d.budget and p.key = d.budget_key and p.place < d.ingress_sequence)
     and not exists (select from tidegate.slot_waits q where q.budget = d.budget and q.key = d.budget_key)
  union all
  select 'steps_waiting_for_a_free_budget_slot', d.step_id::text
    from (select distinct on (o.budget, o.key) o.* from tidegate.budget_steps o
           where o.granted_at is null and o.key is not null order by o.budget, o.key, o.place, o.step_id) d
    join tidegate.budgets b on b.name = d.budget
    join tidegate.workflow_run_steps t on t.id = d.step_id, clock
   where b.rate_limit is null and b.paused_at is null and d.next_attempt_at > now and t.updated_at <= cut
     and not exists (select from tidegate.budget_holders h join tidegate.workflow_runs r on r.id = h.run_id
                      where h.budget = d.budget and h.key = d.key
                        and (r.status in ('pending', 'running') or r.finished_at > cut))
     and not exists (select from tidegate.budget_keys s
                      where s.budget = d.budget and s.key = d.key and s.updated_at > cut)
     and not exists (select from tidegate.workflow_trigger_deliveries o
                      where o.retry_state = 'scheduled' and o.reason = 'budget' and o.budget = d.budget
                        and o.budget_key = d.key and o.ingress_sequence <= d.place)
     and not exists (select from tidegate.slot_waits q where q.budget = d.budget and q.key = d.key)
  union all
  select 'budget_places_of_nobody', p.step_id::text
    from tidegate.budget_steps p
    left join tidegate.workflow_runs r on r.id = p.run_id
    left join tidegate.workflow_run_steps s on s.id = p.step_id, clock
   where s.retry_state is distinct from 'scheduled' or r.id is null
      or (r.status not in ('pending', 'running') and r.finished_at <= cut)
  union all
  select 'steps_waiting_for_no_budget', s.id::text from tidegate.workflow_run_steps s
   where s.retry_state = 'scheduled' and s.kind = 'step' and s.retry_metadata ->> 'reason' = 'budget'
     and not exists (select from tidegate.budget_steps p where p.step_id = s.id)
  union all
  select 'budget_holders_without_a_run', h.run_id::text
    from tidegate.budget_holders h
    left join tidegate.workflow_runs r on r.id = h.run_id, clock
   where r.id is null or (r.status not in ('pending', 'running') and r.finished_at <= cut)
  union all
  select 'runs_waiting_for_a_free_slot', q.run_id::text
    from (select distinct on (o.trigger_id, o.key) o.*, r.next_attempt_at, r.updated_at
            from tidegate.slot_waits o join tidegate.workflow_runs r on r.id = o.run_id and r.status = 'pending'
           where o.trigger_id is not null order by o.trigger_id, o.key, o.since) q, clock
   where q.next_attempt_at > now and q.updated_at <= cut and q.trigger_id not in (select trigger_id from held_triggers)
     and not exists (select from tidegate.trigger_key_holds h
                      where h.trigger_id = q.trigger_id and h.concurrency_key = q.key and h.until > cut)
     and not exists (select from tidegate.workflow_runs r
                      where r.trigger_id = q.trigger_id and r.concurrency_key = q.key
                        and (r.status in ('pending', 'running') or r.finished_at > cut))
  union all
  select 'slot_waits_without_a_run', q.run_id::text
    from tidegate.slot_waits q left join tidegate.workflow_runs r on {{slot_lines.is_waiting}}, clock
   where r.id is null and q.since <= cut
  union all
  select 'deliveries_stored_twice', d.id::text
    from tidegate.workflow_trigger_deliveries d join tidegate.workflow_trigger_deliveries h on h.id = d.id
   where d.retry_state in ('scheduled', 'running') and h.retry_state in ('none', 'completed', 'cancelled', 'exhausted')
  union all
  select 'runs_stored_twice', r.id::text
    from tidegate.workflow_runs r join tidegate.workflow_runs h on h.id = r.id
   where r.status in ('pending', 'running') and h.status in ('succeeded', 'failed', 'cancelled')
  union all
  select 'launches_without_a_run', d.id::text
    from tidegate.workflow_trigger_deliveries d left join tidegate.workflow_runs r on r.id = d.workflow_run_id
   where d.status = 'launched' and r.delivery_id is distinct from d.id
  union all
  select 'collected_by_nobody', d.id::text
    from tidegate.workflow_trigger_deliveries d
   where d.status = 'collected' and d.workflow_run_id is null and d.retry_state = 'none'
     and not exists (select from tidegate.workflow_trigger_deliveries l where l.id = d.window_id and l.retry_state = 'scheduled')
  union all
  select 'collected_without_a_run', d.id::text
    from tidegate.workflow_trigger_deliveries d left join tidegate.workflow_runs r on r.id = d.workflow_run_id
   where d.status = 'collected' and d.workflow_run_id is not null and r.id is null
     and exists (select from tidegate.workflow_trigger_deliveries l where l.id = d.window_id)
  union all
  select 'windows_of_nobody', w.id::text
    from tidegate.trigger_windows w
   where w.state in ('open', 'closed')
     and not exists (select from tidegate.workflow_trigger_deliveries d where d.id = w.id and d.retry_state = 'scheduled')
  union all
  select 'waits_of_nobody', w.id::text
    from tidegate.event_waits w
    left join tidegate.workflow_runs r on r.id = w.workflow_run_id and r.status in ('pending', 'running')
    left join tidegate.workflow_run_steps s on s.id = w.step_id
   where r.id is null or s.id is null or (w.mode <> 'cancel' and s.status <> 'pending')
  union all
  select 'steps_that_wait_for_nothing', s.id::text from tidegate.workflow_run_steps s
   where s.retry_state = 'scheduled' and s.kind = 'wait'
     and not exists (select from tidegate.event_waits w where w.step_id = s.id)
  union all
  select 'runs_without_a_launch', r.id::text
    from tidegate.workflow_runs r left join tidegate.workflow_trigger_deliveries d on d.id = r.delivery_id
   where r.delivery_id is not null and (d.status is null or d.status not in ('launched', 'collected') or d.workflow_run_id <> r.id)
  union all
  select 'external_ids_without_an_event', x.external_id
    from tidegate.event_external_ids x left join tidegate.workflow_events e on e.id = x.event_id
   where e.id is null
  union all
  select 'held_events_without_an_event', r.event_id::text
    from tidegate.event_ingress_retries r left join tidegate.workflow_events e on e.id = r.event_id
   where r.retry_state in ('scheduled', 'running') and e.id is null
  union all
  select 'dead_letters_without_an_event', l.id::text
    from tidegate.dead_letters l left join tidegate.workflow_events e on e.id = l.event_id
   where l.event_id is not null and e.id is null
  union all
  select 'inbox_rows_without_an_event', i.ingress_sequence::text
    from tidegate.event_inbox i left join tidegate.workflow_events e on e.id = i.event_id
   where e.ingress_sequence is distinct from i.ingress_sequence
  union all
  select 'deliveries_without_an_event', d.id::text
    from tidegate.workflow_trigger_deliveries d left join tidegate.workflow_events e on e.id = d.event_id
   where e.id is null
  union all
  select 'deliveries_without_a_trigger', d.id::text
    from tidegate.workflow_trigger_deliveries d left join tidegate.workflow_event_triggers t on t.id = d.trigger_id
   where t.id is null
  union all
  select 'runs_without_an_event', r.id::text
    from tidegate.workflow_runs r left join tidegate.workflow_events e on e.id = r.event_id
   where r.event_id is not null and e.id is null
  union all
  select 'runs_without_a_definition', r.id::text
    from tidegate.workflow_runs r left join tidegate.workflow_definitions w on w.id = r.workflow_definition_id
   where w.id is null
  union all
  select 'steps_without_a_run', s.id::text
    from tidegate.workflow_run_steps s left join tidegate.workflow_runs r on r.id = s.workflow_run_id
   where r.id is null
  union all
  select 'runs_claimed_by_nobody', r.id::text from tidegate.workflow_runs r, clock
   where r.status = 'running' and r.claim_expires_at <= cut
  union all
  select 'runs_past_their_deadline', r.id::text from tidegate.workflow_runs r, clock
   where r.status = 'pending' and r.deadline_at <= cut and r.next_attempt_at > now
  union all
  select 'steps_of_finished_runs', s.id::text
    from tidegate.workflow_run_steps s join tidegate.workflow_runs r on r.id = s.workflow_run_id
   where s.retry_state in ('scheduled', 'running') and r.status in ('succeeded', 'failed', 'cancelled')
  union all
  select 'steps_claimed_by_nobody', s.id::text from tidegate.workflow_run_steps s, clock
   where s.retry_state = 'running' and s.claim_expires_at <= cut
  union all
  select 'breakers_waiting_for_an_ended_run', g.trigger_id::text
    from tidegate.event_scheduler_triggers g left join tidegate.workflow_runs r on r.id = g.probe_run_id
   where g.breaker_state = 'half_open' and coalesce(r.status, 'gone') not in ('pending', 'running')
  union all
  select 'source_plans_without_an_end', s.source from tidegate.event_scheduler_sources s, clock
   where s.is_replanning and s.updated_at <= cut
  union all
  select 'trigger_plans_without_an_end', g.trigger_id::text from tidegate.event_scheduler_triggers g, clock
   where g.is_replanning and g.updated_at <= cut
  union all
  select 'dead_letters_not_replayed_in_time', l.id::text from tidegate.dead_letters l, clock where l.replay_at <= cut
  union all
  select 'events_not_replayed_in_time', p.event_id::text from tidegate.event_replays p, clock where p.replay_at <= cut
  union all
  select 'ticks_not_published_in_time', s.workflow_definition_id::text
    from tidegate.schedules s join tidegate.workflow_definitions w on w.id = s.workflow_definition_id, clock
   where s.next_at <= cut and w.deleted_at is null
)
select n.name, count(f.subject) as total, min(f.subject) as example
  from unnest($2::text[]) with ordinality as n (name, place) left join found f on f.name = n.name
 group by n.name, n.place order by n.place

-- name: guards
-- The unique indexes that guarantee "at most once": which of those named exist and are valid.
select c.relname as name
  from pg_catalog.pg_index i
  join pg_catalog.pg_class c on c.oid = i.indexrelid
  join pg_catalog.pg_namespace n on n.oid = c.relnamespace
 where n.nspname = 'tidegate' and i.indisunique and i.indisvalid and i.indisready and c.relname = any ($1::text[])

-- name: server
-- What the server is like: its version, what it keeps in a crash, whether it takes writes, its clock, its connections and locks.
select current_setting('server_version_num')::bigint as version, current_setting('server_version') as version_text,
       current_setting('fsync') as fsync, current_setting('full_page_writes') as full_page_writes,
       current_setting('synchronous_commit') as synchronous_commit,
       current_setting('synchronous_standby_names') as synchronous_standby_names,
       pg_is_in_recovery() or current_setting('default_transaction_read_only') = 'on' as is_read_only,
       clock_timestamp() as clock,
       (select count(*) from pg_catalog.pg_stat_activity where backend_type = 'client backend') as connections,
       current_setting('max_connections')::bigint as max_connections,
       current_setting('max_locks_per_transaction')::bigint
         * (current_setting('max_connections')::bigint + current_setting('max_prepared_transactions')::bigint) as max_locks

-- name: own_clock
-- How far the clock that schedules is from the server's, in seconds.
select extract(epoch from tidegate.now() - clock_timestamp())::float8
