"""Commands and clients that reach the API by https, with a certificate of a private authority."""

from __future__ import annotations

import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.certificates import Authority
from tests.processes import run
from tidegate import AsyncClient, Client
from tidegate.errors import SettingsError, Unavailable


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b'{"runs": [], "next_cursor": null}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


class Secured(NamedTuple):
    url: str
    ours: str
    other: str


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """A server with a certificate of our authority; our authority and another."""
    folder = tmp_path_factory.mktemp("tls")
    ours, other = Authority(folder / "ours", "ours"), Authority(folder / "other", "other")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*ours.issue("localhost", "127.0.0.1"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answer)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield Secured(f"https://127.0.0.1:{server.server_port}", str(ours.file), str(other.file))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _list(secured: Secured, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return run("runs", "list", env={"TIDEGATE_URL": secured.url} | env)


@pytest.mark.parametrize("name", ["TIDEGATE_CA_FILE", "SSL_CERT_FILE"])
def test_commands_trust_the_authorities_of_a_file(secured: Secured, name: str) -> None:
    done = _list(secured, {name: secured.ours})
    assert (done.returncode, done.stdout.strip()) == (0, "No runs yet."), done.stderr


@pytest.mark.parametrize("is_given", [True, False])
def test_commands_say_which_certificate_they_do_not_trust(secured: Secured, is_given: bool) -> None:
    done = _list(secured, {"TIDEGATE_CA_FILE": secured.other} if is_given else {})
    assert done.returncode == 1
    assert "its certificate is not accepted: " in done.stderr and "TIDEGATE_CA_FILE" in done.stderr


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_file_that_cannot_be_used_is_named(secured: Secured, tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "ca.crt"
    if content is not None:
        file.write_text(content)
    why = "cannot be read: No such file or directory" if content is None else "has no certificate in PEM format"
    done = _list(secured, {"TIDEGATE_CA_FILE": str(file)})
    assert done.returncode != 0
    assert f"TIDEGATE_CA_FILE is {str(file)!r}, which {why}" in done.stderr
    with pytest.raises(SettingsError, match=r"^ca_file is .*, which "):
        Client(secured.url, ca_file=file)
    Client("http://127.0.0.1:1", ca_file=file).close()  # not used there


async def test_clients(secured: Secured, monkeypatch: pytest.MonkeyPatch) -> None:
    with Client(secured.url, ca_file=secured.ours) as client:
        assert client.request("GET", "/v1/runs")["runs"] == []
    async with AsyncClient(secured.url, ca_file=Path(secured.ours)) as other:
        assert (await other.request("GET", "/v1/runs"))["runs"] == []
    async with AsyncClient(secured.url) as other:
        with pytest.raises(Unavailable, match="its certificate is not accepted"):
            await other.request("GET", "/v1/runs")
    monkeypatch.setenv("SSL_CERT_FILE", secured.ours)
    with Client(secured.url) as client:
        assert client.request("GET", "/v1/runs")["runs"] == []
