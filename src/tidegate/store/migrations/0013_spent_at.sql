-- When the last admission or launch was counted in the ring. A ring of wide buckets is taken over by a limit with narrow ones
-- when the limit changes: nothing in it is younger than this.
alter table tidegate.event_scheduler_sources  add column spent_at timestamptz;
alter table tidegate.event_scheduler_triggers add column spent_at timestamptz;

update tidegate.event_scheduler_sources  set spent_at = updated_at where ring_width_us > 0;
update tidegate.event_scheduler_triggers set spent_at = updated_at where ring_width_us > 0;
