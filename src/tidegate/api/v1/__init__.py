"""`/v1`: publish events, and read events, workflows, triggers, schedules and runs. One module per resource."""

from tidegate.api.v1 import events, publish, runs, schedules, triggers, webhooks, workflows

ROUTES = (
    *publish.ROUTES,
    *events.ROUTES,
    *workflows.ROUTES,
    *triggers.ROUTES,
    *schedules.ROUTES,
    *runs.ROUTES,
    *webhooks.ROUTES,
)
