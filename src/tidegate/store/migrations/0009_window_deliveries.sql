-- kind: expand
-- Deliveries that are collected in a window.

alter table tidegate.workflow_trigger_deliveries
  -- The window it is collected in: the id of the delivery that opened it, and of the run that takes it.
  add column window_id uuid,
  drop constraint workflow_trigger_deliveries_status_check,
  add constraint workflow_trigger_deliveries_status_check check (status in
    ('matched', 'launched', 'throttled', 'paused', 'skipped', 'failed', 'exhausted', 'cancelled', 'collected')) not valid;
