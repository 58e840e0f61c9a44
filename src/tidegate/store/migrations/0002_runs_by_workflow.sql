-- kind: expand
-- transaction: no
-- Pending runs by workflow: a worker claims from each workflow that has due runs, without reading those of the others.
create index concurrently workflow_runs_workflow_idx on tidegate.workflow_runs_live (workflow_definition_id, next_attempt_at, id)
  where status = 'pending';
