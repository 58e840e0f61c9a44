-- name: lock
-- Keeps other changes of tokens out until the end of the transaction, so that names stay unique; readers pass.
lock table tidegate.api_tokens in share row exclusive mode

-- name: insert
-- A new token. `$8` is a moment, `$9` a duration from now.
insert into tidegate.api_tokens (id, name, secret_hash, scopes, sources, rate, networks, created_by, expires_at)
values (tidegate.uuid7(), $1, $2, $3, $4, $5, $6, $7,
        coalesce($8::timestamptz, tidegate.now() + $9::bigint * interval '1 millisecond'))
returning id

-- name: get
-- One token, by its id.
select id, name, scopes, sources, rate, networks, created_by, created_at, expires_at, revoked_at, last_used_at
  from tidegate.api_tokens where id = $1

-- name: find_unrevoked
-- The token of that name that has not been revoked.
select id, name, scopes, sources, rate, networks, created_by, created_at, expires_at, revoked_at, last_used_at
  from tidegate.api_tokens where name = $1 and revoked_at is null

-- name: by_hash
-- The token of a presented secret, whether it has expired, and whether its use has not been noted for a minute.
select id, name, scopes, sources, rate, networks, created_by, created_at, expires_at, revoked_at, last_used_at,
       coalesce(expires_at <= tidegate.now(), false) as is_expired,
       coalesce(last_used_at < tidegate.now() - interval '1 minute', true) as is_use_unnoted
  from tidegate.api_tokens where secret_hash = $1

-- name: note_use
-- Notes that a token is in use.
update tidegate.api_tokens set last_used_at = tidegate.now() where id = $1

-- name: revoke
-- Ends a token for good.
update tidegate.api_tokens set revoked_at = tidegate.now() where id = $1 and revoked_at is null

-- name: list
-- A page of tokens, newest first.
select id, name, scopes, sources, rate, networks, created_by, created_at, expires_at, revoked_at, last_used_at
  from tidegate.api_tokens where $1::uuid is null or id < $1 order by id desc limit $2
