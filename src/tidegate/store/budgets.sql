-- fragment: spec
-- The fields of a budget that a user sets.
b.name, b.rate_limit as "limit", b.interval_ms, b.concurrency, b.key, b.cost

-- fragment: line
-- The deliveries that wait for a key of a budget.
d.retry_state = 'scheduled' and d.reason = 'budget' and d.budget = u.budget and d.budget_key = u.key

-- fragment: step_line
-- The steps that wait for a key of a budget.
p.granted_at is null and p.budget = u.budget and p.key = u.key

-- fragment: counts
-- A slot of an unfinished run is in use; that of a step, by the claim by which it is called, if it is called yet.
r.status in ('pending', 'running') and (h.claim_generation is null or h.claim_generation = r.claim_generation)

-- name: list_specs
-- Every budget, as triggers are compiled with it.
select {{spec}} from tidegate.budgets b order by b.name

-- name: lock
-- Budgets, locked in the order of their names until the commit: their keys, holders and lines change under this lock alone.
select {{spec}}, b.paused_at, b.paused_until, b.pause_reason, b.paused_by
  from tidegate.budgets b where b.name = any ($1::text[]) order by b.name for update of b

-- name: keys
-- For each budget and key: what was spent, how many slots are in use, the first delivery or step in line, not counting $3, and since
-- when runs that resume wait for a slot. A statement of its own, after the locks: the one that waited for them still sees the tables as
-- they were before it waited.
select u.budget, u.key, s.ring, s.ring_at, s.ring_width_us, s.spent_at, s.drain_at, s.reserved_for, s.reserved_cost,
       s.reserved_until, s.closed_until, s.closed_reason, s.probe_run_id, s.probe_until,
       case when b.concurrency is null then 0 else
         (select count(*) from tidegate.budget_holders h
            join tidegate.workflow_runs r on r.id = h.run_id and {{counts}}
           where h.budget = u.budget and h.key = u.key) end as in_use,
       least((select d.ingress_sequence from tidegate.workflow_trigger_deliveries d
               where {{line}} and d.id <> all ($3::uuid[]) order by d.ingress_sequence limit 1),
             (select p.place from tidegate.budget_steps p
               where {{step_line}} and p.step_id <> all ($3::uuid[]) order by p.place limit 1)) as first_waiting,
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
-- The runs have ended, or their steps that spend of the budgets $2: keys for which one of them was tried first are open again. Returns
-- the budgets and keys.
update tidegate.budget_keys
   set closed_until = null, closed_reason = null, probe_run_id = null, probe_until = null, updated_at = tidegate.now()
 where probe_run_id = any ($1::uuid[]) and ($2::text[] is null or budget = any ($2))
returning budget, key

-- name: open
-- Opens every key of a budget that was closed.
update tidegate.budget_keys
   set closed_until = null, closed_reason = null, probe_run_id = null, probe_until = null, updated_at = tidegate.now()
 where budget = $1 and closed_until is not null

-- name: hold
-- Notes the runs and steps that hold a slot of a budget's key, in the transaction that creates them, or lets them begin.
insert into tidegate.budget_holders (run_id, budget, key, step_id, step, claim_generation)
select * from unnest($1::uuid[], $2::text[], $3::text[], $4::uuid[], $5::text[], $6::bigint[])
on conflict (run_id, budget, step_id) do update set key = excluded.key, claim_generation = excluded.claim_generation

-- name: release
-- Gives back the slots of runs that have ended; the budgets and keys. With $2 only their own, not those of their steps.
with gone as (delete from tidegate.budget_holders
               where run_id = any ($1::uuid[]) and (not $2::boolean or step_id = run_id) returning budget, key)
select distinct budget, key from gone

-- name: release_steps
-- Gives back the slots of steps ($2) of runs ($1) that have ended; the budgets and keys.
with gone as (delete from tidegate.budget_holders
               where run_id = any ($1::uuid[]) and step_id = any ($2::uuid[]) returning budget, key)
select distinct budget, key from gone

-- name: heads
-- The first $3 in line of each budget and key, deliveries and steps (which have a run), in the order of arrival; not locked.
select w.id, w.trigger_id, w.source, u.budget, u.key, w.cost, w.created_at, w.place, w.run_id
  from unnest($1::text[], $2::text[]) as u (budget, key),
       lateral (select x.*
                  from ((select d.id, d.trigger_id, d.source, d.budget_cost as cost, d.created_at, d.ingress_sequence as place,
                                null::uuid as run_id
                           from tidegate.workflow_trigger_deliveries d
                          where {{line}} order by d.ingress_sequence limit $3)
                        union all
                        (select p.step_id, null, null, p.cost, p.created_at, p.place, p.run_id
                           from tidegate.budget_steps p where {{step_line}} order by p.place, p.step_id limit $3)) x
                 order by x.place, x.run_id nulls first, x.id limit $3) w
 order by w.place, w.run_id nulls first, w.id

-- name: nudge
-- The first in line of each budget and key is due no later than the time at which it may find room; so are the runs that wait longest
-- for its slots, as many as are free. Returns how many deliveries and runs changed, and which steps. The caller holds the budgets' locks.
with first as materialized (
  select u.at, w.id, w.is_step
    from unnest($1::text[], $2::text[], $3::timestamptz[]) as u (budget, key, at),
         lateral (select x.id, x.is_step
                    from ((select d.id, d.ingress_sequence as place, false as is_step
                             from tidegate.workflow_trigger_deliveries d where {{line}} order by d.ingress_sequence limit 1)
                          union all
                          (select p.step_id, p.place, true
                             from tidegate.budget_steps p where {{step_line}} order by p.place, p.step_id limit 1)) x
                   order by x.place, x.is_step limit 1) w
), moved as (
  update tidegate.workflow_trigger_deliveries d
     set next_attempt_at = f.at, throttled_until = f.at, claim_generation = d.claim_generation + 1,
         updated_at = tidegate.now()
    from first f
   where not f.is_step and d.id = f.id and d.retry_state = 'scheduled' and d.next_attempt_at > f.at
  returning d.id
), steps as (
  update tidegate.budget_steps p set next_attempt_at = f.at
    from first f where f.is_step and p.step_id = f.id and p.granted_at is null and p.next_attempt_at > f.at
  returning p.step_id
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
select (select count(*) from moved) as deliveries, (select count(*) from called) as runs, array(select step_id from steps) as steps

-- name: lines_of
-- The keys of a budget for which deliveries, steps, or runs that resume wait.
with recursive waiting (key) as (
  (select d.budget_key from tidegate.workflow_trigger_deliveries d
    where d.retry_state = 'scheduled' and d.reason = 'budget' and d.budget = $1 order by d.budget_key limit 1)
  union all
  select (select d.budget_key from tidegate.workflow_trigger_deliveries d
           where d.retry_state = 'scheduled' and d.reason = 'budget' and d.budget = $1 and d.budget_key > w.key
           order by d.budget_key limit 1)
    from waiting w where w.key is not null
), of_steps (key) as (
  (select p.key from tidegate.budget_steps p where p.granted_at is null and p.budget = $1 order by p.key limit 1)
  union all
  select (select p.key from tidegate.budget_steps p where p.granted_at is null and p.budget = $1 and p.key > w.key order by p.key limit 1)
    from of_steps w where w.key is not null
)
select key from waiting where key is not null
union
select key from of_steps where key is not null
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
       b.created_at, b.updated_at, w.waiting, w.waiting_steps, w.unread, w.oldest_at, w.next_attempt_at,
       (select count(*) from tidegate.budget_holders h
          join tidegate.workflow_runs r on r.id = h.run_id and {{counts}}
         where h.budget = b.name) as in_use,
       (select count(*) from tidegate.slot_waits q join tidegate.workflow_runs r on {{slot_lines.is_waiting}}
         where q.budget = b.name) as resuming,
       (select count(*) from tidegate.budget_keys s where s.budget = b.name) as keys,
       array(select o.slug || '/' || t.name from tidegate.workflow_event_triggers t
               join tidegate.workflow_definitions o on o.id = t.workflow_definition_id
              where t.deleted_at is null and b.name = any (t.budgets) order by 1) as used_by

-- fragment: waiting
-- What waits for a budget; `unread`: in no line, since it cannot be evaluated, and not about to be decided again.
lateral (select d.waiting + p.waiting as waiting, p.waiting as waiting_steps, d.unread + p.unread as unread,
                least(d.oldest_at, p.oldest_at) as oldest_at, least(d.next_attempt_at, p.next_attempt_at) as next_attempt_at
           from (select count(*) as waiting,
                        count(*) filter (where d.budget_key is null and d.next_attempt_at > tidegate.now()) as unread,
                        min(d.created_at) as oldest_at, min(d.next_attempt_at) as next_attempt_at
                   from tidegate.workflow_trigger_deliveries d
                  where d.retry_state = 'scheduled' and d.reason = 'budget' and d.budget = b.name) d,
                (select count(*) as waiting, count(*) filter (where p.key is null and p.next_attempt_at > tidegate.now()) as unread,
                        min(p.created_at) as oldest_at, min(p.next_attempt_at) as next_attempt_at
                   from tidegate.budget_steps p where p.granted_at is null and p.budget = b.name) p) w

-- name: get
-- One budget.
select {{record}} from tidegate.budgets b, {{waiting}} where b.name = $1

-- name: list_page
-- A page of budgets, by name.
select {{record}} from tidegate.budgets b, {{waiting}} where $1::text is null or b.name > $1 order by b.name limit $2

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
           and not exists (select from tidegate.budget_steps p
                            where p.granted_at is null and p.budget = s.budget and p.key = s.key)
         order by s.updated_at limit $2) old
 where s.budget = old.budget and s.key = old.key

-- name: ended_holders
-- Up to $1 notes about steps whose worker has died or lost its claim, and about runs that have ended or are gone: whoever ends a run
-- removes its notes; these are left when rows were changed by hand (`tidegate doctor` reports them).
select h.run_id, h.budget, h.step_id from tidegate.budget_holders h
 where not exists (select from tidegate.workflow_runs r where r.id = h.run_id and {{counts}})
 limit $1

-- name: sweep
-- Removes those of the notes ($1, $2, $3) that still do not count. The caller holds the budgets' locks.
delete from tidegate.budget_holders h
 using unnest($1::uuid[], $2::text[], $3::uuid[]) as old (run_id, budget, step_id)
 where h.run_id = old.run_id and h.budget = old.budget and h.step_id = old.step_id
   and not exists (select from tidegate.workflow_runs r where r.id = h.run_id and {{counts}})
returning h.budget, h.key
