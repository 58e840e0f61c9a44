-- kind: expand
-- transaction: no
-- What takes long, while the tables are used.
alter table tidegate.workflow_events validate constraint next_note_is_short;
create index concurrently workflow_events_next_note_idx on tidegate.workflow_events (next_note) where next_note is not null;
create index concurrently workflow_runs_next_note_idx on tidegate.workflow_runs (next_note);
