"""Secrets as they are stored: encrypted with the first of the operator's keys, read with any of them. No I/O.

A stored secret is its plain text, or ` fernet:KEY:TOKEN`, where KEY names the key that encrypted it. No plain secret
begins with a space (`model.webhook`, `model.http_workflow`), so that neither can be taken for the other.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from tidegate.errors import SecretsUnreadable

if TYPE_CHECKING:
    from cryptography.fernet import Fernet

SETTING = "TIDEGATE_SECRETS_KEY"
SEALED = " fernet:"
# Whoever waits for a key that is missing asks again after so long.
RETRY_SECONDS = 30


class SecretKeys:
    """The operator's keys, separated by commas: the first encrypts, all decrypt; none, and secrets are stored in plain.

    ValueError says which is none, without it.
    """

    def __init__(self, text: str = "") -> None:
        self._keys = {_name(key): key for key in _parsed(text)}

    @property
    def names(self) -> list[str]:
        """What stored secrets call the keys, the one that encrypts first."""
        return list(self._keys)

    def seal(self, text: str) -> str:
        """What is stored of a secret. One that could not be read stays as it was stored."""
        if not self._keys or is_sealed(text):
            return text
        name = self.names[0]
        return f"{SEALED}{name}:{self._ciphers[name].encrypt(text.encode()).decode()}"

    def open(self, stored: str) -> str:
        """The secret; as it is stored when none of the keys reads it (`is_sealed`)."""
        if not is_sealed(stored):
            return stored
        name, _, token = stored.removeprefix(SEALED).partition(":")
        if name not in self._keys:
            return stored
        from cryptography.fernet import InvalidToken

        try:
            return self._ciphers[name].decrypt(token).decode()
        except InvalidToken:
            return stored

    def renew(self, stored: str) -> str:
        """The same secret encrypted with the first key; as it is stored if it is so already, or cannot be read."""
        return stored if self.is_current(stored) else self.seal(self.open(stored))

    def is_current(self, stored: str) -> bool:
        """Whether it is encrypted with the first key."""
        return bool(self._keys) and stored.startswith(f"{SEALED}{self.names[0]}:")

    @cached_property
    def _ciphers(self) -> dict[str, Fernet]:
        from cryptography.fernet import Fernet  # loaded where there are keys alone: it takes a while

        return {name: Fernet(key) for name, key in self._keys.items()}


def new_key() -> str:
    """A key."""
    from cryptography.fernet import Fernet

    return Fernet.generate_key().decode()


def is_sealed(text: str) -> bool:
    """Whether this is an encrypted secret: after `Keys.open`, one that could not be read."""
    return text.startswith(SEALED)


def require_readable(texts: Iterable[str], whose: str) -> None:
    """SecretsUnreadable when one of these could not be read."""
    if any(map(is_sealed, texts)):
        raise SecretsUnreadable(
            f"a secret of {whose} is encrypted with a key that this process does not have, or is damaged; add the key "
            f"to {SETTING}, or replace the secret and end the old one (docs/operations/secrets.md)",
            RETRY_SECONDS,
        )


def _parsed(text: str) -> list[str]:
    keys = [key.strip() for key in text.split(",")] if text.strip() else []
    for place, key in enumerate(keys, 1):
        try:
            is_key = len(base64.b64decode(key, altchars=b"-_", validate=True)) == 32
        except ValueError:
            is_key = False
        if not is_key:  # without what was given: most of it may be a key
            raise ValueError(f"number {place} is not a key; `tidegate secrets key` prints one, commas separate several")
    return keys


def _name(key: str) -> str:
    return hashlib.sha256(base64.urlsafe_b64decode(key)).hexdigest()[:8]


NO_KEYS = SecretKeys()
