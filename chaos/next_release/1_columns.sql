-- kind: expand
-- New columns of a table that is written all the time: the code before leaves them out.
alter table tidegate.workflow_events
  add column next_note text,
  add column next_tier text not null default 'standard';
create table tidegate.next_notes (
  id   uuid primary key,
  note text not null
);
