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
        Conflict,
        Forbidden,
        InvalidInput,
        NonRetryable,
        NotFound,
        Overloaded,
        RequestRefused,
        RetryAfter,
        StepFailed,
        TidegateError,
        TooManyRequests,
        Unauthorized,
        Unavailable,
    )
    from tidegate.flow.run.workflow import Context, SyncContext
    from tidegate.model.retry import Retry
    from tidegate.model.source import Breaker

__version__ = "0.1.0"

_HOMES = {
    "AsyncClient": "client",
    "Breaker": "model.source",
    "Client": "client",
    "Conflict": "errors",
    "Context": "flow.run.workflow",
    "Tidegate": "app",
    "TidegateError": "errors",
    "Forbidden": "errors",
    "InvalidInput": "errors",
    "NonRetryable": "errors",
    "NotFound": "errors",
    "Overloaded": "errors",
    "RequestRefused": "errors",
    "Retry": "model.retry",
    "RetryAfter": "errors",
    "StepFailed": "errors",
    "SyncContext": "flow.run.workflow",
    "TooManyRequests": "errors",
    "Unauthorized": "errors",
    "Unavailable": "errors",
}

__all__ = [
    "AsyncClient",
    "Breaker",
    "Client",
    "Conflict",
    "Context",
    "Forbidden",
    "InvalidInput",
    "NonRetryable",
    "NotFound",
    "Overloaded",
    "RequestRefused",
    "Retry",
    "RetryAfter",
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
