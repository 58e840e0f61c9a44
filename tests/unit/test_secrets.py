"""Secrets as they are stored."""

from __future__ import annotations

import pytest

from tidegate.errors import SecretsUnreadable, SettingsError
from tidegate.model.http_workflow import HttpConfig, config_errors
from tidegate.model.secrets import NO_KEYS, SEALED, SecretKeys, is_sealed, new_key, require_readable
from tidegate.model.webhook import SCHEMES, secret_errors
from tidegate.settings import Settings

A, B = new_key(), new_key()
SECRET = "a secret of the sender"


def test_the_first_key_encrypts_and_all_decrypt() -> None:
    old, both, new = SecretKeys(A), SecretKeys(f"{B}, {A}"), SecretKeys(B)
    sealed = old.seal(SECRET)
    assert is_sealed(sealed) and SECRET not in sealed and sealed != old.seal(SECRET)
    assert old.open(sealed) == both.open(sealed) == SECRET
    renewed = both.renew(sealed)
    assert new.open(renewed) == SECRET and new.is_current(renewed) and both.renew(renewed) == renewed
    assert old.open(old.seal("ä")) == "ä"


def test_without_a_key_secrets_are_stored_as_they_are() -> None:
    assert NO_KEYS.seal(SECRET) == NO_KEYS.open(SECRET) == NO_KEYS.renew(SECRET) == SECRET
    assert SecretKeys(A).open(SECRET) == SECRET, "those from before there was a key"
    assert not NO_KEYS.is_current(SECRET)


def test_what_cannot_be_read_stays_as_it_is_stored() -> None:
    sealed = SecretKeys(A).seal(SECRET)
    damaged = sealed[:-10] + "AAAAAAAA=="
    for keys, stored in (
        (NO_KEYS, sealed),
        (SecretKeys(B), sealed),
        (SecretKeys(A), damaged),
        (SecretKeys(A), f"{SEALED}x"),
    ):
        assert keys.open(stored) == keys.seal(stored) == keys.renew(stored) == stored
        with pytest.raises(SecretsUnreadable, match="TIDEGATE_SECRETS_KEY") as refused:
            require_readable([SECRET, keys.open(stored)], "webhook acme")
        assert "webhook acme" in str(refused.value) and stored not in str(refused.value)
    require_readable([SECRET], "webhook acme")


def test_no_plain_secret_can_be_taken_for_an_encrypted_one() -> None:
    posing = SecretKeys(A).seal(SECRET)
    assert all(secret_errors(scheme, posing) for scheme in SCHEMES)
    fields = {
        error.field
        for error in config_errors(HttpConfig(url="https://x.example", secret=posing, headers={"a": posing}))
    }
    assert fields == {"secret", "headers.a"}


WRONG = [("x", 1), (f"{A},", 2), (f"{A},{B[:-4]}", 2), (f"{A} {B}", 1), ("é" * 44, 1)]


@pytest.mark.parametrize(("text", "place"), WRONG, ids=["short", "empty", "cut", "no comma", "not ASCII"])
def test_a_wrong_key_is_refused_by_its_place(text: str, place: int) -> None:
    with pytest.raises(SettingsError, match=f"TIDEGATE_SECRETS_KEY: number {place} is not a key") as refused:
        Settings(secrets_key=text)
    assert A not in str(refused.value) and B[:-4] not in str(refused.value)
