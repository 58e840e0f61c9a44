-- fragment: spec
-- The fields of a budget that a user sets.
b.name, b.rate_limit as "limit", b.interval_ms, b.concurrency, b.key, b.cost

-- fragment: line
-- The deliveries that wait for a key of a budget.
d.retry_state = 'scheduled' and d.reason = 'budget' and d.budget = u.budget and d.budget_key = u.key

-- name: list_specs
-- Every budget, as triggers are compiled with it.
select {{spec}} from tidegate.budgets b order by b.name

-- name: lock
-- Budgets, locked in the order of their names until the commit: their keys, holders and lines change under this lock alone.
select {{spec}}, b.paused_at, b.paused_until, b.pause_reason, b.paused_by
  from tidegate.budgets b where b.name = any ($1::text[]) order by b.name for update of b

-- name: keys
-- For each budget and key: what was spent, how many slots are in use, the first delivery in line, not counting $3, and since when runs
-- that resume wait for a slot. A statement of its own, after the locks: the one that waited for them still sees the tables as they were before it waited.
select u.budget, u.key, s.ring, s.ring_at, s.ring_width_us, s.spent_at, s.drain_at, s.reserved_for, s.reserved_cost,
       s.reserved_until, s.closed_until, s.closed_reason, s.probe_run_id, s.probe_until,
       case when b.concurrency is null then 0 else
         (select count(*) from tidegate.budget_holders h
            join tidegate.workflow_runs r on r.id = h.run_id and r.status in ('pending', 'running')
           where h.budget = u.budget and h.key = u.key) end as in_use,
       (select d.ingress_sequence from tidegate.workflow_trigger_deliveries d
         where {{line}} and d.id <> all ($3::uuid[]) order by d.ingress_sequence limit 1) as first_waiting,
       array(select q.since from tidegate.slot_waits q join tidegate.workflow_runs r on {{slot_lines.is_waiting}}
              where q.budget = u.budget and q.key = u.key and {{slot_lines.is_served}} order by q.since limit b.concurrency) as resuming
  from unnest($1::text[], $2::text[]) as u (budget, key)
  join tidegate.budgets b on b.name = u.budget
  left join tidegate.budget_keys s on s.budget = u.budget and s.key = u.key

-- name: save
-- Writes back what a transaction spent of keys of budgets it has locked.
insert into tidegate.budget_keys (budget, key, ring, ring_at, ring_width_us, spent_at, drain_at, reserved_for, reserved_cost,
                                  reserved_until, closed_until, closed_reason, probe_run_id, probe_until, updated_at)
select u.budget, u.key, u.ring::bigint[], u.ring_at, u.ring_width_us, u.spent_at, u.drain_at, u.reserved_for,
       u.reserved_cost, u.reserved_until, u.closed_until, u.closed_reason, u.probe_run_id, u.probe_until, tidegate.now()
  from unnest($1::text[], $2::text[], $3::text[], $4::bigint[], $5::bigint[], $6::timestamptz[], $7::timestamptz[],
              $8::uuid[], $9::bigint[], $10::timestamptz[], $11::timestamptz[], $12::text[], $13::uuid[],
              $14::timestamptz[])
    as u (budget, key, ring, ring_at, ring_width_us, spent_at, drain_at, reserved_for, reserved_cost, reserved_until,
          closed_until, closed_reason, probe_run_id, probe_until)
on conflict (budget, key) do update
   set ring = excluded.ring, ring_at = excluded.ring_at, ring_width_us = excluded.ring_width_us,
       spent_at = excluded.spent_at, drain_at = excluded.drain_at, reserved_for = excluded.reserved_for,
       reserved_cost = excluded.reserved_cost, reserved_until = excluded.reserved_until,
       closed_until = excluded.closed_until, closed_reason = excluded.closed_reason,
       probe_run_id = excluded.probe_run_id, probe_until = excluded.probe_until, updated_at = excluded.updated_at

-- name: close
-- Nothing of a key is spent for $3 ms. The caller holds the budget's lock.
insert into tidegate.budget_keys as s (budget, key, closed_until, closed_reason)
values ($1, $2, tidegate.now() + $3::bigint * interval '1 ms', $4)
on conflict (budget, key) do update
   set closed_until = greatest(s.closed_until, excluded.closed_until), closed_reason = excluded.closed_reason,
       probe_run_id = null, probe_until = null, updated_at = tidegate.now()

-- name: end_probes
-- The runs have ended: keys for which one of them was tried first are open again. Returns the budgets and keys.
update tidegate.budget_keys
   set closed_until = null, closed_reason = null, probe_run_id = null, probe_until = null, updated_at = tidegate.now()
 where probe_run_id = any ($1::uuid[])
returning budget, key

-- name: open
-- Opens every key of a budget that was closed.
update tidegate.budget_keys
   set closed_until = null, closed_reason = null, probe_run_id = null, probe_until = null, updated_at = tidegate.now()
 where budget = $1 and closed_until is not null

-- name: hold
-- Notes the runs that hold a slot of a budget's key, in the transaction that creates them.
insert into tidegate.budget_holders (run_id, budget, key)
select * from unnest($1::uuid[], $2::text[], $3::text[]) on conflict (run_id, budget) do update set key = excluded.key

-- name: release
-- Gives back the slots of runs that have ended; the budgets and keys.
with gone as (delete from tidegate.budget_holders where run_id = any ($1::uuid[]) returning budget, key)
select distinct budget, key from gone

-- name: heads
-- The first $3 deliveries in line of each budget and key, in the order of arrival; not locked.
select w.id, w.trigger_id, w.source, u.budget, u.key, w.budget_cost, w.created_at
  from unnest($1::text[], $2::text[]) as u (budget, key),
       lateral (select d.id, d.trigger_id, d.source, d.budget_cost, d.ingress_sequence, d.created_at
                  from tidegate.workflow_trigger_deliveries d
                 where {{line}} order by d.ingress_sequence limit $3) w
 order by w.ingress_sequence

-- name: nudge
-- The first delivery in line of each budget and key is due no later than the time at which it may find room; so are the runs that wait
-- longest for its slots, as many as are free. Returns how many deliveries changed, and how many runs. The caller holds the budgets' locks.
with moved as (
  update tidegate.workflow_trigger_deliveries d
     set next_attempt_at = f.at, throttled_until = f.at, claim_generation = d.claim_generation + 1,
         updated_at = tidegate.now()
    from (select u.at, w.id
            from unnest($1::text[], $2::text[], $3::timestamptz[]) as u (budget, key, at),
                 lateral (select d.id from tidegate.workflow_trigger_deliveries d
                           where {{line}} order by d.ingress_sequence limit 1) w) f
   where d.id = f.id and d.retry_state = 'scheduled' and d.next_attempt_at > f.at
  returning d.id
), next as materialized (
  select r.id
    from (select w.run_id
            from unnest($1::text[], $2::text[], $3::timestamptz[]) as u (budget, key, at)
            join tidegate.budgets b on b.name = u.budget,
                 lateral (select q.run_id from tidegate.slot_waits q join tidegate.workflow_runs r on {{slot_lines.is_waiting}}
                           where q.budget = u.budget and q.key = u.key order by q.since
                           limit greatest(0, b.concurrency - {{slot_lines.budget_in_use}})) w
           where u.at <= tidegate.now()) f
    join tidegate.workflow_runs r on r.id = f.run_id and {{slot_lines.is_asleep}}
   order by r.id for no key update of r
), called as (
  {{slot_lines.make_due}}
)
select (select count(*) from moved) as deliveries, (select count(*) from called) as runs

-- name: lines_of
-- The keys of a budget for which deliveries, or runs that resume, wait.
with recursive waiting (key) as (
  (select d.budget_key from tidegate.workflow_trigger_deliveries d
    where d.retry_state = 'scheduled' and d.reason = 'budget' and d.budget = $1 order by d.budget_key limit 1)
  union all
  select (select d.budget_key from tidegate.workflow_trigger_deliveries d
           where d.retry_state = 'scheduled' and d.reason = 'budget' and d.budget = $1 and d.budget_key > w.key
           order by d.budget_key limit 1)
    from waiting w where w.key is not null
)
select key from waiting where key is not null
union
select q.key from tidegate.slot_waits q where q.budget = $1

-- name: decide_again
-- Makes every delivery that waits for a budget due now: it is decided by the budget as it is now, in the order of arrival.
update tidegate.workflow_trigger_deliveries d
   set next_attempt_at = tidegate.now(), claim_generation = d.claim_generation + 1, updated_at = tidegate.now()
 where d.retry_state = 'scheduled' and d.reason = 'budget' and d.budget = $1 and d.next_attempt_at > tidegate.now()

-- name: decide_unread_again
-- Makes those due now that are in no line of a budget, because it could not be evaluated what they need of it.
update tidegate.workflow_trigger_deliveries d
   set next_attempt_at = tidegate.now(), claim_generation = d.claim_generation + 1, updated_at = tidegate.now()
 where d.retry_state = 'scheduled' and d.reason = 'budget' and d.budget = $1 and d.budget_key is null
   and d.next_attempt_at > tidegate.now()

-- name: decide_these_again
-- Makes deliveries that wait for a budget due now, in a new plan of their trigger.
update tidegate.workflow_trigger_deliveries d
   set next_attempt_at = least(d.next_attempt_at, tidegate.now()), plan_version = $2,
       claim_generation = d.claim_generation + 1, updated_at = tidegate.now()
 where d.id = any ($1::uuid[]) and d.retry_state = 'scheduled' and d.reason = 'budget'

-- name: upsert
-- What code says about a budget: creates it or makes it so. When the code has said the same before ($8), nothing changes: what an
-- operator has edited since then stays. Returns whether it wrote.
insert into tidegate.budgets as b (name, rate_limit, interval_ms, concurrency, key, cost, created_by, updated_by, declared)
values ($1, $2, $3, $4, $5, $6, $7, $7, $8::text::jsonb)
on conflict (name) do update
   set rate_limit = excluded.rate_limit, interval_ms = excluded.interval_ms, concurrency = excluded.concurrency,
       key = excluded.key, cost = excluded.cost, declared = excluded.declared, version = b.version + 1,
       updated_by = excluded.updated_by, updated_at = tidegate.now()
 where b.declared is distinct from excluded.declared
returning true

-- name: put
-- Creates a budget or makes it as given. What the code said last stays on record.
insert into tidegate.budgets as b (name, rate_limit, interval_ms, concurrency, key, cost, created_by, updated_by)
values ($1, $2, $3, $4, $5, $6, $7, $7)
on conflict (name) do update
   set rate_limit = excluded.rate_limit, interval_ms = excluded.interval_ms, concurrency = excluded.concurrency,
       key = excluded.key, cost = excluded.cost, version = b.version + 1, updated_by = excluded.updated_by,
       updated_at = tidegate.now()

-- name: delete
-- Deletes a budget with what was spent of it.
with keys as (delete from tidegate.budget_keys where budget = $1),
     holders as (delete from tidegate.budget_holders where budget = $1)
delete from tidegate.budgets where name = $1

-- name: pause
-- Pauses a budget until a time, for a duration from now, or until it is resumed (both null).
update tidegate.budgets b
   set paused_at = tidegate.now(), paused_until = coalesce($2, tidegate.now() + $3::bigint * interval '1 ms'),
       pause_reason = $4, paused_by = $5, version = b.version + 1, updated_by = $5, updated_at = tidegate.now()
 where b.name = $1

-- name: resume
-- Ends the pause of a budget.
update tidegate.budgets b
   set paused_at = null, paused_until = null, pause_reason = null, paused_by = null, version = b.version + 1,
       updated_by = $2, updated_at = tidegate.now()
 where b.name = $1

-- fragment: record
-- A budget as operators see it, with what waits for it, who holds it and who uses it.
{{spec}}, b.paused_at, b.paused_until, b.pause_reason, b.paused_by, b.version, b.created_by, b.updated_by,
       b.created_at, b.updated_at, w.waiting, w.unread, w.oldest_at, w.next_attempt_at,
       (select count(*) from tidegate.budget_holders h
          join tidegate.workflow_runs r on r.id = h.run_id and r.status in ('pending', 'running')
         where h.budget = b.name) as in_use,
       (select count(*) from tidegate.slot_waits q join tidegate.workflow_runs r on {{slot_lines.is_waiting}}
         where q.budget = b.name) as resuming,
       (select count(*) from tidegate.budget_keys s where s.budget = b.name) as keys,
       array(select o.slug || '/' || t.name from tidegate.workflow_event_triggers t
               join tidegate.workflow_definitions o on o.id = t.workflow_definition_id
              where t.deleted_at is null and b.name = any (t.budgets) order by 1) as used_by

-- fragment: waiting
-- What waits for a budget; `unread`: in no line, since it cannot be evaluated, and not about to be decided again.
lateral (select count(*) as waiting,
                count(*) filter (where d.budget_key is null and d.next_attempt_at > tidegate.now()) as unread,
                min(d.created_at) as oldest_at, min(d.next_attempt_at) as next_attempt_at
           from tidegate.workflow_trigger_deliveries d
          where d.retry_state = 'scheduled' and d.reason = 'budget' and d.budget = b.name) w

-- name: get
-- One budget.
select {{record}} from tidegate.budgets b, {{waiting}} where b.name = $1

-- name: list_page
-- A page of budgets, by name.
select {{record}} from tidegate.budgets b, {{waiting}} where $1::text is null or b.name > $1 order by b.name limit $2

-- name: key_lines
-- The keys of a budget ($2: this one only) for which most wait, up to $3: how many deliveries, what they will spend, since when the first
-- waits, slots in use, and how many runs wait for one to go on. Without those that are in no line: it cannot be evaluated what they need.
select d.key, count(*) filter (where not d.is_run) as waiting, coalesce(sum(d.cost), 0)::bigint as cost, min(d.since) as oldest_at,
       min(d.next_attempt_at) as next_attempt_at, count(*) filter (where d.is_run) as resuming,
       (select count(*) from tidegate.budget_holders h
          join tidegate.workflow_runs r on r.id = h.run_id and r.status in ('pending', 'running')
         where h.budget = $1 and h.key = d.key) as in_use
  from (select d.budget_key as key, d.budget_cost as cost, d.created_at as since, d.next_attempt_at, false as is_run
          from tidegate.workflow_trigger_deliveries d
         where d.retry_state = 'scheduled' and d.reason = 'budget' and d.budget = $1
           and d.budget_key = coalesce($2::text, d.budget_key)
        union all
        select q.key, null, q.since, r.next_attempt_at, true
          from tidegate.slot_waits q join tidegate.workflow_runs r on {{slot_lines.is_waiting}}
         where q.budget = $1 and q.key = coalesce($2::text, q.key)) d
 group by 1 order by count(*) desc, 1 limit $3

-- name: places
-- Where deliveries ($1) stand in the line of the budget that holds them: how many are before them (up to 10,000), and what those will
-- spend.
select d.id, d.next_attempt_at, d.budget_key, d.budget_cost, {{spec}}, b.paused_at, b.paused_until, b.pause_reason, b.paused_by,
       s.ring, s.ring_at, s.ring_width_us, s.spent_at, s.drain_at, s.closed_until, s.closed_reason, s.probe_run_id, s.probe_until,
       s.reserved_for, s.reserved_cost, s.reserved_until, a.ahead, a.ahead_cost, tidegate.now() as now,
       (select count(*) from tidegate.budget_holders h
          join tidegate.workflow_runs r on r.id = h.run_id and r.status in ('pending', 'running')
         where h.budget = d.budget and h.key = d.budget_key) as in_use
  from tidegate.workflow_trigger_deliveries d
  join tidegate.budgets b on b.name = d.budget
  left join tidegate.budget_keys s on s.budget = d.budget and s.key = d.budget_key,
       lateral (select count(*) as ahead, coalesce(sum(e.budget_cost), 0)::bigint as ahead_cost
                  from (select o.budget_cost from tidegate.workflow_trigger_deliveries o
                         where o.retry_state = 'scheduled' and o.reason = 'budget' and o.budget = d.budget
                           and o.budget_key = d.budget_key and o.ingress_sequence < d.ingress_sequence limit 10000) e) a
 where d.id = any ($1::uuid[]) and d.retry_state = 'scheduled' and d.reason = 'budget'

-- name: holders
-- The runs that hold a key of a budget (null: any), the oldest first, up to $3, and how many they are in all.
select h.key, r.next_attempt_at, {{circumstances.holder}}
  from tidegate.budget_holders h
  join tidegate.workflow_runs r on r.id = h.run_id and r.status in ('pending', 'running')
  join tidegate.workflow_definitions w on w.id = r.workflow_definition_id
 where h.budget = $1 and ($2::text is null or h.key = $2)
 order by r.created_at, r.id limit $3

-- name: unknown
-- Which of the names are no budgets.
select n from unnest($1::text[]) as n where not exists (select from tidegate.budgets b where b.name = n) order by 1

-- name: triggers_of
-- The triggers that use a budget.
select t.id from tidegate.workflow_event_triggers t where t.deleted_at is null and $1 = any (t.budgets) order by t.id

-- name: idle
-- Locks a budget that has keys which were not used for as long as its interval, if no other transaction holds it. Returns its name.
select b.name from tidegate.budgets b
 where exists (select from tidegate.budget_keys s
                where s.budget = b.name
                  and s.updated_at < tidegate.now() - interval '1 min' - coalesce(b.interval_ms, 0) * interval '1.1 ms')
   and b.name > $1
 order by b.name limit 1 for update of b skip locked

-- name: forget
-- Removes up to $2 keys of a budget of which nothing was spent within the interval and for which nothing waits: they are as new. The
-- caller holds the budget's lock.
delete from tidegate.budget_keys s
 using (select s.budget, s.key from tidegate.budget_keys s join tidegate.budgets b on b.name = s.budget
         where s.budget = $1
           and s.updated_at < tidegate.now() - interval '1 min' - coalesce(b.interval_ms, 0) * interval '1.1 ms'
           and (s.closed_until is null or s.closed_until < tidegate.now() - interval '1 h')
           and not exists (select from tidegate.workflow_trigger_deliveries d
                            where d.retry_state = 'scheduled' and d.reason = 'budget' and d.budget = s.budget
                              and d.budget_key = s.key)
         order by s.updated_at limit $2) old
 where s.budget = old.budget and s.key = old.key

-- name: ended_holders
-- Up to $1 notes about runs that have ended or are gone. Whoever ends a run removes its notes: these are left when rows were changed by
-- hand (`tidegate doctor` reports them).
select h.run_id, h.budget from tidegate.budget_holders h
 where not exists (select from tidegate.workflow_runs r where r.id = h.run_id and r.status in ('pending', 'running'))
 limit $1

-- name: sweep
-- Removes those of the notes ($1, $2) whose runs are not unfinished again by now. The caller holds the budgets' locks.
delete from tidegate.budget_holders h
 using unnest($1::uuid[], $2::text[]) as old (run_id, budget)
 where h.run_id = old.run_id and h.budget = old.budget
   and not exists (select from tidegate.workflow_runs r where r.id = h.run_id and r.status in ('pending', 'running'))
returning h.budget, h.key
