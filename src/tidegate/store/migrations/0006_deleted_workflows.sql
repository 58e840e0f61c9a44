-- A deleted workflow stays as a row that its runs and triggers on record refer to; its name is free for another.

alter table tidegate.workflow_definitions
  add column deleted_at timestamptz,
  drop constraint workflow_definitions_slug_key;
create unique index workflow_definitions_slug_key on tidegate.workflow_definitions (slug) where deleted_at is null;
