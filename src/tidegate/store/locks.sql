-- name: take_turn
-- Waits for its turn at the inbox, and for the transactions that have claimed any of the oldest $1 events: what `claim_inbox` takes after
-- this, in the same transaction, is decided after all that came before it.
with turn as materialized (select pg_advisory_xact_lock(8703, 0))
select count(*)
  from (select from tidegate.event_inbox where (select count(*) from turn) = 1
         order by ingress_sequence limit $1 for update) oldest

-- name: hold_turn
-- Waits for its turn at the inbox, and keeps it until the commit.
select pg_advisory_xact_lock(8703, 0)

-- name: is_in_turn
-- Whether no other transaction has the turn, and no event that came before the one given is undecided; the turn is taken until the
-- commit if it is free. What this transaction has claimed it does not see any more.
select pg_try_advisory_xact_lock(8703, 0)
   and not exists (select from tidegate.event_inbox where ingress_sequence < $1)

-- name: share
-- Takes the shared locks that let this transaction launch for the sources. A pause, a resume and a change of limits take the same lock
-- exclusively: when their call returns, no launch decided before them is in progress. Sources share 64 locks, so that a
-- batch of many sources cannot use up the server's lock table. The same for the triggers (8702): a
-- transaction that changes or pauses one takes that lock exclusively.
select pg_advisory_xact_lock_shared(k.class, k.key)
  from (select distinct 8701 as class, hashtext(s) & 63 as key from unnest($1::text[]) as s
        union all select 8702, 0 order by 1, 2) k

-- name: share_all
-- As `share`, for every source: for a transaction that does not know yet what it launches.
select pg_advisory_xact_lock_shared(k.class, k.key)
  from (select 8701 as class, generate_series(0, 63) as key union all select 8702, 0 order by 1, 2) k

-- name: exclude_source
-- Waits until no transaction that may launch for the source is in progress, and keeps new ones out until the commit.
select pg_advisory_xact_lock(8701, hashtext($1) & 63)

-- name: exclude_triggers
-- Waits until no transaction that decides by triggers is in progress (they share this lock: `share`), and keeps
-- new ones out until the commit.
select pg_advisory_xact_lock(8702, 0)

-- name: now
-- The database's time, read after the locks are held.
select tidegate.now()

-- name: moment
-- The database's time and the version of the registry of triggers, read after the locks are held.
select tidegate.now(), (select version from tidegate.registry_version)
