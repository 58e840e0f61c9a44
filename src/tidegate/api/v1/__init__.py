"""`/v1`: publish events, and read events, workflows, triggers, schedules and runs. One module per resource."""

from tidegate.api.v1 import (
    approvals,
    events,
    publish,
    runs,
    schedules,
    starts,
    trigger_tests,
    triggers,
    webhooks,
    workflows,
)

ROUTES = (
    *publish.ROUTES,
    *events.ROUTES,
    *workflows.ROUTES,
    *triggers.ROUTES,
    *trigger_tests.ROUTES,
    *schedules.ROUTES,
    *starts.ROUTES,
    *runs.ROUTES,
    *webhooks.ROUTES,
    *approvals.ROUTES,
)
