-- The audit log is append-only: the database itself refuses to change or delete its rows, whoever asks. Old rows go by one
-- function, which knows no other condition than their age.

create function tidegate.refuse_audit_change() returns trigger
language plpgsql
as $$
begin
  if tg_op = 'DELETE' and current_setting('tidegate.is_pruning_audit', true) = 'on' then
    return old;
  end if;
  raise exception 'audit_log is append-only: % is refused', lower(tg_op)
    using errcode = 'insufficient_privilege', hint = 'tidegate prune --audit AGE deletes what is older than AGE';
end
$$;

create trigger audit_log_append_only before update or delete on tidegate.audit_log
  for each row execute function tidegate.refuse_audit_change();
create trigger audit_log_not_truncated before truncate on tidegate.audit_log
  for each statement execute function tidegate.refuse_audit_change();

-- Deletes rows that are older than so many seconds, the oldest first, at most `most`; how many.
create function tidegate.prune_audit(older_seconds bigint, most bigint) returns bigint
language plpgsql
as $$
declare
  deleted bigint;
begin
  if older_seconds is null or older_seconds < 0 then
    raise exception 'older_seconds: must be 0 or more' using errcode = 'invalid_parameter_value';
  end if;
  -- Set here and not on the function, which only a superuser may do. If the delete fails, this is undone with it.
  perform set_config('tidegate.is_pruning_audit', 'on', true);
  delete from tidegate.audit_log
   where id in (select a.id from tidegate.audit_log a where a.at < tidegate.now() - older_seconds * interval '1 s'
                 order by a.at limit most for update skip locked);
  get diagnostics deleted = row_count;
  perform set_config('tidegate.is_pruning_audit', 'off', true);
  return deleted;
end
$$;

create index audit_log_subject_idx on tidegate.audit_log (subject, id);
create index audit_log_actor_idx on tidegate.audit_log (actor, id);
