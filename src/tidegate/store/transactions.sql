-- name: begin
-- Settings of this transaction: how long it, its statements and its waits for locks may take (transaction_timeout is unknown before
-- Postgres 17), and a mark by which `write` recognises it.
select set_config(s.name, s.value, true)
  from (values ('statement_timeout', $1::text), ('lock_timeout', $1::text), ('idle_in_transaction_session_timeout', $1::text),
               ('transaction_timeout', $2::text), ('tidegate.transaction', $3::text)) as s (name, value)
 where s.name = 'tidegate.transaction' or current_setting(s.name, true) is not null

-- name: write
-- Records that a step succeeded, in the transaction of its function, if the worker still holds the run, nobody asked for the run's
-- cancellation, the step is not done, and this is still the transaction that was begun ($7). Otherwise nothing is written; the
-- caller rolls back. Returns no row if the claim is lost. The run is locked until the end of the transaction: no worker takes it over.
with held as materialized (
  select r.id, r.cancel_requested_at is not null as is_cancel_requested,
         coalesce(current_setting('tidegate.transaction', true) = $7::text, false) as is_whole
    from tidegate.workflow_runs r
   where r.id = $2::uuid and {{runs.is_held}} and r.claim_generation = $3::bigint
     for no key update of r
), written as (
  insert into tidegate.workflow_run_steps as s
    (id, workflow_run_id, name, kind, status, result, retry_attempts, created_at, updated_at)
  select $1::uuid, h.id, $4::text, 'step', 'succeeded', $5::text::json, $6::bigint, tidegate.now(), tidegate.now()
    from held h where h.is_whole and not h.is_cancel_requested
  on conflict (id) do update
     set status = excluded.status, result = excluded.result, error = null, retry_state = 'none', next_attempt_at = null,
         retry_attempts = greatest(s.retry_attempts, excluded.retry_attempts), retry_metadata = '{}',
         claim_generation = s.claim_generation + 1, updated_at = excluded.updated_at
   where s.status not in ('succeeded', 'failed', 'cancelled')
  returning s.id
)
select h.is_cancel_requested, h.is_whole, exists (select from written) from held h

-- name: lock_run
-- Locks a run, so that a transaction that may be committing its step is over. `stored` then sees what it wrote.
select r.id from tidegate.workflow_runs r where r.id = $1::uuid for no key update

-- name: stored
-- The status and result of a step.
select s.status, s.result from tidegate.workflow_run_steps s where s.id = $1::uuid

-- name: begin_probe
-- Takes a lock that another session of the same database sees.
select pg_advisory_xact_lock($1::bigint)

-- name: probe
-- Whether the lock of `begin_probe` is seen here, that is, this is the same database; whether this role may use the schema: to lock
-- runs and write steps; and whether this is still the transaction that was begun ($2), which it is not in autocommit mode.
select not pg_try_advisory_xact_lock($1::bigint),
       exists (select from pg_namespace n where n.nspname = 'tidegate' and case when has_schema_privilege(n.oid, 'usage') then
                 has_table_privilege('tidegate.workflow_runs', 'update')
                 and has_table_privilege('tidegate.workflow_run_steps', 'insert')
                 and has_table_privilege('tidegate.workflow_run_steps', 'update')
                 and has_table_privilege('tidegate.workflow_run_steps', 'select') end),
       coalesce(current_setting('tidegate.transaction', true) = $2::text, false)
