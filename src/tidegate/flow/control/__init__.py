"""Control: the operator's verbs, shared by API and CLI. Each is one transaction with its audit row; those about
many rows are several."""

from tidegate.flow.control.bulk_retries import MAX_PER_CALL, BulkDone, change_retries, preview_retries
from tidegate.flow.control.dead_letters import (
    LetterReplayed,
    preview_replay,
    replay_letter,
    replay_letters,
    stop_replays,
)
from tidegate.flow.control.deliveries import cancel_delivery, force_delivery
from tidegate.flow.control.events import cancel_event, force_event
from tidegate.flow.control.runs import cancel_run
from tidegate.flow.control.sources import pause, resume, seed_breakers, seed_limits, set_breaker, set_limit
from tidegate.flow.control.step_retries import cancel_step, force_step
from tidegate.flow.control.tokens import NewToken, create_token, revoke_token
from tidegate.flow.control.triggers import (
    create_trigger,
    declare_trigger,
    delete_trigger,
    pause_trigger,
    resume_trigger,
    update_trigger,
)
from tidegate.flow.control.verbs import DONE, RetryDone, RetryVerb
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
    "BulkDone",
    "LetterReplayed",
    "NewToken",
    "RetryDone",
    "RetryVerb",
    "WebhookWritten",
    "WorkflowChanged",
    "cancel_delivery",
    "cancel_event",
    "cancel_run",
    "cancel_step",
    "change_retries",
    "create_token",
    "create_trigger",
    "create_workflow",
    "declare_trigger",
    "delete_trigger",
    "delete_webhook",
    "delete_workflow",
    "force_delivery",
    "force_event",
    "force_step",
    "pause",
    "pause_trigger",
    "preview_replay",
    "preview_retries",
    "replay_letter",
    "replay_letters",
    "resume",
    "resume_trigger",
    "retire_webhook_secret",
    "revoke_token",
    "rotate_secret",
    "rotate_webhook",
    "seed_breakers",
    "seed_limits",
    "set_breaker",
    "set_limit",
    "set_webhook",
    "shown_workflow",
    "stop_replays",
    "update_trigger",
    "update_workflow",
]
