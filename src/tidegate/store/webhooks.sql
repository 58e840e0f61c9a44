-- name: lock
-- Keeps other changes of webhooks out until the end of the transaction; readers pass.
lock table tidegate.webhooks in share row exclusive mode

-- name: get
-- The webhook of a source, with its secrets.
select source, scheme, event_type, tolerance_seconds, secrets, version, created_by, created_at, updated_by, updated_at
  from tidegate.webhooks where source = $1

-- name: list
-- A page of webhooks, by source, with their secrets.
select source, scheme, event_type, tolerance_seconds, secrets, version, created_by, created_at, updated_by, updated_at
  from tidegate.webhooks where $1::text is null or source > $1 order by source limit $2

-- name: put
-- Creates or replaces the webhook of a source.
insert into tidegate.webhooks (source, scheme, event_type, tolerance_seconds, secrets, created_by, updated_by)
values ($1, $2, $3, $4, $5::text::jsonb, $6, $6)
on conflict (source) do update
   set scheme = excluded.scheme, event_type = excluded.event_type, tolerance_seconds = excluded.tolerance_seconds,
       secrets = excluded.secrets, version = webhooks.version + 1, updated_by = excluded.updated_by,
       updated_at = tidegate.now()
returning source, scheme, event_type, tolerance_seconds, secrets, version, created_by, created_at, updated_by, updated_at

-- name: delete
-- Deletes the webhook of a source.
delete from tidegate.webhooks where source = $1
