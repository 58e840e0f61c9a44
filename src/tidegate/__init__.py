"""Tidegate: a durable event gate and scheduler. Nothing accepted is lost, launched twice, or waiting without a reason.

The public names. Each is loaded on first use, so that importing this package is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidegate.app import Tidegate
    from tidegate.client import AsyncClient, Client
    from tidegate.errors import (
        BacklogFull,
        ChildFailed,
        Conflict,
        Forbidden,
        InvalidInput,
        NonRetryable,
        NotFound,
        Overloaded,
        RequestRefused,
        RetryAfter,
        RunFailed,
        StepFailed,
        TidegateError,
        TooManyRequests,
        Unauthorized,
        Unavailable,
    )
    from tidegate.flow.code.context import Context
    from tidegate.flow.code.sync_context import SyncContext
    from tidegate.model.budget import Budget
    from tidegate.model.retry import Retry
    from tidegate.model.source import Breaker
    from tidegate.model.wait import On
    from tidegate.model.window import Batch

__version__ = "0.2.0"

_HOMES = {
    "AsyncClient": "client",
    "BacklogFull": "errors",
    "Batch": "model.window",
    "Breaker": "model.source",
    "Budget": "model.budget",
    "ChildFailed": "errors",
    "Client": "client",
    "Conflict": "errors",
    "Context": "flow.code.context",
    "Tidegate": "app",
    "TidegateError": "errors",
    "Forbidden": "errors",
    "InvalidInput": "errors",
    "NonRetryable": "errors",
    "NotFound": "errors",
    "On": "model.wait",
    "Overloaded": "errors",
    "RequestRefused": "errors",
    "Retry": "model.retry",
    "RetryAfter": "errors",
    "RunFailed": "errors",
    "StepFailed": "errors",
    "SyncContext": "flow.code.sync_context",
    "TooManyRequests": "errors",
    "Unauthorized": "errors",
    "Unavailable": "errors",
}

__all__ = [
    "AsyncClient",
    "BacklogFull",
    "Batch",
    "Breaker",
    "Budget",
    "ChildFailed",
    "Client",
    "Conflict",
    "Context",
    "Forbidden",
    "InvalidInput",
    "NonRetryable",
    "NotFound",
    "On",
    "Overloaded",
    "RequestRefused",
    "Retry",
    "RetryAfter",
    "RunFailed",
    "StepFailed",
    "SyncContext",
    "Tidegate",
    "TidegateError",
    "TooManyRequests",
    "Unauthorized",
    "Unavailable",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tidegate' has no attribute {name!r}")
    value = getattr(import_module(f"tidegate.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
