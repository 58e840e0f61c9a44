"""Over TLS the certificate is checked for the name, although the connection goes to an address that was checked."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.flow.http_receiver import LOOPBACK, Receiver
from tidegate.errors import SettingsError
from tidegate.flow.code.http import GuardedTransport, outgoing
from tidegate.settings import Settings

NAME = "hooks.example"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for NAME, with its key, signed by itself."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl here")
    file = tmp_path_factory.mktemp("tls") / "both.pem"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days",
               "2", "-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}", "-keyout", str(file), "-out",
               f"{file}.crt"]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    file.write_text(file.read_text() + Path(f"{file}.crt").read_text())
    return file


@pytest.fixture
def asked() -> list[str | None]:
    """The names that clients asked for (SNI)."""
    return []


@pytest.fixture
def receiver(certificate: Path, asked: list[str | None]) -> Iterator[Receiver]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    context.sni_callback = lambda _, name, __: asked.append(name)
    made = Receiver(context)
    yield made
    made.close()


async def post(receiver: Receiver, host: str, ca_file: str | None = None) -> int:
    async def loopback(_: str, __: int) -> list[str]:
        return ["127.0.0.1"]

    async with httpx.AsyncClient(transport=GuardedTransport(LOOPBACK._replace(ca_file=ca_file), loopback)) as client:
        return (await client.post(f"https://{host}:{receiver.port}/", content=b"{}")).status_code


@pytest.mark.parametrize("host", [NAME, f"{NAME}.", NAME.upper()])
async def test_the_name_is_asked_for_and_proven(
    receiver: Receiver, certificate: Path, asked: list[str | None], host: str
) -> None:
    """The authority is one of the operator's own."""
    assert await post(receiver, host, f"{certificate}.crt") == 200
    assert asked == [NAME]
    assert receiver.seen[0][0]["host"].lower() == f"{host.lower()}:{receiver.port}"


@pytest.mark.parametrize("host", ["other.example", "127.0.0.1"])
async def test_a_certificate_for_another_name_is_refused(receiver: Receiver, certificate: Path, host: str) -> None:
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        await post(receiver, host, f"{certificate}.crt")
    assert receiver.seen == []


def test_a_file_that_holds_no_certificates(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("nothing")
    for name in ("empty.pem", "absent.pem"):
        with pytest.raises(SettingsError, match=f"TIDEGATE_HTTP_CA_FILE is .*{name}"):
            outgoing(Settings(http_ca_file=str(tmp_path / name)))


async def test_a_certificate_that_nobody_vouches_for_is_refused(receiver: Receiver) -> None:
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        await post(receiver, NAME)
    assert receiver.seen == []
