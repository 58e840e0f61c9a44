"""Notices: warnings about how a process is configured, even though everything works."""

from __future__ import annotations

from tidegate.model.health import Notice
from tidegate.settings import Settings
from tidegate.telemetry.logs import logger

_log = logger("notices")


def notices(settings: Settings) -> list[Notice]:
    """The notices for a process with these settings."""
    found = []
    if settings.auth == "off":
        text = (
            "the API is open: every client that reaches it on this machine, or through a proxy on it, may do "
            "everything without a token; set TIDEGATE_AUTH=on to require tokens, and create them with "
            "`tidegate token create`"
        )
        found.append(Notice(code="open_access", message=text))
    return found


def log_notices(settings: Settings) -> None:
    """Log the notices; called when a process starts."""
    for notice in notices(settings):
        _log.warning("process.notice", code=notice.code, message=notice.message)
