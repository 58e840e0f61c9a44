"""TLS to Postgres, by what TIDEGATE_DATABASE_URL asks for.

The embedded Postgres has no TLS. So it stands behind a server that speaks TLS for it, as a cloud's proxy does. Where a
Postgres with TLS is installed, the same cases run on that.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import re
import select
import shutil
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import asyncpg
import pytest
from chaos.proxy import Proxy

from tests.certificates import Authority
from tests.processes import PATIENCE_SECONDS, run, tidegate
from tidegate.embedded import ROLE, EmbeddedPostgres
from tidegate.errors import SettingsError, Unavailable
from tidegate.store.db import Database, why_down

_SSL_REQUEST = struct.pack("!II", 8, 80877103)
# The unprivileged user that a Postgres started by root runs as.
_NOBODY = pwd.getpwnam("nobody")
NOBODY: dict[str, Any] = {"user": _NOBODY.pw_uid, "group": _NOBODY.pw_gid, "extra_groups": []}
if os.geteuid() != 0:
    NOBODY = {}


class Pki(NamedTuple):
    """Who signed the server's certificate, and another authority."""

    ours: Authority
    other: Authority
    server: tuple[Path, Path]
    client: tuple[Path, Path]


class Secured(NamedTuple):
    """A Postgres that speaks TLS, for `localhost` and 127.0.0.1, and asks for no password."""

    port: int
    database: str = "tidegate"

    def url(self, host: str = "localhost", **query: object) -> str:
        text = urlencode({name: str(value) for name, value in query.items()})
        return f"postgresql://tidegate@{host}:{self.port}/{self.database}?{text}"


@pytest.fixture(scope="module")
def pki() -> Iterator[Pki]:
    with tempfile.TemporaryDirectory(prefix="tidegate-tls-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        ours, other = Authority(folder / "ours", "ours"), Authority(folder / "other", "other")
        yield Pki(ours, other, ours.issue("localhost", "127.0.0.1"), ours.issue("tidegate"))


@contextlib.contextmanager
def terminator(target: int, pki: Pki, asks_for_certificate: bool) -> Iterator[int]:
    """The port of a server that answers a Postgres client's request for TLS, and passes the rest on to `target`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pki.server)
    if asks_for_certificate:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(pki.ours.file)

    def serve(plain: socket.socket) -> None:
        with plain, contextlib.suppress(OSError):  # a client that does not trust us hangs up
            plain.settimeout(PATIENCE_SECONDS)
            if plain.recv(8, socket.MSG_WAITALL) != _SSL_REQUEST:
                return  # as hostssl in pg_hba.conf: nothing without TLS
            plain.sendall(b"S")
            with (
                context.wrap_socket(plain, server_side=True) as client,
                socket.create_connection(("127.0.0.1", target)) as server,
            ):
                pump(client, server)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)


def pump(client: ssl.SSLSocket, server: socket.socket) -> None:
    """Both ways until one of them hangs up, in one thread: OpenSSL's connections are not for two at once."""
    other = {client: server, server: client}
    while True:
        ready = [client] if client.pending() else select.select([client, server], [], [])[0]
        for source in ready:
            if not (data := source.recv(65536)):
                return
            other[source].sendall(data)


def installed() -> Path | None:
    """The folder of a Postgres with TLS that is installed here."""
    if sys.platform != "linux":
        return None
    places = [*sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]
    if found := shutil.which("postgres"):
        places.append(Path(found).resolve().parent)
    for folder in places:
        linked = subprocess.run(["ldd", str(folder / "postgres")], capture_output=True, text=True, check=False)
        if "libssl" in linked.stdout and (folder / "initdb").exists():
            return folder
    return None


@contextlib.contextmanager
def real(pki: Pki, asks_for_certificate: bool) -> Iterator[int]:
    """The port of an installed Postgres with `ssl = on`."""
    binaries = installed()
    if binaries is None:
        pytest.skip("no Postgres with TLS is installed here")
    with tempfile.TemporaryDirectory(prefix="tidegate-tls-pg-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        certificate, key = (Path(shutil.copy(file, folder)) for file in pki.server)
        for file in (folder, certificate, key):
            if NOBODY:
                shutil.chown(file, NOBODY["user"], NOBODY["group"])
        data = folder / "data"
        initdb = [str(binaries / "initdb"), "-D", str(data), "-U", "tidegate", "-A", "trust", "-E", "UTF8", "--no-sync"]
        subprocess.run(initdb, check=True, capture_output=True, cwd=folder, **NOBODY)
        single = [str(binaries / "postgres"), "--single", "-D", str(data), "postgres"]
        subprocess.run(
            single, input=b"create database tidegate\n", check=True, capture_output=True, cwd=folder, **NOBODY
        )
        how = "clientcert=verify-full" if asks_for_certificate else ""
        (data / "pg_hba.conf").write_text(f"hostssl all all 127.0.0.1/32 trust {how}\n")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port: int = free.getsockname()[1]
        options = {
            "listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": "", "ssl": "on",
            "ssl_cert_file": certificate, "ssl_key_file": key, "ssl_ca_file": pki.ours.file,
        }  # fmt: skip
        with (folder / "log").open("wb") as log:
            command = [str(binaries / "postgres"), "-D", str(data)]
            command += [f"--{name}={value}" for name, value in options.items()]
            server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, **NOBODY)
        try:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while "ready to accept" not in (folder / "log").read_text():
                assert server.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.05)
            yield port
        finally:
            server.terminate()
            server.wait(PATIENCE_SECONDS)


@pytest.fixture(scope="module", params=["behind a proxy", "installed"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.contextmanager
def secured(kind: str, pki: Pki, postgres: EmbeddedPostgres, asks_for_certificate: bool = False) -> Iterator[Secured]:
    if kind == "installed":
        with real(pki, asks_for_certificate) as port:
            yield Secured(port)
        return
    name = "strict" if asks_for_certificate else "secured"
    asyncio.run(administer(postgres, f"create database {name} owner {ROLE}"))
    with Proxy(postgres.url(name)) as plain, terminator(plain.port, pki, asks_for_certificate) as port:
        yield Secured(port, name)
    asyncio.run(administer(postgres, f"drop database {name} with (force)"))


async def administer(postgres: EmbeddedPostgres, statement: str) -> None:
    connection = await asyncpg.connect(postgres.admin_url())
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


@pytest.fixture(scope="module")
def server(kind: str, pki: Pki, postgres: EmbeddedPostgres) -> Iterator[Secured]:
    with secured(kind, pki, postgres) as made:
        yield made


@pytest.fixture(scope="module")
def strict(kind: str, pki: Pki, postgres: EmbeddedPostgres) -> Iterator[Secured]:
    """A server that asks for a client's certificate."""
    with secured(kind, pki, postgres, asks_for_certificate=True) as made:
        yield made


async def answer(url: str) -> object:
    database = Database(url, "test", size=1)
    try:
        async with database.connection() as connection:
            return await connection.fetchval("select 42")
    finally:
        await database.close()


@pytest.mark.parametrize("mode", ["require", "verify-ca", "verify-full"])
async def test_each_mode_connects_with_the_authority_of_the_server(server: Secured, pki: Pki, mode: str) -> None:
    assert await answer(server.url(sslmode=mode, sslrootcert=pki.ours.file)) == 42


async def test_without_an_authority_the_connection_is_encrypted_only(server: Secured) -> None:
    assert await answer(server.url(sslmode="require")) == 42
    assert await answer(server.url()) == 42  # `prefer`, the default


async def test_without_tls_a_server_that_asks_for_it_refuses(server: Secured) -> None:
    with pytest.raises((SettingsError, Unavailable), match=r"does not work|cannot be reached"):
        await answer(server.url(sslmode="disable"))


@pytest.mark.parametrize("mode", ["require", "verify-ca", "verify-full"])
async def test_a_certificate_of_another_authority_is_refused(server: Secured, pki: Pki, mode: str) -> None:
    with pytest.raises(Unavailable, match=r"^the database's certificate is not accepted: .*\(sslmode and ") as caught:
        await answer(server.url(sslmode=mode, sslrootcert=pki.other.file))
    assert why_down(caught.value) == "its certificate is not accepted: see sslrootcert in TIDEGATE_DATABASE_URL"


async def test_a_certificate_for_another_name_is_refused_by_verify_full_only(server: Secured, pki: Pki) -> None:
    other = "0x7f000001"  # this machine, by a name that the certificate does not have
    assert await answer(server.url(other, sslmode="verify-ca", sslrootcert=pki.ours.file)) == 42
    with pytest.raises(Unavailable, match=f"certificate is not valid for '{other}'"):
        await answer(server.url(other, sslmode="verify-full", sslrootcert=pki.ours.file))


async def test_a_server_without_tls_is_refused(database_url: str, pki: Pki) -> None:
    with Proxy(database_url, strips=True) as plain:
        assert await answer(f"{plain.url}?sslmode=prefer") == 42
        with pytest.raises(Unavailable, match="rejected SSL upgrade"):
            await answer(f"{plain.url}?sslmode=require")


async def test_a_client_shows_its_certificate(strict: Secured, pki: Pki) -> None:
    certificate, key = pki.client
    asked = {"sslmode": "verify-full", "sslrootcert": pki.ours.file}
    assert await answer(strict.url(**asked, sslcert=certificate, sslkey=key)) == 42
    with pytest.raises((SettingsError, Unavailable)):
        await answer(strict.url(**asked))


def test_a_file_that_cannot_be_used_is_named(pki: Pki, tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("nothing")
    certificate = pki.client[0]
    for query, expected in (
        ({"sslrootcert": "/absent/ca.crt"}, "sslrootcert is '/absent/ca.crt', which cannot be read: No such file"),
        ({"sslrootcert": empty}, f"sslrootcert is '{empty}', which has no certificate in PEM format"),
        ({"sslcrl": empty}, f"sslcrl is '{empty}', which has no revocation list in PEM format"),
        ({"sslcert": certificate, "sslkey": "/absent/key"}, "sslkey is '/absent/key', which cannot be read"),
        ({"sslcert": certificate, "sslkey": pki.server[1]}, f"cannot be used with sslkey '{pki.server[1]}'"),
        ({"sslcert": certificate}, "cannot be used with the key in the same file"),
    ):
        with pytest.raises(SettingsError, match=f"^TIDEGATE_DATABASE_URL: .*{re.escape(expected)}"):
            Database(Secured(1).url(sslmode="verify-full", **query), "test", size=1)


async def test_no_authority_to_verify_with(server: Secured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SettingsError, match=r"TIDEGATE_DATABASE_URL cannot be understood: root certificate file"):
        await answer(server.url(sslmode="verify-full"))


def test_processes_use_it_for_every_connection(server: Secured, pki: Pki, tmp_path: Path) -> None:
    """From the migration to a published event, with the address in a file; and the refusal is one sentence."""
    file = tmp_path / "url"
    file.write_text(server.url(sslmode="verify-full", sslrootcert=pki.ours.file) + "\n")
    given = {"TIDEGATE_DATABASE_URL_FILE": str(file)}
    migrated = run("migrate", env=given)
    assert migrated.returncode == 0, migrated.stderr
    with tidegate("serve", "--port", "0", TIDEGATE_AUTH="off", **given) as process:
        url = process.wait_for_line(r"API on (http://\S+)")[1]
        made = run("publish", "a.b", "--source", "tls", env={"TIDEGATE_URL": url})
        assert made.returncode == 0, made.stderr
    file.write_text(server.url(sslmode="verify-full", sslrootcert=pki.other.file))
    for command in (("migrate",), ("serve", "--port", "0")):
        refused = run(*command, env=given)
        assert refused.returncode == 1
        assert "tidegate: the database's certificate is not accepted" in refused.stderr, refused.stderr
