-- kind: expand
-- transaction: no
-- Who waits for a key of a budget, in the order of arrival.
create index concurrently workflow_trigger_deliveries_budget_idx
  on tidegate.workflow_trigger_deliveries_live (budget, budget_key, ingress_sequence)
  where retry_state = 'scheduled' and reason = 'budget';
-- Who stands in a trigger's own line; who waits for a budget holds up nobody there.
create index concurrently workflow_trigger_deliveries_own_line_idx
  on tidegate.workflow_trigger_deliveries_live (trigger_id, ingress_sequence)
  where retry_state = 'scheduled' and reason not in ('concurrency', 'source_paused', 'budget') and reason <> 'window';
