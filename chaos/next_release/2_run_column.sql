-- kind: expand
-- One large table at a time: while a migration waits for the second, it would hold the first.
alter table tidegate.workflow_runs add column next_note text not null default '';
