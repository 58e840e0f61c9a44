"""What an operator should know of how a process was set up, though everything moves as it should."""

from __future__ import annotations

from tidegate.model.health import Notice
from tidegate.settings import Settings
from tidegate.telemetry.logs import logger

_log = logger("notices")


def notices(settings: Settings) -> list[Notice]:
    """Those of a process with these settings."""
    found = []
    if settings.auth == "off":
        text = (
            "the API is open: whoever reaches it on this machine, or through a proxy on it, may do everything without "
            "a token; TIDEGATE_AUTH=on asks for tokens, `tidegate token create` makes them"
        )
        found.append(Notice(code="open_access", message=text))
    return found


def tell(settings: Settings) -> None:
    """Log them, at the start."""
    for notice in notices(settings):
        _log.warning("process.notice", code=notice.code, message=notice.message)
