-- name: arrival
-- The number of the last event that was stored: who comes now is after all that have come.
select last_value from tidegate.ingress_sequence

-- name: of_steps
-- Steps that wait for a budget, or whose turn has come, with their runs' events.
select p.step_id, p.run_id, p.name, p.budget, p.key, p.cost, p.place, p.moves, p.asked, p.granted_at is not null as is_granted, p.created_at,
       (select r.event_id from tidegate.workflow_runs r where r.id = p.run_id and r.status in ('pending', 'running')) as event_id,
       exists (select from tidegate.workflow_runs r where r.id = p.run_id and r.status in ('pending', 'running')) as is_unfinished
  from tidegate.budget_steps p where p.step_id = any ($1::uuid[])

-- name: own_slots
-- Those of the runs ($1) that hold slots of the budgets ($2) themselves, by their workflows' `budgets`, or have given them back and take
-- them again when they resume.
select h.run_id, h.budget from tidegate.budget_holders h
 where h.run_id = any ($1::uuid[]) and h.step_id = h.run_id and h.budget = any ($2::text[])
union
select r.id, b.name
  from tidegate.workflow_runs r join tidegate.workflow_event_triggers t on t.id = r.trigger_id, unnest(t.budgets) as b (name)
 where r.id = any ($1::uuid[]) and not {{slot_lines.needs_no_slot}} and b.name = any ($2::text[])

-- name: wait
-- Steps wait for a budget: their places in line, and their rows. The caller holds the budgets and the runs.
with input as materialized (
  select * from unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::text[], $6::bigint[], $7::bigint[], $8::bigint[],
                       $9::timestamptz[], $10::text[], $11::bigint[], $12::text[])
             as u (step_id, run_id, name, budget, key, cost, place, moves, at, asked, attempts, metadata)
), places as (
  insert into tidegate.budget_steps as p (step_id, run_id, name, budget, key, cost, place, moves, next_attempt_at, asked)
  select u.step_id, u.run_id, u.name, u.budget, u.key, u.cost, u.place, u.moves, u.at, u.asked::jsonb from input u
  on conflict (step_id) do update
     set budget = excluded.budget, key = excluded.key, cost = excluded.cost, place = excluded.place, moves = excluded.moves,
         next_attempt_at = excluded.next_attempt_at, asked = excluded.asked, granted_at = null
)
insert into tidegate.workflow_run_steps as s
  (id, workflow_run_id, name, status, retry_state, next_attempt_at, retry_attempts, retry_metadata, created_at, updated_at)
select u.step_id, u.run_id, u.name, 'pending', 'scheduled', u.at, u.attempts, u.metadata::jsonb, tidegate.now(), tidegate.now()
  from input u order by u.step_id
on conflict (id) do update
   set retry_state = 'scheduled', next_attempt_at = excluded.next_attempt_at, retry_metadata = excluded.retry_metadata,
       claim_generation = s.claim_generation + 1, updated_at = excluded.updated_at
 where s.status = 'pending'

-- name: move
-- Steps that are in line, or in none, wait there for another reason, or until another time, or elsewhere. The caller holds the budgets
-- and the runs.
with input as materialized (
  select * from unnest($1::uuid[], $2::text[], $3::text[], $4::bigint[], $5::bigint[], $6::timestamptz[], $7::text[])
             as u (step_id, budget, key, cost, moves, at, metadata)
), places as (
  update tidegate.budget_steps p
     set budget = u.budget, key = u.key, cost = u.cost, moves = u.moves, next_attempt_at = u.at
    from input u where p.step_id = u.step_id and p.granted_at is null
)
update tidegate.workflow_run_steps s
   set next_attempt_at = u.at, retry_metadata = u.metadata::jsonb, claim_generation = s.claim_generation + 1,
       updated_at = tidegate.now()
  from input u where s.id = u.step_id and s.id = any ($1::uuid[]) and s.id between $8 and $9 and s.retry_state = 'scheduled'

-- name: grant
-- The turn of steps has come: they leave the line, and what they wait for is over.
with places as (
  update tidegate.budget_steps p set granted_at = tidegate.now(), next_attempt_at = tidegate.now()
   where p.step_id = any ($1::uuid[]) and p.granted_at is null
)
update tidegate.workflow_run_steps s
   set next_attempt_at = tidegate.now(), retry_metadata = s.retry_metadata || '{"granted": true}',
       claim_generation = s.claim_generation + 1, updated_at = tidegate.now()
 where s.id = any ($1::uuid[]) and s.id between $2 and $3 and s.retry_state = 'scheduled'

-- name: take
-- Steps that waited begin, by the claims of their runs ($2): what was granted is used up, and they hold their slots as long as that
-- claim. Returns the lines in which those stood whose turn had not come before.
with gone as (
  delete from tidegate.budget_steps p where p.step_id = any ($1::uuid[]) returning p.budget, p.key, p.granted_at
), shown as (
  update tidegate.workflow_run_steps s
     set retry_state = 'none', next_attempt_at = null, retry_metadata = '{}', claim_generation = s.claim_generation + 1,
         updated_at = tidegate.now()
   where s.id = any ($1::uuid[]) and s.id between $3 and $4 and s.retry_state = 'scheduled'
), held as (
  update tidegate.budget_holders h set claim_generation = u.claim_generation
    from unnest($1::uuid[], $2::bigint[]) as u (step_id, claim_generation) where h.step_id = u.step_id
)
select distinct budget, key from gone where granted_at is null and key is not null

-- name: to_release
-- The budgets of which steps ($1) hold slots, or of which their runs ($2) are tried first.
select h.step_id, h.budget from tidegate.budget_holders h where h.run_id = any ($2::uuid[]) and h.step_id = any ($1::uuid[])
union
select u.step_id, s.budget
  from unnest($1::uuid[], $2::uuid[]) as u (step_id, run_id) join tidegate.budget_keys s on s.probe_run_id = u.run_id

-- name: leave
-- Steps that wait no longer for a budget; the lines in which they stood.
with gone as (delete from tidegate.budget_steps where step_id = any ($1::uuid[]) returning budget, key, granted_at)
select distinct budget, key from gone where granted_at is null and key is not null

-- name: of_runs
-- The budgets for which steps of the runs wait, or of which their turn has come.
select distinct b.name
  from (select p.budget, p.asked from tidegate.budget_steps p where p.run_id = any ($1::uuid[])) p,
       lateral (select p.budget as name union select jsonb_array_elements_text(p.asked -> 'budgets')) b

-- name: lines_of_runs
-- The lines in which steps of the runs stand.
select distinct p.budget, p.key from tidegate.budget_steps p
 where p.run_id = any ($1::uuid[]) and p.granted_at is null and p.key is not null

-- name: due
-- Up to $1 steps that are due to be decided, the first due first.
select p.step_id, p.budget, p.key from tidegate.budget_steps p
 where p.granted_at is null and p.next_attempt_at <= tidegate.now() order by p.next_attempt_at limit $1

-- name: next_due
-- Seconds until the next step is due to be decided, or null.
select extract(epoch from min(p.next_attempt_at) - tidegate.now())::float8 from tidegate.budget_steps p where p.granted_at is null

-- name: show
-- The rows of steps have the time of their places in line.
update tidegate.workflow_run_steps s set next_attempt_at = p.next_attempt_at, updated_at = tidegate.now()
  from tidegate.budget_steps p
 where p.step_id = s.id and s.id = any ($1::uuid[]) and s.id between $2 and $3 and s.retry_state = 'scheduled'

-- name: decide_again
-- Makes every step that waits for a budget due now; with $2 only those that are in no line of it.
update tidegate.budget_steps p set next_attempt_at = tidegate.now()
 where p.granted_at is null and p.budget = $1 and p.next_attempt_at > tidegate.now() and (not $2::boolean or p.key is null)

-- name: ended
-- Up to $1 places of steps whose runs have ended, and their budgets.
select p.step_id, p.budget from tidegate.budget_steps p
 where not exists (select from tidegate.workflow_runs r where r.id = p.run_id and r.status in ('pending', 'running'))
 limit $1
