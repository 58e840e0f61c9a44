-- name: insert
-- Keeps refused publish requests, and deletes what is beyond the newest $7: the table stays as small as that.
with kept as (
  insert into tidegate.publish_refusals (at, status, external_id, type, source, reason)
  select tidegate.now() - u.age_ms * interval '1 ms', u.status, u.external_id, u.type, u.source, u.reason
    from unnest($1::bigint[], $2::bigint[], $3::text[], $4::text[], $5::text[], $6::text[])
      as u (age_ms, status, external_id, type, source, reason)
  returning id
)
delete from tidegate.publish_refusals r where r.id <= (select max(id) from kept) - $7::bigint

-- name: find
-- The refused requests with a producer's id, oldest first.
select at, status, external_id, type, source, reason
  from (select * from tidegate.publish_refusals r where r.external_id = $1 order by r.id desc limit $2) newest
 order by newest.id
