-- Events are listed, and deleted, by the time of their receipt: without an index a page of an old day read everything that
-- came after it. The sequence alone needs none then.
create unique index workflow_events_arrival_key on tidegate.workflow_events (received_at, ingress_sequence);
drop index tidegate.workflow_events_sequence_key;
