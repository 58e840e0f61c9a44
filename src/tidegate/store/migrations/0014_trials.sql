-- How often in a row its worker died while this run was executing there with nothing beside it (null: never). Only that tells
-- which of the runs of a dead worker killed it. No default: it costs nothing where there is nothing to tell.
alter table tidegate.workflow_runs add column trials bigint;
