"""Stored secrets: encrypted with the first of the operator's keys, decrypted with any of them. No I/O.

A stored secret is its plain text, or ` fernet:KEY:TOKEN`, where KEY identifies the key that encrypted it. No plaintext
secret begins with a space (`model.webhook`, `model.http_workflow`), so the two forms cannot be confused.
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
# Retry-After of requests that fail because a key is missing.
RETRY_SECONDS = 30


class SecretKeys:
    """The operator's keys, separated by commas: the first encrypts, all decrypt. Without keys, nothing is encrypted.

    ValueError gives the position of an invalid key, but not the key.
    """

    def __init__(self, text: str = "") -> None:
        self._keys = {_name(key): key for key in _parsed(text)}

    @property
    def names(self) -> list[str]:
        """The names of the keys in stored secrets; the key that encrypts comes first."""
        return list(self._keys)

    def seal(self, text: str) -> str:
        """The secret in its stored form. A secret that could not be decrypted stays unchanged."""
        if not self._keys or is_sealed(text):
            return text
        name = self.names[0]
        return f"{SEALED}{name}:{self._ciphers[name].encrypt(text.encode()).decode()}"

    def open(self, stored: str) -> str:
        """The decrypted secret; unchanged if none of the keys decrypts it (see `is_sealed`)."""
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
        """The secret encrypted with the first key; unchanged if it already is, or if it cannot be decrypted."""
        return stored if self.is_current(stored) else self.seal(self.open(stored))

    def is_current(self, stored: str) -> bool:
        """Whether it is encrypted with the first key."""
        return bool(self._keys) and stored.startswith(f"{SEALED}{self.names[0]}:")

    @cached_property
    def _ciphers(self) -> dict[str, Fernet]:
        from cryptography.fernet import Fernet  # imported only if there are keys: the import is slow

        return {name: Fernet(key) for name, key in self._keys.items()}


def new_key() -> str:
    """A new random key."""
    from cryptography.fernet import Fernet

    return Fernet.generate_key().decode()


def is_sealed(text: str) -> bool:
    """Whether this is an encrypted secret; after `SecretKeys.open`, one that could not be decrypted."""
    return text.startswith(SEALED)


def require_readable(texts: Iterable[str], whose: str) -> None:
    """Raise SecretsUnreadable if one of these could not be decrypted."""
    if any(map(is_sealed, texts)):
        raise SecretsUnreadable(
            f"a secret of {whose} is encrypted with a key that this process does not have, or is damaged; add the key "
            f"to {SETTING}, or replace the secret and expire the old one (docs/operations/secrets.md)",
            RETRY_SECONDS,
        )


def _parsed(text: str) -> list[str]:
    keys = [key.strip() for key in text.split(",")] if text.strip() else []
    for place, key in enumerate(keys, 1):
        try:
            is_key = len(base64.b64decode(key, altchars=b"-_", validate=True)) == 32
        except ValueError:
            is_key = False
        if not is_key:  # without the value: most of it may be a key
            raise ValueError(f"number {place} is not a key; `tidegate secrets key` prints one, commas separate several")
    return keys


def _name(key: str) -> str:
    return hashlib.sha256(base64.urlsafe_b64decode(key)).hexdigest()[:8]


NO_KEYS = SecretKeys()
