"""Every exception of Tidegate.

TidegateError
├── SettingsError          a setting is missing or wrong; the message says what was expected and what was given
├── InvalidInput           the input breaks a rule; `errors` names each field                           400 413 415 422
├── NotFound               the event, run, workflow, trigger … does not exist                           404
├── Conflict               it exists already with other content, is ambiguous, or its state has changed 409
├── Unauthorized           the request has no token, or one that is not valid                           401
├── Forbidden              the token does not allow this; `needed` is the scope that does               403
├── Unavailable            the database (or another part) cannot be used right now; retry               503
│   ├── Overloaded         too many requests are in progress; retry later                               503
│   ├── TooManyRequests    the token has used up its rate; retry later                                  429
│   │   └── BacklogFull    as many events of the source wait as may; retry later                        429
│   └── SecretsUnreadable  a stored secret is encrypted with a key that this process does not have      503
├── RequestRefused         the server answered a client with an error; `status` and `problem` say why   any other
├── SchemaError            the database's schema does not fit this version of Tidegate
├── AppError               the user's application cannot be loaded, or a workflow is declared wrongly
├── NonRetryable           raised by a workflow: do not retry
├── RetryAfter             raised by a workflow: retry, but not before a given time
├── RunFailed              the run that was waited for failed or was cancelled; `error` says why
└── StepFailed             a step failed and is no longer retried; `name` and `error` say which step, and why
    └── ChildFailed        a run that a step has started failed or was cancelled

The numbers are HTTP statuses: the API answers with them, and `Client` and `AsyncClient` turn them back into the same
exceptions. What a client raises for a status other than 429 and 503 is a RequestRefused as well (`except Conflict` and
`except RequestRefused` both catch a 409). For SecretsUnreadable a client raises Unavailable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class FieldError:
    """One broken rule: the field (`payload.items[3]`) and what was expected there."""

    field: str
    message: str
    too_large: bool = False


class TidegateError(Exception):
    """The base class: catch it to catch everything that Tidegate raises on purpose."""


class SettingsError(TidegateError):
    """A setting is missing, malformed or out of range."""


class InvalidInput(TidegateError):
    """The input breaks a rule; nothing of it was stored."""

    def __init__(self, message: str, errors: list[FieldError] | None = None) -> None:
        super().__init__(message)
        self.errors = errors or []

    def __str__(self) -> str:
        details = "; ".join(f"{e.field}: {e.message}" for e in self.errors)
        return f"{self.args[0]}: {details}" if details else str(self.args[0])


class NotFound(TidegateError):
    """The event, run, workflow, trigger or other resource does not exist."""


class Conflict(TidegateError):
    """The resource exists already with other content, its id is ambiguous, or its state does not allow the request."""

    def __init__(self, message: str, errors: list[FieldError] | None = None) -> None:
        super().__init__(message)
        self.errors = errors or []


class Unauthorized(TidegateError):
    """The request has no token, or (`is_given`) one that is not valid; `token` is its name, if it is known."""

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
    """Not possible right now; the same call may succeed after `retry_after_seconds`."""

    def __init__(self, message: str, retry_after_seconds: int = 1) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Overloaded(Unavailable):
    """The process has as much in progress as it accepts at once."""

    # The `type` of its problem body, by which a client distinguishes it from another 503.
    PROBLEM_TYPE: ClassVar[str] = "urn:tidegate:overloaded"


class TooManyRequests(Unavailable):
    """The token has made as many requests as its rate allows."""


class BacklogFull(TooManyRequests):
    """As many events of a source wait as its `max_waiting` allows; `errors` names the fields. Nothing was stored."""

    # The `type` of its problem body, by which a client distinguishes it from another 429.
    PROBLEM_TYPE: ClassVar[str] = "urn:tidegate:backlog-full"

    def __init__(self, message: str, retry_after_seconds: int = 5, errors: list[FieldError] | None = None) -> None:
        super().__init__(message, retry_after_seconds)
        self.errors = errors or []


class SecretsUnreadable(Unavailable):
    """A stored secret is encrypted with a key that this process does not have; with the key, the same call succeeds."""


class SchemaError(TidegateError):
    """The database's schema is newer or older than this version expects, or was altered."""


class AppError(TidegateError):
    """The application (`module:name` or a file) cannot be loaded, or a workflow is declared wrongly."""


class RequestRefused(TidegateError):
    """The server refused a client's request; `status` and `problem` (RFC 9457) say why, `errors` names each field.

    Where this module has a class for the status, the exception is of that class too.
    """

    def __init__(self, status: int, problem: dict[str, object]) -> None:
        self.status = status
        self.problem = problem
        self.errors = _field_errors(problem.get("errors"), is_too_large=status == 413)
        details = "; ".join(f"{error.field}: {error.message}" for error in self.errors)
        text = problem.get("detail") or problem.get("title") or f"HTTP {status}"
        # Not super(): beside this class a refusal has another one, whose constructor takes other arguments.
        Exception.__init__(self, f"{text} ({details})" if details else str(text))

    def __str__(self) -> str:
        return str(self.args[0])


def _field_errors(given: object, *, is_too_large: bool) -> list[FieldError]:
    """The `errors` of a problem body; anything else there, as a proxy may send it, is left out."""
    return [
        FieldError(str(one.get("field")), str(one.get("message")), is_too_large)
        for one in (given if isinstance(given, list) else [])
        if isinstance(one, dict)
    ]


class NonRetryable(TidegateError):
    """Raise it in a workflow or step when a retry cannot succeed: the run fails at once."""


class RetryAfter(TidegateError):
    """Raise it in a step: retry, but not before `seconds` have passed; a text may be a number, or as in "5s".

    With `everyone="trigger"` (or `"key"`) no run of the same trigger (or with the same `concurrency_key`) is launched
    or started before then, so that they do not overload a service that has just refused a request. Any other text is
    the name of a budget: nothing that needs it is launched before then, of the run's key if the budget has keys.
    """

    def __init__(self, seconds: float | str, message: str = "", *, everyone: str | None = None) -> None:
        super().__init__(message or f"retry after {seconds} s")
        if everyone is not None and not isinstance(everyone, str):
            raise TypeError(f'RetryAfter: everyone: must be "trigger", "key" or the name of a budget, not {everyone!r}')
        self.seconds = seconds
        self.everyone = everyone


def first_line(text: str) -> str:
    """The first line of an error text that is not blank: the reason. The lines after it are details or a traceback."""
    return next((line for each in text.splitlines() if (line := each.strip())), "")


class RunFailed(TidegateError):
    """The run whose result was asked for has none: `status` is `failed`, `cancelled`, or `not_launched` if its start
    launched no run; `error` says why."""

    def __init__(self, run_id: str, status: str, error: str) -> None:
        super().__init__(f"run {run_id} {status.replace('_', ' ')}: {first_line(error) or 'no reason'}")
        self.run_id = run_id
        self.status = status
        self.error = error


class StepFailed(TidegateError):
    """A step failed and is no longer retried. A workflow may catch this and continue; otherwise its run fails."""

    def __init__(self, name: str, error: str) -> None:
        super().__init__(f"step {name!r} failed: {first_line(error) or 'no reason'}")
        self.name = name
        self.error = error


class ChildFailed(StepFailed):
    """A run that a step has started failed, was cancelled or could not be launched; `error` names it and says why."""
