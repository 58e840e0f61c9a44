-- kind: expand
-- transaction: no
-- The members of a window, the unfinished runs that need one, and the deliveries' new states.

create index concurrently workflow_trigger_deliveries_window_idx on tidegate.workflow_trigger_deliveries (window_id)
  where window_id is not null;
create index concurrently workflow_runs_window_idx on tidegate.workflow_runs_live (window_id) where window_id is not null;
alter table tidegate.workflow_trigger_deliveries validate constraint workflow_trigger_deliveries_status_check;
