-- kind: expand
-- transaction: no
alter table tidegate.workflow_event_triggers validate constraint workflow_event_triggers_priority_check;
