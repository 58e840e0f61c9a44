-- name: closed_keys
-- The keys of budgets ($1) that are closed or half open, of each budget up to $2, those that are closed longest first, and how many they
-- are. A key is half open until the run that is tried first has ended, or was waited for.
select n.budget, n.key, n.state, n.until, n.reason, n.run_id, n.total
  from (select s.budget, s.key, s.closed_reason as reason, s.probe_run_id as run_id, count(*) over of_budget as total,
               case when s.probe_run_id is null and s.closed_until > tidegate.now() then 'closed' else 'half_open' end as state,
               case when s.probe_run_id is not null then s.probe_until else s.closed_until end as until,
               row_number() over (of_budget order by s.closed_until desc, s.key) as number
          from tidegate.budget_keys s
         where s.budget = any ($1::text[]) and s.closed_until is not null
           and (s.probe_until is null or s.probe_until > tidegate.now())
        window of_budget as (partition by s.budget)) n
 where n.number <= $2
 order by n.budget, n.number

-- name: closed_long
-- Budgets with keys that are closed until after $1: the one that is closed longest, and how many they are; up to $2 budgets.
select distinct on (s.budget) s.budget as name, s.key, s.closed_until as until, s.closed_reason as reason,
       count(*) over (partition by s.budget) as total
  from tidegate.budget_keys s
 where s.closed_until > $1 and s.probe_run_id is null
 order by s.budget, s.closed_until desc limit $2

-- name: troubled
-- Budgets that are paused, for which a delivery or step has waited since $1 or longer, or for which one waits that cannot be evaluated; with how
-- many wait, and since when.
select b.name, b.paused_at, b.paused_until, b.pause_reason, b.paused_by, w.waiting, w.waiting_steps, w.unread, w.oldest_at
  from tidegate.budgets b, {{budgets.waiting}}
 where (b.paused_at is not null and (b.paused_until is null or b.paused_until > tidegate.now())) or w.oldest_at <= $1 or w.unread > 0
 order by b.name limit $2
