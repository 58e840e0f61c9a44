"""Look: what an operator reads: explain one event, health of the whole, doctor, readiness."""
