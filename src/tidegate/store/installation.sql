-- name: identity
-- The id that tells this installation from any other, including a copy of its database under another name.
select md5(i.id::text || ':' || current_database()) from tidegate.installation i
