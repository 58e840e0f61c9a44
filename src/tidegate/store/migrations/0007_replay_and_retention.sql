-- Dead letters that can be replayed, and what deleting old rows needs.

-- A letter that was replayed stays on record; when its subject is given up again, that is a new letter. `replay_at` is when
-- it is to be replayed: rows, so that no process has to stay alive for a slow replay of many.
alter table tidegate.dead_letters
  drop constraint dead_letters_subject_key,
  add column replay_at     timestamptz,
  add column replay_by     text,
  add column replay_error  text,
  add column replayed_into uuid,
  add constraint dead_letters_replay_check check (replay_at is null or replay_by is not null),
  add constraint dead_letters_replayed_check check (replayed_at is null or replayed_by is not null);
create unique index dead_letters_open_key on tidegate.dead_letters (kind, subject_id) where replayed_at is null;
create index dead_letters_subject_idx on tidegate.dead_letters (subject_id);
create index dead_letters_event_idx on tidegate.dead_letters (event_id);
create index dead_letters_replay_idx on tidegate.dead_letters (replay_at, id) where replay_at is not null;

-- What a replay made alive again names the letter it came from (no constraint: letters are deleted sooner or later).
alter table tidegate.event_ingress_retries add column replayed_from uuid;
alter table tidegate.workflow_trigger_deliveries add column replayed_from uuid;
alter table tidegate.workflow_runs add column replayed_from uuid;

-- From here its time to live and its age are counted anew.
alter table tidegate.workflow_events add column replayed_at timestamptz;
