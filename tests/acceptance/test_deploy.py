"""What deploy/ has, in use: the health check of the image, and the proxies as they are configured there."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.acceptance.conftest import DEMO, ROOT
from tests.certificates import Authority
from tests.processes import PATIENCE_SECONDS, api, run, worker

DEPLOY = ROOT / "deploy"
# Another address of this machine: what comes from it did not come from a proxy, which connects from 127.0.0.1.
CLIENT = "127.0.0.2"
FORGED = "10.9.9.9"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8 without setting up")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def healthcheck(*arguments: str, **env: str) -> int:
    command = [sys.executable, str(DEPLOY / "healthcheck.py"), *arguments]
    return subprocess.run(command, env=env, timeout=PATIENCE_SECONDS, check=False).returncode


def test_the_health_check_of_the_image(shared_url: str) -> None:
    metrics = str(free_port())
    with api(shared_url) as (process, url), worker(shared_url, DEMO, TIDEGATE_METRICS_PORT=metrics) as working:
        port = url.rpartition(":")[2]
        for path in ("livez", "readyz"):
            assert healthcheck(path, TIDEGATE_PORT=port) == 0
            assert healthcheck(path, TIDEGATE_PORT=port, TIDEGATE_METRICS_PORT=str(free_port())) == 0
            assert healthcheck(path, TIDEGATE_PORT=str(free_port()), TIDEGATE_METRICS_PORT=metrics) == 0
        assert healthcheck("nowhere", TIDEGATE_PORT=port, TIDEGATE_METRICS_PORT="0") == 1
        # On the host's network the API answers, too: a worker that has ended is not healthy because of it.
        assert healthcheck("livez", metrics, TIDEGATE_PORT=port, TIDEGATE_METRICS_PORT=metrics) == 0
        working.end()
        assert healthcheck("livez", metrics, TIDEGATE_PORT=port, TIDEGATE_METRICS_PORT=metrics) == 1
        assert healthcheck(TIDEGATE_PORT=port, TIDEGATE_METRICS_PORT=metrics) == 0
        process.end()
        assert healthcheck(TIDEGATE_PORT=port) == 1


class Front(NamedTuple):
    """A proxy: its address with TLS, the authority to trust, and its address without TLS, if it has one."""

    url: str
    authority: Path
    plain: str | None


def changed(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@contextlib.contextmanager
def started(command: list[str], folder: Path, port: int, **env: str) -> Iterator[None]:
    log = (folder / "log").open("wb")
    process = subprocess.Popen(command, env=os.environ | env, stdout=log, stderr=log, cwd=folder)
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)
        log.close()


@contextlib.contextmanager
def nginx(gate: str, folder: Path) -> Iterator[Front]:
    authority = Authority(folder, "authority")
    certificate, key = authority.issue("localhost")
    port, plain = free_port(), free_port()
    text = changed(
        (DEPLOY / "nginx" / "tidegate.conf").read_text(),
        ("server 127.0.0.1:8700 max_fails", f"server {gate} max_fails"),
        ("server 127.0.0.1:8701 max_fails", f"server 127.0.0.1:{free_port()} max_fails"),  # one that restarts
        ("listen 80;", f"listen 127.0.0.1:{plain};"),
        ("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;"),
        ("/etc/letsencrypt/live/gate.example.com/fullchain.pem", str(certificate)),
        ("/etc/letsencrypt/live/gate.example.com/privkey.pem", str(key)),
    ).replace("gate.example.com", "localhost")
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind}; " for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root; " if os.geteuid() == 0 else ""  # its own, nobody, may not enter this folder
    main = f"{user}daemon off; pid {folder}/pid; error_log stderr; events {{}}\n"
    main += f"http {{ access_log off; {temporary}\n{text}\n}}"
    file = folder / "nginx.conf"
    file.write_text(main)
    command = ["nginx", "-p", str(folder), "-c", str(file)]
    tested = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
    assert tested.returncode == 0 and "[warn]" not in tested.stderr, tested.stderr
    with started(command, folder, port):
        yield Front(f"https://localhost:{port}", authority.file, f"http://localhost:{plain}")


@contextlib.contextmanager
def caddy(gate: str, folder: Path) -> Iterator[Front]:
    port = free_port()
    own = "{\n\tadmin off\n\tskip_install_trust\n\tauto_https disable_redirects\n}\n"
    file = folder / "Caddyfile"
    file.write_text(own + (DEPLOY / "caddy" / "Caddyfile").read_text())
    upstreams = f"{gate} 127.0.0.1:{free_port()}"  # the second is one that restarts
    env = {"TG_SITE": f"https://localhost:{port}", "TG_UPSTREAM": upstreams, "HOME": str(folder)}
    env |= {"XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    arguments = ["--adapter", "caddyfile", "--config", str(file)]
    tested = subprocess.run(
        ["caddy", "validate", *arguments], env=os.environ | env, capture_output=True, text=True, check=False
    )
    assert tested.returncode == 0, tested.stderr
    with started(["caddy", "run", *arguments], folder, port, **env):
        yield Front(f"https://localhost:{port}", folder / "caddy/pki/authorities/local/root.crt", None)


PROXIES = {"nginx": nginx, "caddy": caddy}


@pytest.mark.skipif(shutil.which("caddy") is None, reason="caddy is not on the PATH")
def test_the_balancer_of_the_compose_file_is_valid(tmp_path: Path) -> None:
    env = {"TG_FRONT_NETWORK": "172.30.87.0/24", "HOME": str(tmp_path)}
    command = ["caddy", "validate", "--adapter", "caddyfile", "--config", str(DEPLOY / "caddy" / "balancer.Caddyfile")]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Gate(NamedTuple):
    address: str
    token: str
    bound_to_client: str
    bound_elsewhere: str


@pytest.fixture(scope="module")
def gate(shared_url: str) -> Iterator[Gate]:
    """An API as it is behind a proxy on the same host, and tokens."""

    def token(name: str, *options: str) -> str:
        made = run("token", "create", name, "--scope", "publish", *options, env={"TIDEGATE_DATABASE_URL": shared_url})
        assert made.returncode == 0, made.stderr
        return str(made.stdout.strip())

    tokens = token("any"), token("here", "--network", CLIENT), token("elsewhere", "--network", FORGED)
    with api(shared_url, TIDEGATE_AUTH="on", TIDEGATE_TRUSTED_PROXIES="127.0.0.1") as (_, url):
        yield Gate(url.removeprefix("http://"), *tokens)


@pytest.fixture(params=PROXIES)
def front(request: pytest.FixtureRequest, gate: Gate, tmp_path: Path) -> Iterator[Front]:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not on the PATH")
    with PROXIES[request.param](gate.address, tmp_path) as made:
        yield made


def test_through_the_proxy_a_client_has_its_own_address(front: Front, gate: Gate) -> None:
    transport = httpx.HTTPTransport(
        verify=ssl.create_default_context(cafile=str(front.authority)), local_address=CLIENT
    )
    with httpx.Client(transport=transport, base_url=front.url, timeout=PATIENCE_SECONDS) as client:

        def published(token: str | None, size: int = 1, **headers: str) -> httpx.Response:
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            given |= {"authorization": f"Bearer {token}"} if token else {}
            event = {"type": "a", "source": "proxied", "payload": {"text": "x" * size}}
            return client.post("/v1/events", json=event, headers=given)

        accepted = published(gate.token)
        assert accepted.status_code == 202, accepted.text
        assert accepted.headers["strict-transport-security"] == "max-age=31536000"
        assert published(None).status_code == 401  # although the proxy connects from this machine
        assert published(gate.bound_to_client).status_code == 202
        assert published(gate.bound_elsewhere).status_code == 401
        for forged in ({"x_forwarded_for": FORGED}, {"forwarded": f"for={FORGED}"}, {"x_real_ip": FORGED}):
            assert published(gate.bound_elsewhere, **forged).status_code == 401, forged
            assert published(gate.bound_to_client, **forged).status_code == 202, forged
        assert published(gate.token, size=200_000).status_code == 202
        assert published(gate.token, size=1_100_000).status_code == 413
        assert client.get("/livez").json() == {"status": "ok"}
        if front.plain is not None:
            moved = client.get(f"{front.plain}/docs?a=1")
            assert (moved.status_code, moved.headers["location"]) == (301, "https://localhost/docs?a=1")


def test_the_proxies_warn_of_an_open_api() -> None:
    for file in (DEPLOY / "nginx" / "tidegate.conf", DEPLOY / "caddy" / "Caddyfile"):
        text = re.sub(r"\s*\n# ", " ", file.read_text())
        assert "never set TIDEGATE_AUTH=off for an API behind a proxy" in text, file
        assert "set TIDEGATE_TRUSTED_PROXIES to the proxy's address" in text, file
