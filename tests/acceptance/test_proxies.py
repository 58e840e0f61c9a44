"""Behind real proxies that keep connections and pass `Upgrade` on: nobody's bytes become part of another's request."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import httpx
import pytest

from tests.processes import PATIENCE_SECONDS, api, run

# As its documentation has it for WebSockets, and for connections that are kept.
NGINX = """
daemon off; master_process off; pid {folder}/nginx.pid; error_log stderr;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  map $http_upgrade $connection_upgrade {{ default upgrade; '' ''; }}
  upstream gate {{ server {gate}; keepalive 2; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://gate;
      proxy_http_version 1.1;
      proxy_set_header Upgrade $http_upgrade;
      proxy_set_header Connection $connection_upgrade;
    }}
  }}
}}
"""
CADDY = """
{{
  admin off
  auto_https off
}}
http://:{port} {{
  bind 127.0.0.1
  reverse_proxy {gate}
}}
"""
PROXIES = {
    "nginx": (NGINX, lambda file: ["nginx", "-p", str(file.parent), "-c", str(file)]),
    "caddy": (CADDY, lambda file: ["caddy", "run", "--adapter", "caddyfile", "--config", str(file)]),
}
TURNS = 30


@pytest.fixture(scope="module")
def guarded_url(shared_url: str) -> Iterator[tuple[str, str]]:
    """The address of an API, and a token to publish."""
    made = run("token", "create", "honest", "--scope", "publish", env={"TIDEGATE_DATABASE_URL": shared_url})
    with api(shared_url, TIDEGATE_AUTH="on") as (_, url):
        yield url, made.stdout.strip()


@contextlib.contextmanager
def running(name: str, gate: str, folder: Path) -> Iterator[int]:
    """The port of a proxy in front of an API."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    configuration, command = PROXIES[name]
    file = folder / "configuration"
    file.write_text(configuration.format(folder=folder, gate=gate.removeprefix("http://"), port=port))
    log = (folder / "log").open("wb")
    environment = os.environ | {"HOME": str(folder), "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    process = subprocess.Popen(command(file), env=environment, stdout=log, stderr=log, cwd=folder)
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait(PATIENCE_SECONDS)
        log.close()


def sent(port: int, raw: bytes) -> bytes:
    """The first line of what is answered, or nothing."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(raw)
        with contextlib.suppress(OSError):
            return connection.makefile("rb").readline()
    return b""


def head(path: bytes, length: int, *headers: bytes) -> bytes:
    lines = [b"POST %b HTTP/1.1" % path, b"host: localhost", b"content-type: application/json", *headers]
    return b"\r\n".join([*lines, b"content-length: %d" % length]) + b"\r\n\r\n"


UPGRADES = {
    "h2c": (b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAMAAABkAAQCAAAAAAIAAAAA"),
    "websocket": (b"connection: Upgrade", b"upgrade: websocket"),
}


@pytest.mark.parametrize("proxy", PROXIES)
@pytest.mark.parametrize("upgrade", UPGRADES)
async def test_a_body_swallows_nobody_elses_request(
    guarded_url: tuple[str, str], shared_url: str, tmp_path: Path, proxy: str, upgrade: str
) -> None:
    """A stranger's body begins a request whose own body would be what the proxy sends next."""
    if shutil.which(proxy) is None:
        pytest.skip(f"{proxy} is not on the PATH")
    url, token = guarded_url
    # What comes with the head may be lost to the attacker; empty lines before a request are skipped.
    bait = b"\r\n" * 100_000 + head(b"/v1/webhooks/nobody", 4000)
    attack = head(b"/v1/webhooks/nobody", len(bait), b"webhook-signature: v1,x", *UPGRADES[upgrade]) + bait
    with running(proxy, url, tmp_path) as port, httpx.Client(trust_env=False, timeout=30) as client:
        for n in range(TURNS):
            assert b" 401 " in sent(port, attack)
            event = {"type": "a", "source": "honest", "id": f"{proxy}-{upgrade}-{n}"}
            answer = client.post(
                f"http://127.0.0.1:{port}/v1/events", json=event, headers={"authorization": f"Bearer {token}"}
            )
            assert answer.status_code == 202, answer.text
            assert answer.json()["external_id"] == event["id"]
    connection = await asyncpg.connect(shared_url)
    try:
        stored = await connection.fetchval(
            "select count(*) from tidegate.workflow_events where external_id like $1", f"{proxy}-{upgrade}-%"
        )
        assert stored == TURNS
    finally:
        await connection.close()


@pytest.mark.parametrize("proxy", PROXIES)
def test_who_waits_to_be_asked_takes_nobody_elses_request(
    guarded_url: tuple[str, str], tmp_path: Path, proxy: str
) -> None:
    """A proxy that passes `Expect` on, and is answered at once, may send another's request where the body would be."""
    if shutil.which(proxy) is None:
        pytest.skip(f"{proxy} is not on the PATH")
    url, token = guarded_url
    with running(proxy, url, tmp_path) as port, httpx.Client(trust_env=False, timeout=30) as client:
        for n in range(TURNS):
            sent(port, head(b"/v1/webhooks/nobody", 4000, b"expect: 100-continue"))
            event = {"type": "a", "source": "honest", "id": f"{proxy}-expect-{n}"}
            answer = client.post(
                f"http://127.0.0.1:{port}/v1/events", json=event, headers={"authorization": f"Bearer {token}"}
            )
            assert answer.status_code == 202, answer.text


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("curl") is None, reason="curl is not on the PATH")
def test_a_client_that_offers_http2_is_answered(address: str) -> None:
    """And what it sends is read: a pause of a minute is one of a minute."""
    made = subprocess.run(
        ["curl", "-sS", "--http2", "--json", '{"duration_ms": 60000}', f"{address}/admin/sources/curl/pause"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )
    assert '"paused":true' in made.stdout and '"paused_until":"' in made.stdout, made.stdout
