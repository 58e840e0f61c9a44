-- kind: expand
-- Runs that take the events of a window, and the events that must be kept for them.

-- The window whose events it is given (null: its own event alone). A rerun has the window of the run it repeats.
alter table tidegate.workflow_runs add column window_id uuid;

-- As before, and: the stories of events that are in a window which is open, waits, or whose run is unfinished.
create or replace function tidegate.needed_stories(day date, since timestamptz) returns setof uuid
language plpgsql stable security definer set search_path = tidegate, pg_temp
as $$
declare
  low  uuid := tidegate.first_of_day(needed_stories.day);
  high uuid := tidegate.first_of_day(needed_stories.day + 1);
  part text := 'workflow_runs' || to_char(needed_stories.day, '_YYYYMMDD');
begin
  return query
    select tidegate.first_of(i.event_id) from tidegate.event_inbox i where i.event_id >= low and i.event_id < high
    union
    select tidegate.first_of(r.event_id) from tidegate.event_ingress_retries r
     where r.retry_state in ('scheduled', 'running') and r.event_id >= low and r.event_id < high
    union
    select tidegate.first_of(d.id) from tidegate.workflow_trigger_deliveries d
     where d.retry_state in ('scheduled', 'running') and d.id >= low and d.id < high
    union
    select tidegate.first_of(d.id) from tidegate.workflow_trigger_deliveries d
     where d.window_id = any (array(select w.id from tidegate.trigger_windows w where w.oldest_event_id < high))
       and d.id >= low and d.id < high
    union
    -- Once the day's deliveries are dropped, those that were kept for a window decide about the rest.
    select tidegate.first_of(d.id) from tidegate.workflow_trigger_deliveries_default d
     where d.window_id is not null and d.id >= low and d.id < high
    union
    select tidegate.first_of(r.id) from tidegate.workflow_runs r
     where r.status in ('pending', 'running') and r.id >= low and r.id < high
    union
    select tidegate.first_of(r.id) from tidegate.workflow_runs_default r where r.id >= low and r.id < high
    union
    select tidegate.first_of(p.event_id) from tidegate.event_replays p where p.event_id >= low and p.event_id < high
    union
    select tidegate.first_of(l.event_id) from tidegate.dead_letters l where l.event_id >= low and l.event_id < high
    union
    select tidegate.first_of(l.subject_id) from tidegate.dead_letters l where l.subject_id >= low and l.subject_id < high;
  -- The day alone is read, by the index of ends: through the table, a plan for any day would read all of its rows.
  if to_regclass(format('tidegate.%I', part)) is not null then
    return query execute format('select distinct tidegate.first_of(r.id) from tidegate.%I r where r.finished_at >= $1', part)
      using since;
  end if;
end
$$;
