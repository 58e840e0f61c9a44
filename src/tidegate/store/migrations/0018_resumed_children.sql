-- kind: expand
-- The run that a child of a retried run had before, and that resumes instead of a new one.
alter table tidegate.run_children add column resumes uuid;
