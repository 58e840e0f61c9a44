"""`/admin`: requests of operators. One module per resource."""

from tidegate.api.admin import (
    approvals,
    audit,
    budgets,
    dead_letters,
    decisions,
    event_replays,
    retries,
    retry_verbs,
    schedules,
    sources,
    tokens,
    triggers,
    webhooks,
    workers,
)

ROUTES = (
    *sources.ROUTES,
    *triggers.ROUTES,
    *budgets.ROUTES,
    *schedules.ROUTES,
    *retries.ROUTES,
    *retry_verbs.ROUTES,
    *decisions.ROUTES,
    *event_replays.ROUTES,
    *dead_letters.ROUTES,
    *webhooks.ROUTES,
    *tokens.ROUTES,
    *audit.ROUTES,
    *workers.ROUTES,
    *approvals.ROUTES,
)
