-- kind: expand
-- The weight of a source: its share of a batch, while several sources wait at the inbox.
alter table tidegate.event_scheduler_sources
  add column weight bigint not null default 1,
  add constraint event_scheduler_sources_weight_check check (weight between 1 and 100) not valid;
