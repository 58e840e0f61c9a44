"""Whom the clients trust when they connect by https: public authorities, or those of a file."""

from __future__ import annotations

import ssl
from pathlib import Path

from tidegate import settings
from tidegate.errors import SettingsError


def verify(url: str, ca_file: str | Path | None) -> ssl.SSLContext | bool:
    """What httpx verifies a server with. SettingsError names the file that cannot be used, and by whom it was given."""
    name, file = settings.client_ca_file()
    if ca_file and str(ca_file) != file:
        name, file = "ca_file", str(ca_file)
    if not file or not url.lower().startswith("https:"):
        return True
    try:
        Path(file).read_bytes()
        return ssl.create_default_context(cafile=file)
    except ssl.SSLError as exc:
        raise SettingsError(f"{name} is {file!r}, which has no certificate in PEM format") from exc
    except OSError as exc:
        raise SettingsError(f"{name} is {file!r}, which cannot be read: {exc.strerror}") from exc


def refused_certificate(exc: BaseException | None) -> str | None:
    """Why the server's certificate was not accepted, if that is what failed."""
    while exc is not None and not isinstance(exc, ssl.SSLCertVerificationError):
        exc = exc.__cause__ or exc.__context__
    if exc is None:
        return None
    why = exc.verify_message.rstrip(".")
    return f"its certificate is not accepted: {why} (TIDEGATE_CA_FILE names a file with your own authorities)"
