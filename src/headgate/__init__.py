"""Headgate: a durable event gate and scheduler. Nothing accepted is lost, launched twice, or waiting without a reason.

The public names; each is loaded when first used, so that importing this package is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headgate.app import Headgate
    from headgate.client import AsyncClient, Client
    from headgate.errors import (
        Conflict,
        HeadgateError,
        InvalidInput,
        NonRetryable,
        NotFound,
        Overloaded,
        RequestRefused,
        RetryAfter,
        StepFailed,
        Unavailable,
    )
    from headgate.flow.workflow import Context, SyncContext
    from headgate.model.retry import Retry
    from headgate.model.source import Breaker

__version__ = "0.1.0"

_HOMES = {
    "AsyncClient": "client",
    "Breaker": "model.source",
    "Client": "client",
    "Conflict": "errors",
    "Context": "flow.workflow",
    "Headgate": "app",
    "HeadgateError": "errors",
    "InvalidInput": "errors",
    "NonRetryable": "errors",
    "NotFound": "errors",
    "Overloaded": "errors",
    "RequestRefused": "errors",
    "Retry": "model.retry",
    "RetryAfter": "errors",
    "StepFailed": "errors",
    "SyncContext": "flow.workflow",
    "Unavailable": "errors",
}

__all__ = [
    "AsyncClient",
    "Breaker",
    "Client",
    "Conflict",
    "Context",
    "Headgate",
    "HeadgateError",
    "InvalidInput",
    "NonRetryable",
    "NotFound",
    "Overloaded",
    "RequestRefused",
    "Retry",
    "RetryAfter",
    "StepFailed",
    "SyncContext",
    "Unavailable",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'headgate' has no attribute {name!r}")
    value = getattr(import_module(f"headgate.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
