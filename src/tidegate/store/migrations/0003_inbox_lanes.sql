-- kind: expand
-- The inbox is shared by lanes: the events of one source with one priority. What a process writes that does not know lanes has no
-- source (''): while such rows wait, the inbox is worked off in the order of arrival.
alter table tidegate.event_inbox
  add column source text collate "C" not null default '',
  add column priority bigint not null default 1;

-- As before; the row in the inbox names the source.
create or replace function tidegate.publish(
  type           text,
  source         text,
  payload        jsonb       default '{}',
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
#variable_conflict use_column
declare
  new_id   uuid := tidegate.uuid7();
  clock    timestamptz := tidegate.now();
  at       timestamptz;
  first    record;
  sequence bigint;
  is_new   boolean := true;
begin
  if publish.payload is null or jsonb_typeof(publish.payload) <> 'object' then
    raise exception 'payload: must be a JSON object' using errcode = 'invalid_parameter_value';
  end if;
  if octet_length(publish.payload::text) > 262144 then
    raise exception 'payload: is % bytes; at most 262144 are allowed', octet_length(publish.payload::text)
      using errcode = 'program_limit_exceeded';
  end if;
  if publish.metadata is null or jsonb_typeof(publish.metadata) <> 'object'
     or octet_length(publish.metadata::text) > 16384 then
    raise exception 'metadata: must be a JSON object of at most 16384 bytes'
      using errcode = 'invalid_parameter_value';
  end if;
  -- A number or depth that a driver cannot read back would break every page and batch that meets the row.
  if jsonb_path_exists(publish.payload, '$.** ? (@ > 9223372036854775807 || @ < -9223372036854775808)') then
    raise exception 'payload: holds a number beyond 64 bits; send it as text' using errcode = 'invalid_parameter_value';
  end if;
  if jsonb_path_exists(publish.metadata, '$.** ? (@ > 9223372036854775807 || @ < -9223372036854775808)') then
    raise exception 'metadata: holds a number beyond 64 bits; send it as text'
      using errcode = 'invalid_parameter_value';
  end if;
  if jsonb_path_exists(publish.payload, '$.**{64 to last} ? (@.type() == "object" || @.type() == "array")') then
    raise exception 'payload: is nested deeper than 64 levels' using errcode = 'invalid_parameter_value';
  end if;
  if jsonb_path_exists(publish.metadata, '$.**{64 to last} ? (@.type() == "object" || @.type() == "array")') then
    raise exception 'metadata: is nested deeper than 64 levels' using errcode = 'invalid_parameter_value';
  end if;
  if octet_length(publish.payload::text) > 40000 and (select count(*) from
     jsonb_path_query(publish.payload, 'strict $.** ? (@.type() == "object").keyvalue()')) > 10000 then
    raise exception 'payload: has more than 10000 keys' using errcode = 'invalid_parameter_value';
  end if;
  if publish.type is null or publish.type !~ '^[A-Za-z0-9._~:/?#@&=+%-]{1,200}$' then
    raise exception 'type: expected 1 to 200 letters, digits or . _ ~ : / ? # @ & = + %% -'
      using errcode = 'invalid_parameter_value';
  end if;
  if starts_with(publish.type, 'tidegate.') then
    raise exception 'type: types that begin with tidegate. are reserved' using errcode = 'invalid_parameter_value';
  end if;
  if publish.source is null or publish.source !~ '^[A-Za-z0-9._~:/?#@&=+%-]{1,200}$' then
    raise exception 'source: expected 1 to 200 letters, digits or . _ ~ : / ? # @ & = + %% -'
      using errcode = 'invalid_parameter_value';
  end if;
  if starts_with(publish.source, 'tidegate.') then
    raise exception 'source: sources that begin with tidegate. are reserved' using errcode = 'invalid_parameter_value';
  end if;
  if publish.id is not null and (publish.id !~ '\S' or length(publish.id) > 200 or publish.id ~ '[[:cntrl:]]') then
    raise exception 'id: must be text of 1 to 200 characters without control characters'
      using errcode = 'invalid_parameter_value';
  end if;
  if publish.correlation_id is not null and (publish.correlation_id !~ '\S' or length(publish.correlation_id) > 200
     or publish.correlation_id ~ '[[:cntrl:]]') then
    raise exception 'correlation_id: must be text of 1 to 200 characters without control characters'
      using errcode = 'invalid_parameter_value';
  end if;
  if publish.ttl_ms is not null and publish.ttl_ms not between 1 and 315360000000 then
    raise exception 'ttl_ms: must be a whole number from 1 to 315360000000'
      using errcode = 'invalid_parameter_value';
  end if;
  if publish.occurred_at is not null and not publish.occurred_at
     between tidegate.now() - interval '3650 days' and tidegate.now() + interval '1 day' then
    raise exception 'occurred_at: must lie within the last 3650 days and at most 1 day(s) ahead'
      using errcode = 'invalid_parameter_value';
  end if;
  if publish.deliver_at is not null and publish.delay_ms is not null then
    raise exception 'delay_ms: cannot be combined with deliver_at' using errcode = 'invalid_parameter_value';
  end if;
  if publish.delay_ms is not null and publish.delay_ms not between 0 and 31622400000 then
    raise exception 'delay_ms: must be a whole number from 0 to 31622400000' using errcode = 'invalid_parameter_value';
  end if;
  if publish.deliver_at is not null and not publish.deliver_at
     between clock - interval '3650 days' and clock + interval '366 days' then
    raise exception 'deliver_at: must lie within the last 3650 days and at most 366 days ahead'
      using errcode = 'invalid_parameter_value';
  end if;
  at := coalesce(publish.deliver_at, clock + publish.delay_ms * interval '1 ms');

  -- If the day of the event is being added right now, wait for its end: an insert that has begun would be refused then.
  if to_regclass('tidegate.workflow_events' || to_char(clock_timestamp() at time zone 'UTC', '_YYYYMMDD')) is null then
    lock table tidegate.workflow_events_default in row exclusive mode;
  end if;

  if publish.id is not null then
    insert into tidegate.event_external_ids (external_id, source, event_id)
    values (publish.id, publish.source, new_id)
    on conflict (external_id, source) do nothing;
    is_new := found;
  end if;

  if is_new then
    insert into tidegate.workflow_events as e
      (id, external_id, type, source, occurred_at, received_at, payload, correlation_id, ttl_ms, metadata, deliver_at)
    values (new_id, publish.id, publish.type, publish.source, coalesce(publish.occurred_at, clock), clock,
            publish.payload, coalesce(publish.correlation_id, new_id::text), publish.ttl_ms, publish.metadata, at)
    returning e.ingress_sequence into sequence;
    if at > clock then
      insert into tidegate.event_ingress_retries
        (event_id, source, ingress_sequence, next_attempt_at, reason, last_error, metadata)
      values (new_id, publish.source, sequence, at, 'scheduled', 'published for a later time',
              jsonb_build_object('reason', 'scheduled', 'until', at));
      insert into tidegate.event_decisions (event_id, at, stage, decision, reason, until)
      values (new_id, clock, 'gate', 'scheduled', 'published for a later time', at);
    else
      insert into tidegate.event_inbox (ingress_sequence, event_id, source) values (sequence, new_id, publish.source);
    end if;
    return new_id::text;
  end if;

  select e.id, e.type = publish.type and e.payload = publish.payload and e.metadata = publish.metadata
         and e.ttl_ms is not distinct from publish.ttl_ms
         and (publish.occurred_at is null or e.occurred_at = publish.occurred_at)
         and e.deliver_at is not distinct from
             coalesce(publish.deliver_at, e.received_at + publish.delay_ms * interval '1 ms') as same_body
    into strict first
    from tidegate.event_external_ids x join tidegate.workflow_events e on e.id = x.event_id
   where x.external_id = publish.id and x.source = publish.source;
  if not first.same_body then
    raise exception 'id: % was published before by source % with another body, as event %',
      publish.id, publish.source, first.id using errcode = 'unique_violation';
  end if;
  return first.id::text;
end
$$;
