-- kind: expand
-- Holds for new rows at once; the rows that are there are checked by the next migration.
alter table tidegate.workflow_events add constraint next_note_is_short check (length(next_note) <= 100) not valid;
