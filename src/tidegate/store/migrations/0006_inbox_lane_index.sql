-- kind: expand
-- transaction: no
-- The inbox by lanes: a batch takes from each without reading the rows of the others.
create index concurrently event_inbox_lane_idx on tidegate.event_inbox (source, priority, ingress_sequence);
alter table tidegate.event_scheduler_sources validate constraint event_scheduler_sources_weight_check;
