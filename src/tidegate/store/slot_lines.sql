-- Runs that hold their slots while they execute (`slot_key` is not null). One that has been suspended holds none: its
-- `concurrency_key` is null. When it is due, it takes its slots again, all or none, or waits in the line of the first that it does not get
-- (`slot_waits`). Its row there counts while the run is unfinished and holds no slot.

-- fragment: needs_no_slot
-- The run holds its slots, or needs none.
(r.slot_key is null or r.concurrency_key is not null)

-- fragment: is_waiting
-- The run `r` of a row `q` of `slot_waits` still waits.
r.id = q.run_id and r.status in ('pending', 'running') and r.slot_key is not null and r.concurrency_key is null

-- fragment: is_served
-- A worker is there that has the code of the run: one of a workflow that nobody executes keeps no slot of a budget from the others.
exists (select from tidegate.workers o
         where o.seen_at > tidegate.now() - interval '1 min' and r.workflow_definition_id = any (o.definitions))

-- fragment: waiting_before
-- How many runs wait in the line of the trigger and key of `u` since the first delivery in that line came, or before; no further than
-- there are slots.
(select count(*)
   from (select from tidegate.slot_waits q join tidegate.workflow_runs r on {{is_waiting}}
          where q.trigger_id = u.trigger_id and q.key = u.concurrency_key
            and q.since <= (select d.created_at from tidegate.workflow_trigger_deliveries d
                            where d.trigger_id = u.trigger_id and d.concurrency_key = u.concurrency_key
                              and d.retry_state = 'scheduled' and d.reason = 'concurrency'
                            order by d.ingress_sequence limit 1)
          limit t.max_concurrency) before)

-- fragment: budget_in_use
-- How many slots of the key `u.key` of the budget `u.budget` are in use.
(select count(*) from tidegate.budget_holders h
   join tidegate.workflow_runs r on r.id = h.run_id and {{budgets.counts}}
  where h.budget = u.budget and h.key = u.key)

-- name: asking
-- Of claimed runs ($1): whether they need a slot, of which key, since when they are due, and when they time out. The caller holds the
-- triggers' locks, under which alone this changes.
select r.id, r.claim_generation, r.trigger_id, r.slot_key is not null and r.concurrency_key is null as needs_slot,
       coalesce(r.slot_key, '') as key, coalesce(q.since, r.next_attempt_at) as since, r.deadline_at
  from tidegate.workflow_runs r left join tidegate.slot_waits q on q.run_id = r.id
 where r.id = any ($1::uuid[]) and {{runs.is_held}}

-- name: trigger_lines
-- For each trigger and key: the slots and how many are in use, since when runs wait for one (not counting $3), when the deliveries
-- came that are due in this line, and until when the trigger or key is closed. As many of each as there are slots.
select u.trigger_id, u.key, t.max_concurrency as most,
       (select count(*) from tidegate.workflow_runs r
         where r.trigger_id = u.trigger_id and r.concurrency_key = u.key and r.status in ('pending', 'running')) as in_use,
       array(select q.since from tidegate.slot_waits q join tidegate.workflow_runs r on {{is_waiting}}
              where q.trigger_id = u.trigger_id and q.key = u.key and q.run_id <> all ($3::uuid[])
              order by q.since limit t.max_concurrency) as waiting,
       array(select d.created_at from tidegate.workflow_trigger_deliveries d
              where d.trigger_id = u.trigger_id and d.concurrency_key = u.key and d.retry_state = 'scheduled'
                and d.reason = 'concurrency' and d.next_attempt_at <= tidegate.now()
              order by d.ingress_sequence limit t.max_concurrency) as called,
       greatest(g.closed_until, h.until) as closed_until
  from unnest($1::uuid[], $2::text[]) as u (trigger_id, key)
  join tidegate.workflow_event_triggers t on t.id = u.trigger_id
  left join tidegate.event_scheduler_triggers g on g.trigger_id = u.trigger_id
  left join tidegate.trigger_key_holds h on h.trigger_id = u.trigger_id and h.concurrency_key = u.key

-- name: budget_lines
-- The same for each budget and key; steps that are due in its line count like deliveries.
select u.budget, u.key, b.concurrency as most, {{budget_in_use}} as in_use,
       array(select q.since from tidegate.slot_waits q join tidegate.workflow_runs r on {{is_waiting}}
              where q.budget = u.budget and q.key = u.key and q.run_id <> all ($3::uuid[]) and {{is_served}}
              order by q.since limit b.concurrency) as waiting,
       array(select x.created_at
               from ((select d.created_at, d.ingress_sequence as place, false as is_step
                        from tidegate.workflow_trigger_deliveries d
                       where {{budgets.line}} and d.next_attempt_at <= tidegate.now()
                       order by d.ingress_sequence limit b.concurrency)
                     union all
                     (select p.created_at, p.place, true from tidegate.budget_steps p
                       where {{budgets.step_line}} and p.next_attempt_at <= tidegate.now()
                       order by p.place, p.step_id limit b.concurrency)) x
              order by x.place, x.is_step limit b.concurrency) as called,
       null::timestamptz as closed_until
  from unnest($1::text[], $2::text[]) as u (budget, key)
  join tidegate.budgets b on b.name = u.budget

-- name: take
-- Runs that their worker still holds take their slots; they give them back when they are suspended, if $3 says so. Returns the ids.
with taken as (
  update tidegate.workflow_runs r
     set concurrency_key = r.slot_key, slot_key = case when u.gives_back then r.slot_key end, updated_at = tidegate.now()
    from unnest($1::uuid[], $2::bigint[], $3::boolean[]) as u (id, claim_generation, gives_back)
   where r.id = u.id and {{runs.is_held}} and r.claim_generation = u.claim_generation
     and r.slot_key is not null and r.concurrency_key is null
  returning r.id
), left_line as (
  delete from tidegate.slot_waits q using taken where q.run_id = taken.id
)
select id from taken

-- name: wait
-- Runs that their worker still holds and has not started are handed back, as before the claim: they wait in the line of a trigger or
-- of a budget ($8 says which), and are looked at again at a time ($7), or when a slot is free. Returns the ids.
with queued as (
  update tidegate.workflow_runs r
     set status = 'pending', attempts = r.attempts - 1, trials = null, next_attempt_at = case when r.cancel_requested_at is null then least(r.deadline_at, u.look_at) else tidegate.now() end,
         claim_generation = r.claim_generation + 1, claimed_by = null, claim_expires_at = null,
         started_at = case when r.attempts > 1 then r.started_at end, warning = u.warning, updated_at = tidegate.now()
    from unnest($1::uuid[], $2::bigint[], $7::timestamptz[], $8::text[]) as u (id, claim_generation, look_at, warning)
   where r.id = u.id and {{runs.is_held}} and r.claim_generation = u.claim_generation
  returning r.id
), in_line as (
  insert into tidegate.slot_waits as q (run_id, trigger_id, budget, key, since)
  select u.id, u.trigger_id, u.budget, u.key, u.since
    from unnest($1::uuid[], $3::uuid[], $4::text[], $5::text[], $6::timestamptz[])
           as u (id, trigger_id, budget, key, since)
    join queued on queued.id = u.id
  on conflict (run_id) do update set trigger_id = excluded.trigger_id, budget = excluded.budget, key = excluded.key
)
select id from queued

-- name: leave
-- Runs that have ended wait for no slot. Returns the lines that they leave.
delete from tidegate.slot_waits where run_id = any ($1::uuid[]) returning budget, key

-- fragment: is_asleep
-- The run is not about to be claimed.
r.status = 'pending' and r.next_attempt_at > tidegate.now()

-- fragment: make_due
-- The runs of `next`, which are locked in the order of their ids, are due now.
update tidegate.workflow_runs r
   set next_attempt_at = tidegate.now(), updated_at = tidegate.now()
  from next where r.id = next.id and {{is_asleep}}
  returning r.id

-- name: call
-- The runs that wait longest for a slot of each trigger and key are due now, as many as are free. Returns how
-- many. The caller holds the triggers' locks.
with next as materialized (
  select r.id
    from (select w.run_id
            from unnest($1::uuid[], $2::text[]) as u (trigger_id, key)
            join tidegate.workflow_event_triggers t on t.id = u.trigger_id,
                 lateral (select q.run_id from tidegate.slot_waits q join tidegate.workflow_runs r on {{is_waiting}}
                           where q.trigger_id = u.trigger_id and q.key = u.key order by q.since
                           limit greatest(0, t.max_concurrency - (
                             select count(*) from tidegate.workflow_runs s
                              where s.trigger_id = u.trigger_id and s.concurrency_key = u.key
                                and s.status in ('pending', 'running')))) w) f
    join tidegate.workflow_runs r on r.id = f.run_id and {{is_asleep}}
   order by r.id for no key update of r
), called as (
  {{make_due}}
)
select count(*) from called

-- fragment: due_again
-- The runs of `left_line` are due since they wait.
update tidegate.workflow_runs r
   set next_attempt_at = least(r.next_attempt_at, l.since), updated_at = tidegate.now()
  from left_line l where r.id = l.run_id and r.status = 'pending'

-- name: look_again
-- Runs of a trigger that wait for a slot are due now, and take it, or wait for it, by the rules as they are now; since when they wait is
-- kept.
with left_line as (
  delete from tidegate.slot_waits q using tidegate.workflow_runs r
   where r.id = q.run_id and r.trigger_id = $1 and r.status in ('pending', 'running')
  returning q.run_id, q.since
)
{{due_again}}

-- name: look_again_at
-- The same for the runs that wait for a slot of a budget.
with left_line as (
  delete from tidegate.slot_waits q where q.budget = $1 returning q.run_id, q.since
)
{{due_again}}

-- name: note_lent
-- Notes whether runs of a trigger give their slots back, or have.
update tidegate.event_scheduler_triggers g
   set lends_slots = exists (select from tidegate.workflow_runs r
                              where r.trigger_id = $1 and r.status in ('pending', 'running') and r.slot_key is not null)
 where g.trigger_id = $1

-- name: backlog
-- Workflows of which runs wait for a slot since $1 or longer: how many wait, since when, and the one that waits longest; up to $2.
select w.slug, count(*), min(q.since), (array_agg(q.run_id order by q.since))[1]
  from tidegate.slot_waits q
  join tidegate.workflow_runs r on {{is_waiting}}
  join tidegate.workflow_definitions w on w.id = r.workflow_definition_id
 group by w.slug having min(q.since) <= $1 order by 3 limit $2

-- name: count
-- How many runs wait for a slot of their trigger, and how many for one of a budget.
select count(*) filter (where q.budget is null) as concurrency, count(*) filter (where q.budget is not null) as budget
  from tidegate.slot_waits q join tidegate.workflow_runs r on {{is_waiting}}
