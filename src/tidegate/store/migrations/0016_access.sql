-- What a token may be used for is bounded by a rate and by networks; the audit log names the token and the address.

alter table tidegate.api_tokens
  add column rate     text,
  add column networks text[];

alter table tidegate.audit_log
  add column token_id uuid,
  add column address  text;
