-- kind: contract
-- needs: +4
-- Code from before this release may rely on the column.
alter table tidegate.workflow_events drop column next_tier;
