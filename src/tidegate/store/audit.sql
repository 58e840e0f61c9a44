-- name: insert
-- Records what an operator changed, in the transaction of the change.
insert into tidegate.audit_log (id, actor, action, subject, before, after, token_id, address)
values (tidegate.uuid7(), $1, $2, $3, $4::text::jsonb, $5::text::jsonb, $6, $7)

-- name: list
-- A page of the audit log, newest first; null filters do not filter.
select a.id, a.at, a.actor, a.token_id, a.address, a.action, a.subject, a.before, a.after
  from tidegate.audit_log a
 where ($1::text is null or a.actor = $1)
   and ($2::text is null or a.action = $2)
   and ($3::text is null or a.subject = $3)
   and ($4::uuid is null or a.id < $4)
 order by a.id desc
 limit $5
