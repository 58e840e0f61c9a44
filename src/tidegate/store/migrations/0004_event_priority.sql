-- kind: expand
-- The priority that an event was published with (null: 1, the default).
alter table tidegate.workflow_events add column priority bigint;
