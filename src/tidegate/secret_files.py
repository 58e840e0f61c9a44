"""Secrets that are read from a file, as container platforms mount them: `TIDEGATE_TOKEN_FILE=/run/secrets/token`.

The environment of a process is less private than a file: it is inherited by children and shown by inspection tools.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tidegate.errors import SettingsError

# The settings that can be read from a file, by field name.
SECRETS = ("database_url", "database_direct_url", "redis_url", "token", "secrets_key")


def read_secret(given: Mapping[str, object], key: str, file_key: str, where: str = "") -> str | None:
    """The text of the file that `given[file_key]` names, without its last line break; None if it names none.

    SettingsError if `given[key]` is set too, or if the file has no text.
    """
    file = given.get(file_key)
    if not file:
        return None
    if given.get(key):
        raise SettingsError(f"{where}{key} and {file_key} are both set; set only one of them")
    try:
        text = Path(str(file)).read_bytes().decode()
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not text in UTF-8"
        raise SettingsError(f"{where}{file_key} is {str(file)!r}, which cannot be read: {reason}") from exc
    secret = text.removesuffix("\n").removesuffix("\r")
    if not secret:
        raise SettingsError(f"{where}{file_key} is {str(file)!r}, which is empty")
    return secret
