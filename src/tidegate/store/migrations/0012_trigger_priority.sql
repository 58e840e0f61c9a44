-- kind: expand
-- The priority of a trigger: the weight of its workflow among those that wait for the slots of a worker.
alter table tidegate.workflow_event_triggers
  add column priority bigint not null default 1,
  add constraint workflow_event_triggers_priority_check check (priority between 1 and 10) not valid;

-- As `tidegate.publish`, with a priority from 1 to 10: of the share of its source, while several events wait, an event gets as much as its
-- priority says. An id that was published before returns the first event, with its own priority.
create function tidegate.publish_with_priority(
  type           text,
  source         text,
  payload        jsonb,
  priority       integer,
  id             text        default null,
  occurred_at    timestamptz default null,
  correlation_id text        default null,
  ttl_ms         bigint      default null,
  metadata       jsonb       default '{}',
  deliver_at     timestamptz default null,
  delay_ms       bigint      default null
) returns text
language plpgsql security definer set search_path = tidegate, pg_temp
as $$
declare
  before    uuid := tidegate.uuid7();
  published text;
begin
  if publish_with_priority.priority is null or publish_with_priority.priority not between 1 and 10 then
    raise exception 'priority: must be a whole number from 1 to 10' using errcode = 'invalid_parameter_value';
  end if;
  published := tidegate.publish(
    publish_with_priority.type, publish_with_priority.source, publish_with_priority.payload, publish_with_priority.id,
    publish_with_priority.occurred_at, publish_with_priority.correlation_id, publish_with_priority.ttl_ms,
    publish_with_priority.metadata, publish_with_priority.deliver_at, publish_with_priority.delay_ms);
  -- One that was published before has an earlier id.
  if left(published, 18) >= left(before::text, 18) then
    update tidegate.workflow_events e set priority = publish_with_priority.priority where e.id = published::uuid;
    update tidegate.event_inbox i set priority = publish_with_priority.priority
     where i.ingress_sequence = (select e.ingress_sequence from tidegate.workflow_events e where e.id = published::uuid);
  end if;
  return published;
end
$$;
