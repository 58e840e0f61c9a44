"""Control: the operator's verbs, shared by API and CLI. Each is one transaction with its audit row."""

from headgate.flow.control.deliveries import cancel_delivery, force_delivery
from headgate.flow.control.events import cancel_event, force_event
from headgate.flow.control.runs import cancel_run
from headgate.flow.control.sources import pause, resume, seed_limits, set_limit
from headgate.flow.control.triggers import (
    create_trigger,
    declare_trigger,
    delete_trigger,
    pause_trigger,
    resume_trigger,
    update_trigger,
)

__all__ = [
    "cancel_delivery",
    "cancel_event",
    "cancel_run",
    "create_trigger",
    "declare_trigger",
    "delete_trigger",
    "force_delivery",
    "force_event",
    "pause",
    "pause_trigger",
    "resume",
    "resume_trigger",
    "seed_limits",
    "set_limit",
    "update_trigger",
]
