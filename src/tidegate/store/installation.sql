-- name: identity
-- Tells this installation from any other, a copy of its database under another name included.
select md5(i.id::text || ':' || current_database()) from tidegate.installation i
