"""Keep: background work that keeps the system moving and bounded: reconcile, schedule, replay, days, prune, secrets."""
