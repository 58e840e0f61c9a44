-- kind: expand
-- Which runs a worker takes: the workflows whose code it has and whose runs it leaves out, and the slots that it reserves, by slug.
alter table tidegate.workers
  add column left_out text[] not null default '{}',
  add column reserved jsonb not null default '{}';
