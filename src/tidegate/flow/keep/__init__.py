"""Keep: what keeps the system moving and bounded: reconcile, schedule, replay, prune, rotation of stored secrets."""
