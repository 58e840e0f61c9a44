"""The files that TIDEGATE_DATABASE_URL names for TLS, checked before the first connection.

The driver reads them again for each connection, so that renewed certificates are used; but its errors do not say which
file is wrong.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from urllib.parse import parse_qs

from tidegate.errors import SettingsError
from tidegate.model.server_urls import split_database_url


def check_files(url: str) -> None:
    """SettingsError names the parameter and the file that cannot be read or used."""
    query = {name: values[-1] for name, values in parse_qs(split_database_url(url)[1].query).items()}
    if not query.keys() & {"sslrootcert", "sslcert", "sslkey", "sslcrl"}:
        return
    for name in ("sslrootcert", "sslcert", "sslkey", "sslcrl"):
        if name in query:
            _require_readable(name, query[name])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for name in ("sslrootcert", "sslcrl"):
        if name in query:
            try:
                context.load_verify_locations(query[name])
            except ssl.SSLError as exc:
                what = "certificate" if name == "sslrootcert" else "revocation list"
                raise SettingsError(_message(name, query[name], f"has no {what} in PEM format")) from exc
    if "sslcert" in query:
        try:
            context.load_cert_chain(query["sslcert"], query.get("sslkey"), lambda: query.get("sslpassword", ""))
        except ssl.SSLError as exc:
            key = f"sslkey {query['sslkey']!r}" if "sslkey" in query else "the key in the same file"
            reason = exc.reason or str(exc)
            raise SettingsError(_message("sslcert", query["sslcert"], f"cannot be used with {key}: {reason}")) from exc


def _require_readable(name: str, file: str) -> None:
    try:
        Path(file).read_bytes()
    except OSError as exc:
        raise SettingsError(_message(name, file, f"cannot be read: {exc.strerror}")) from exc


def _message(name: str, file: str, trouble: str) -> str:
    return f"TIDEGATE_DATABASE_URL: {name} is {file!r}, which {trouble}"
