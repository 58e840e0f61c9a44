-- name: insert
-- Records what an operator changed, in the transaction of the change.
insert into headgate.audit_log (id, actor, action, subject, before, after)
values (headgate.uuid7(), $1, $2, $3, $4::text::jsonb, $5::text::jsonb)
