-- name: key_lines
-- The keys of a budget ($2: this one only) for which most wait, up to $3: how many deliveries and steps, how many of these are steps,
-- what they will spend, since when the first waits, slots in use, and how many runs wait for one to go on. Without those that are in no
-- line: it cannot be evaluated what they need.
select w.key, count(*) filter (where w.kind <> 'run') as waiting, count(*) filter (where w.kind = 'step') as waiting_steps,
       coalesce(sum(w.cost), 0)::bigint as cost, min(w.since) as oldest_at, min(w.next_attempt_at) as next_attempt_at,
       count(*) filter (where w.kind = 'run') as resuming,
       (select count(*) from tidegate.budget_holders h
          join tidegate.workflow_runs r on r.id = h.run_id and {{budgets.counts}}
         where h.budget = $1 and h.key = w.key) as in_use
  from (select d.budget_key as key, d.budget_cost as cost, d.created_at as since, d.next_attempt_at, 'delivery' as kind
          from tidegate.workflow_trigger_deliveries d
         where d.retry_state = 'scheduled' and d.reason = 'budget' and d.budget = $1
           and d.budget_key = coalesce($2::text, d.budget_key)
        union all
        select p.key, p.cost, p.created_at, p.next_attempt_at, 'step' from tidegate.budget_steps p
         where p.granted_at is null and p.budget = $1 and p.key = coalesce($2::text, p.key)
        union all
        select q.key, null, q.since, r.next_attempt_at, 'run'
          from tidegate.slot_waits q join tidegate.workflow_runs r on {{slot_lines.is_waiting}}
         where q.budget = $1 and q.key = coalesce($2::text, q.key)) w
 group by 1 order by count(*) desc, 1 limit $3

-- name: places
-- Where deliveries and steps ($1) stand in the line of the budget that holds them: how many are before them (up to 10,000 of each), and
-- what those will spend.
with waiting as materialized (
  select d.id, d.next_attempt_at, d.budget, d.budget_key, d.budget_cost, d.ingress_sequence as place, false as is_step
    from tidegate.workflow_trigger_deliveries d
   where d.id = any ($1::uuid[]) and d.retry_state = 'scheduled' and d.reason = 'budget'
  union all
  select p.step_id, p.next_attempt_at, p.budget, p.key, p.cost, p.place, true
    from tidegate.budget_steps p where p.step_id = any ($1::uuid[]) and p.granted_at is null
)
select d.id, d.next_attempt_at, d.budget_key, d.budget_cost, {{budgets.spec}}, b.paused_at, b.paused_until, b.pause_reason, b.paused_by,
       s.ring, s.ring_at, s.ring_width_us, s.spent_at, s.drain_at, s.closed_until, s.closed_reason, s.probe_run_id, s.probe_until,
       s.reserved_for, s.reserved_cost, s.reserved_until, a.ahead, a.ahead_cost, tidegate.now() as now,
       (select count(*) from tidegate.budget_holders h
          join tidegate.workflow_runs r on r.id = h.run_id and {{budgets.counts}}
         where h.budget = d.budget and h.key = d.budget_key) as in_use
  from waiting d
  join tidegate.budgets b on b.name = d.budget
  left join tidegate.budget_keys s on s.budget = d.budget and s.key = d.budget_key,
       lateral (select count(*) as ahead, coalesce(sum(e.cost), 0)::bigint as ahead_cost
                  from ((select o.budget_cost as cost from tidegate.workflow_trigger_deliveries o
                          where o.retry_state = 'scheduled' and o.reason = 'budget' and o.budget = d.budget
                            and o.budget_key = d.budget_key and o.ingress_sequence < d.place + d.is_step::int limit 10000)
                        union all
                        (select o.cost from tidegate.budget_steps o
                          where o.granted_at is null and o.budget = d.budget and o.key = d.budget_key
                            and (o.place, o.step_id) < (d.place, case when d.is_step then d.id else '00000000-0000-0000-0000-000000000000'::uuid end)
                          limit 10000)) e) a

-- name: holders
-- The runs that hold a key of a budget (null: any), themselves or by a step, the oldest first, up to $3, and how many slots they hold.
select h.key, h.step, r.next_attempt_at, {{circumstances.holder}}
  from tidegate.budget_holders h
  join tidegate.workflow_runs r on r.id = h.run_id and {{budgets.counts}}
  join tidegate.workflow_definitions w on w.id = r.workflow_definition_id
 where h.budget = $1 and ($2::text is null or h.key = $2)
 order by r.created_at, r.id, h.step limit $3
