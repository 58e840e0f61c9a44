"""Near misses: what almost took an event. `triggers` and `waits` compare (pure), `look_up` reads what they compare."""
