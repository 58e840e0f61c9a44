-- fragment: filters
-- Whether a run (r, with its workflow w) is asked for; null filters do not filter. $4 is a correlation id: of a run that is in the
-- correlation of its event alone it is the event's id ($10, if it may be one), and only the others are in the index.
($1::text is null or w.slug = $1)
   and ($2::text[] is null or r.status = any ($2))
   and ($3::uuid is null or r.id = any (array(select tidegate.runs_of(array[$3]))))
   and ($4::text is null or (r.correlation_id = $4 and r.id = any (array(
          select c.id from tidegate.workflow_runs c
           where c.correlation_id = $4 and c.correlation_id is distinct from c.event_id::text
          union all
          select tidegate.runs_of(array[$10::uuid])))))
   and ($5::timestamptz is null or r.created_at >= $5)
   and ($6::timestamptz is null or r.created_at < $6)
   and ($7::text is null or position(lower($7) in lower(coalesce(r.error, r.warning))) > 0)
   and ($8::text is null or r.parameters @> $8::text::jsonb)
   and ($9::text is null or (r.tags is not null and r.tags @> $9::text::jsonb))

-- name: list
-- A page of the runs that are asked for, newest first, before a given one.
select {{runs.run}}
 where {{filters}}
   and ($11::uuid is null or r.id < $11)
 order by r.id desc
 limit $12

-- name: ids
-- The ids of the runs that are asked for, oldest first, after a given one.
select r.id from tidegate.workflow_runs r join tidegate.workflow_definitions w on w.id = r.workflow_definition_id
 where {{filters}}
   and ($11::uuid is null or r.id > $11)
 order by r.id
 limit $12

-- name: count
-- How many runs are asked for after a given one, counted up to $12; and the time.
select count(*) as total, tidegate.now() as now
  from (select from tidegate.workflow_runs r join tidegate.workflow_definitions w on w.id = r.workflow_definition_id
         where {{filters}} and ($11::uuid is null or r.id > $11) limit $12) found
