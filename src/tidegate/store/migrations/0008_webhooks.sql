-- Webhooks: how the signed requests of a source are checked.

-- Whoever checks an HMAC must have the secrets, so they are stored, encrypted when there is a key for it. The first is the current one, the others were
-- replaced and hold until their `until`.
create table tidegate.webhooks (
  source            text primary key,
  scheme            text not null,
  event_type        text,
  tolerance_seconds bigint,
  secrets           jsonb not null,
  version           bigint not null default 1,
  created_by        text not null,
  created_at        timestamptz not null default tidegate.now(),
  updated_by        text not null,
  updated_at        timestamptz not null default tidegate.now(),
  constraint webhooks_scheme_check check (scheme in ('standard', 'github', 'stripe')),
  constraint webhooks_tolerance_check check ((scheme = 'github') = (tolerance_seconds is null)),
  constraint webhooks_tolerance_range_check check (tolerance_seconds between 1 and 3600),
  constraint webhooks_secrets_check check (jsonb_typeof(secrets) = 'array' and jsonb_array_length(secrets) between 1 and 5)
);
