-- What waits can be counted from its index alone, and an event can be deleted without a search through the inbox.

-- The same keys as before: what is due, and the line of a trigger. Beside them now stands why each row waits,
-- so that health reads these indexes and no rows. All are partial: what does not wait is in none of them.
drop index tidegate.event_ingress_retries_due_idx;
create index event_ingress_retries_due_idx
  on tidegate.event_ingress_retries (next_attempt_at, event_id) include (source, reason)
  where retry_state = 'scheduled';
drop index tidegate.workflow_trigger_deliveries_line_idx;
create index workflow_trigger_deliveries_line_idx
  on tidegate.workflow_trigger_deliveries (trigger_id, next_attempt_at, ingress_sequence) include (reason, source)
  where retry_state = 'scheduled';
drop index tidegate.workflow_run_steps_due_idx;
create index workflow_run_steps_due_idx on tidegate.workflow_run_steps (next_attempt_at, id) include (kind)
  where retry_state = 'scheduled';
drop index tidegate.dead_letters_open_key;
create unique index dead_letters_open_key on tidegate.dead_letters (kind, subject_id) include (created_at)
  where replayed_at is null;

-- The inbox refers to its event by the number that is its own key: whoever deletes an event looks there, and the inbox
-- needs no second index. By the event's id every deletion read the whole inbox.
alter table tidegate.event_inbox
  drop constraint event_inbox_event_id_fkey,
  add constraint event_inbox_event_fkey foreign key (ingress_sequence)
    references tidegate.workflow_events (ingress_sequence);

-- Rows that wait are among the newest of a long history. Vacuumed early, their pages are known to be visible to all, and who
-- counts them need not look at each; only pages written since the last time are read for it.
alter table tidegate.event_ingress_retries
  set (autovacuum_vacuum_insert_scale_factor = 0.02, autovacuum_vacuum_scale_factor = 0.05);
alter table tidegate.workflow_trigger_deliveries set (autovacuum_vacuum_insert_scale_factor = 0.02);
alter table tidegate.workflow_run_steps set (autovacuum_vacuum_insert_scale_factor = 0.02);

-- When a worker last took back what dead workers held: a loop that fails everywhere is seen from anywhere. Null: not known.
alter table tidegate.workers add column reconciled_at timestamptz;
