"""Look: what operators read: explain one event, health of the cluster, doctor, readiness. Nothing here decides."""
