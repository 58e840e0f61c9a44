-- name: list_webhooks
-- A page of the secrets of webhooks, by source.
select source as name, secrets as held from tidegate.webhooks where source > $1 order by source limit $2

-- name: list_workflows
-- A page of what workflows hold that have secrets, by slug.
select slug as name, config as held from tidegate.workflow_definitions
 where kind = $3 and deleted_at is null and slug > $1 order by slug limit $2

-- name: list_keys
-- The key of approval links, as a page of one.
select 'approval links' as name, to_jsonb(i.approval_key) as held from tidegate.installation i
 where i.approval_key is not null and 'approval links' > $1 limit $2

-- name: replace_webhooks
-- The same secrets in other words, where they are still as they were read. Returns whose.
update tidegate.webhooks w set secrets = n.after::jsonb
  from unnest($1::text[], $2::text[], $3::text[]) as n (name, before, after)
 where w.source = n.name and w.secrets = n.before::jsonb
returning n.name

-- name: replace_workflows
-- The same of workflows.
update tidegate.workflow_definitions w set config = n.after::jsonb
  from unnest($1::text[], $2::text[], $3::text[]) as n (name, before, after)
 where w.slug = n.name and w.deleted_at is null and w.config = n.before::jsonb
returning n.name

-- name: replace_keys
-- The same of the key of approval links.
update tidegate.installation i set approval_key = n.after::jsonb #>> '{}'
  from unnest($1::text[], $2::text[], $3::text[]) as n (name, before, after)
 where to_jsonb(i.approval_key) = n.before::jsonb
returning n.name

-- name: survey
-- How many webhooks, workflows and keys of approval links hold a secret in plain, one encrypted with a key that is not the first of $1, one with
-- a key that is none of them; and some of the last. $2 is the kind of workflows with secrets, $3 what encrypted ones begin
-- with.
with texts as (
  select 'webhook ' || w.source as subject, s #>> '{}' as stored
    from tidegate.webhooks w, jsonb_path_query(w.secrets, '$[*].secret') as s
  union all
  select 'workflow ' || w.slug, s #>> '{}'
    from tidegate.workflow_definitions w,
         lateral (select jsonb_path_query(w.config, '$.secret') union all
                  select jsonb_path_query(w.config, '$.old_secrets[*].secret') union all
                  select jsonb_path_query(w.config, '$.headers.*')) as h (s)
   where w.kind = $2 and w.deleted_at is null
  union all
  select 'approval links', i.approval_key from tidegate.installation i where i.approval_key is not null
), keys as (
  select subject, case when starts_with(stored, $3) then split_part(substr(stored, length($3) + 1), ':', 1) end as key
    from texts
), found as (
  select subject, bool_or(key is null) as is_plain,
         bool_or(key is not null and key is distinct from ($1::text[])[1]) as is_old,
         bool_or(key is not null and key <> all ($1::text[])) as is_unreadable
    from keys group by subject
)
select count(*) filter (where is_plain) as plain, count(*) filter (where is_old) as old,
       count(*) filter (where is_unreadable) as unreadable,
       (array_agg(subject order by subject) filter (where is_unreadable))[1:5] as examples
  from found
