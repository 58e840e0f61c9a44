"""Control: the operator's verbs, shared by API and CLI. Each is one transaction with its audit row; verbs about many
rows are one transaction per batch."""

from tidegate.flow.control.budgets import declare_budgets, delete_budget, pause_budget, put_budget, resume_budget
from tidegate.flow.control.dead_letters import (
    LetterReplayed,
    check_rate,
    preview_replay,
    replay_letter,
    replay_letters,
    stop_replays,
)
from tidegate.flow.control.events import MAX_REPLAYED, replay_event, replay_events, stop_event_replays
from tidegate.flow.control.retries import (
    MAX_PER_CALL,
    BulkDone,
    RetryOutcome,
    cancel_event,
    change_retries,
    change_retry,
    preview_retries,
)
from tidegate.flow.control.retry_verbs import DONE, RetryDone, RetryVerb
from tidegate.flow.control.run_bulk import RUN_VERBS, RunsChanged, RunVerb, change_runs, preview_runs
from tidegate.flow.control.runs import RunResumed, cancel_run, rerun_run, resume_run, retry_run
from tidegate.flow.control.schedules import backfill_schedule, pause_schedule, resume_schedule, run_schedule_now
from tidegate.flow.control.sources import pause, resume, seed_breakers, seed_limits, set_breaker, set_limit, set_weight
from tidegate.flow.control.tokens import NewToken, create_token, revoke_token
from tidegate.flow.control.triggers import (
    create_trigger,
    declare_trigger,
    delete_trigger,
    pause_trigger,
    resume_trigger,
    update_trigger,
)
from tidegate.flow.control.webhooks import (
    WebhookWritten,
    delete_webhook,
    retire_webhook_secret,
    rotate_webhook,
    set_webhook,
)
from tidegate.flow.control.workflows import (
    WorkflowChanged,
    create_workflow,
    delete_workflow,
    rotate_secret,
    shown_workflow,
    update_workflow,
)

__all__ = [
    "DONE",
    "MAX_PER_CALL",
    "MAX_REPLAYED",
    "RUN_VERBS",
    "BulkDone",
    "LetterReplayed",
    "NewToken",
    "RetryDone",
    "RetryOutcome",
    "RetryVerb",
    "RunResumed",
    "RunVerb",
    "RunsChanged",
    "WebhookWritten",
    "WorkflowChanged",
    "backfill_schedule",
    "cancel_event",
    "cancel_run",
    "change_retries",
    "change_retry",
    "change_runs",
    "check_rate",
    "create_token",
    "create_trigger",
    "create_workflow",
    "declare_budgets",
    "declare_trigger",
    "delete_budget",
    "delete_trigger",
    "delete_webhook",
    "delete_workflow",
    "pause",
    "pause_budget",
    "pause_schedule",
    "pause_trigger",
    "preview_replay",
    "preview_retries",
    "preview_runs",
    "put_budget",
    "replay_event",
    "replay_events",
    "replay_letter",
    "replay_letters",
    "rerun_run",
    "resume",
    "resume_budget",
    "resume_run",
    "resume_schedule",
    "resume_trigger",
    "retire_webhook_secret",
    "retry_run",
    "revoke_token",
    "rotate_secret",
    "rotate_webhook",
    "run_schedule_now",
    "seed_breakers",
    "seed_limits",
    "set_breaker",
    "set_limit",
    "set_webhook",
    "set_weight",
    "shown_workflow",
    "stop_event_replays",
    "stop_replays",
    "update_trigger",
    "update_workflow",
]
