"""Approvals: what a person is asked, what was decided, and the token of the link that decides.

The token is the approval's id and a signature of it with the installation's key, in base64url. So no token is stored or
shown anywhere: a worker that resumes the run computes the same link again, and an invented token is refused without a
read of the database. That it is used once is decided by the rows of the step and its wait.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import uuid
from collections.abc import Mapping
from datetime import datetime
from typing import Literal

import msgspec

from tidegate.errors import FieldError, first_line
from tidegate.model.ids import EventId, RunId, StepId

# The type of the event that a decision publishes.
APPROVAL_DECIDED = "tidegate.approval.decided"
# In the `retry_metadata` of a step that waits: what it waits for is an approval.
APPROVAL = "approval"
# Where the page of a link is.
LINK_PATH = "/approvals/"
MAX_TO, MAX_NOTE, MAX_COMMENT = 200, 2000, 1000
KEY_BYTES = 32
# A process uses the key that it has read for this long: then links of an earlier key are refused everywhere.
KEY_SECONDS = 55.0

_TOKEN = re.compile(r"[A-Za-z0-9_-]{64}", re.ASCII)
# No control characters except the line breaks of a text area, and no unpaired surrogates, which cannot be stored.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")

Via = Literal["link", "operator"]
# `open`: it can be decided. `decided`: it was. `expired`: its time is over. `ended`: the run has ended, is to be
# cancelled, or waits for it no longer.
ApprovalState = Literal["open", "decided", "expired", "ended"]


class ApprovalDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What was decided. `via` `operator`: `by` is the name of the operator's token. `via` `link`: whoever had the link;
    `by` is to whom it was sent, if the workflow has said so."""

    approved: bool
    by: str
    via: Via
    comment: str | None
    at: datetime


class ApprovalVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """A decision that somebody wants to make. `by` is the operator; None: the bearer of the link."""

    approved: bool
    comment: str | None = None
    by: str | None = None


class OpenApproval(msgspec.Struct, frozen=True, kw_only=True):
    """An approval that a run waits for. `id` is that of its step; `event_id` is the event that launched the run."""

    id: StepId
    run_id: RunId
    workflow: str
    name: str
    to: str | None
    note: str | None
    created_at: datetime
    until: datetime
    event_id: EventId | None


class Approval(msgspec.Struct, frozen=True, kw_only=True):
    """An approval in any state, with what a decision about it needs to know."""

    id: StepId
    run_id: RunId
    workflow: str
    name: str
    to: str | None
    note: str | None
    until: datetime | None
    state: ApprovalState
    decision: ApprovalDecision | None
    event_id: EventId | None
    correlation_id: str | None
    traceparent: str | None
    is_of_end: bool


def decided_text(facts: Mapping[str, object], result: object, *, is_timed_out: bool, at: str) -> str | None:
    """What became of the approval that a step waited for, by its `retry_metadata` and its result, the event that the
    decision published; `at` is when it ended, in words. None when it waits, or is no approval."""
    if facts.get("reason") != APPROVAL:
        return None
    if is_timed_out:
        return f"nobody decided by {at}"
    given = result.get("payload") if isinstance(result, dict) else None
    if not isinstance(given, dict):
        return None
    word = "approved" if given.get("approved") else "rejected"
    comment = first_line(given.get("comment") or "")
    return f"{word} by {given.get('by')} ({given.get('via')}){f': {comment}' if comment else ''}"


def link_of(base: str, key: bytes, approval_id: StepId) -> str:
    """The link that decides an approval; `base` is the public address of the API."""
    token = base64.urlsafe_b64encode(approval_id.bytes + _signature(key, approval_id.bytes)).decode()
    return f"{base.rstrip('/')}{LINK_PATH}{token}"


def is_token(text: str) -> bool:
    """Whether a text has the form of a token."""
    return _TOKEN.fullmatch(text) is not None


def signed_id(key: bytes, token: str) -> StepId | None:
    """The approval of a token; None: it was not made with this key."""
    if not is_token(token):
        return None
    try:
        raw = base64.urlsafe_b64decode(token)
    except binascii.Error:
        return None
    approval_id, signature = raw[:16], raw[16:]
    is_ours = hmac.compare_digest(signature, _signature(key, approval_id))
    return StepId(uuid.UUID(bytes=approval_id)) if is_ours else None


def _signature(key: bytes, approval_id: bytes) -> bytes:
    return hmac.digest(key, b"tidegate approval " + approval_id, hashlib.sha256)


def text_errors(field: str, text: object, longest: int) -> list[FieldError]:
    """What is wrong with a text that people read."""
    if text is None or (isinstance(text, str) and len(text) <= longest and not _UNPRINTABLE.search(text)):
        return []
    return [FieldError(field, f"must be printable text of at most {longest} characters")]
