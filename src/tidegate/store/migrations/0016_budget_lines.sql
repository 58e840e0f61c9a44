-- kind: expand
-- The budget that holds a waiting delivery, the key of it, and what it will spend.
alter table tidegate.workflow_trigger_deliveries
  add column budget text, add column budget_key text, add column budget_cost bigint;
