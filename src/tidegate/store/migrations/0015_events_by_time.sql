-- Events are listed by the time of their receipt: without an index a page of an old day read everything that came after it.
-- The events of one commit share their time, so the index stays small.
create index workflow_events_received_idx on tidegate.workflow_events (received_at);
