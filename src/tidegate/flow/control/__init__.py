"""Control: the operator's verbs, shared by API and CLI. Each is one transaction with its audit row; verbs about many
rows are one transaction per batch."""

from tidegate.flow.control.dead_letters import (
    LetterReplayed,
    preview_replay,
    replay_letter,
    replay_letters,
    stop_replays,
)
from tidegate.flow.control.retries import (
    MAX_PER_CALL,
    BulkDone,
    RetryOutcome,
    change_retries,
    change_retry,
    preview_retries,
)
from tidegate.flow.control.retry_verbs import DONE, RetryDone, RetryVerb
from tidegate.flow.control.runs import cancel_run
from tidegate.flow.control.sources import pause, resume, seed_breakers, seed_limits, set_breaker, set_limit
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
    "BulkDone",
    "LetterReplayed",
    "NewToken",
    "RetryDone",
    "RetryOutcome",
    "RetryVerb",
    "WebhookWritten",
    "WorkflowChanged",
    "cancel_run",
    "change_retries",
    "change_retry",
    "create_token",
    "create_trigger",
    "create_workflow",
    "declare_trigger",
    "delete_trigger",
    "delete_webhook",
    "delete_workflow",
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
