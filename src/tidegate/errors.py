"""Every exception of Tidegate.

TidegateError
├── SettingsError          a setting is missing or wrong; the message says what was expected and what was given
├── InvalidInput           what a caller sent breaks a rule; `errors` names each field
├── NotFound               no such thing
├── Conflict               it exists already, differs, or has moved on meanwhile
├── Unauthorized           no token came with the request, or none that holds
├── Forbidden              the token may not do this; `needed` is the scope that may
├── Unavailable            the database (or another part) cannot be used right now; try again
│   ├── Overloaded         too much is waiting already; try again later
│   ├── TooManyRequests    the token's rate is used up; try again later
│   └── SecretsUnreadable  a stored secret is encrypted with a key that this process does not have
├── SchemaError            the database's schema does not fit this version of Tidegate
├── AppError               the user's application cannot be loaded or is declared wrongly
├── RequestRefused         the server answered a client with an error; `problem` is its text
├── NonRetryable           raised by a workflow: do not try again
├── RetryAfter             raised by a workflow: try again, but not before a time
└── StepFailed             a step was given up; `name` and `error` say which and why
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class FieldError:
    """One broken rule: where it is (`payload.items[3]`) and what was expected there."""

    field: str
    message: str
    too_large: bool = False


class TidegateError(Exception):
    """The root: catch this to catch everything Tidegate raises on purpose."""


class SettingsError(TidegateError):
    """A setting is missing, malformed or out of range."""


class InvalidInput(TidegateError):
    """What a caller sent breaks a rule; nothing of it was stored."""

    def __init__(self, message: str, errors: list[FieldError] | None = None) -> None:
        super().__init__(message)
        self.errors = errors or []

    def __str__(self) -> str:
        details = "; ".join(f"{e.field}: {e.message}" for e in self.errors)
        return f"{self.args[0]}: {details}" if details else str(self.args[0])


class NotFound(TidegateError):
    """No such event, run, workflow or trigger."""


class Conflict(TidegateError):
    """The thing exists already with other content, is ambiguous, or has moved on."""

    def __init__(self, message: str, errors: list[FieldError] | None = None) -> None:
        super().__init__(message)
        self.errors = errors or []


class Unauthorized(TidegateError):
    """No token came with the request, or (`is_given`) none that holds; `token` is its name, where it has one."""

    def __init__(self, message: str, *, is_given: bool = False, token: str | None = None) -> None:
        super().__init__(message)
        self.is_given = is_given
        self.token = token


class Forbidden(TidegateError):
    """The token does not allow this; `needed` is the scope that does."""

    def __init__(self, message: str, needed: str, errors: list[FieldError] | None = None) -> None:
        super().__init__(message)
        self.needed = needed
        self.errors = errors or []


class Unavailable(TidegateError):
    """Cannot be done right now; the same call may succeed after `retry_after_seconds`."""

    def __init__(self, message: str, retry_after_seconds: int = 1) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Overloaded(Unavailable):
    """More is waiting than this process takes on."""


class TooManyRequests(Unavailable):
    """The token has been used as often as its rate allows."""


class SecretsUnreadable(Unavailable):
    """A stored secret is encrypted with a key that this process does not have; with the key, the same call succeeds."""


class SchemaError(TidegateError):
    """The database's schema is newer, older, or not what this version wrote."""


class AppError(TidegateError):
    """The application (`module:name` or a file) cannot be loaded, or a workflow is declared wrongly."""


class RequestRefused(TidegateError):
    """The server refused a request; `status` and `problem` (RFC 9457) say why."""

    def __init__(self, status: int, problem: dict[str, Any]) -> None:
        self.status = status
        self.problem = problem
        details = "; ".join(f"{e.get('field')}: {e.get('message')}" for e in problem.get("errors", []))
        text = problem.get("detail") or problem.get("title") or f"HTTP {status}"
        super().__init__(f"{text} ({details})" if details else str(text))


class NonRetryable(TidegateError):
    """Raise in a workflow or step: trying again cannot help."""


class RetryAfter(TidegateError):
    """Raise in a step: try again, but not before `seconds` have passed.

    With `everyone="trigger"` (or `"key"`) nothing of its trigger (or of its `concurrency_key`) is launched or begun
    before that, so that its siblings do not hammer a service that has just said no.
    """

    def __init__(self, seconds: float, message: str = "", *, everyone: Literal["trigger", "key"] | None = None) -> None:
        super().__init__(message or f"retry after {seconds} s")
        self.seconds = seconds
        self.everyone = everyone


def first_line(text: str) -> str:
    """The reason that an error's text gives: its first line that says anything; what follows leads to it, or adds."""
    return next((line for each in text.splitlines() if (line := each.strip())), "")


class StepFailed(TidegateError):
    """A step was given up. A workflow may catch it and go on; uncaught, its run has failed."""

    def __init__(self, name: str, error: str) -> None:
        super().__init__(f"step {name!r} failed: {first_line(error) or 'no reason'}")
        self.name = name
        self.error = error
