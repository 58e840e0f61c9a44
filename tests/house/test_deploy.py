"""The image and the compose files: they fit the specification, and name files, settings and commands that exist."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tidegate.cli import cli
from tidegate.secret_files import SECRETS
from tidegate.settings import Settings, from_sources

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COMPOSE = {file.name: yaml.safe_load(file.read_text()) for file in DEPLOY.glob("compose*.yml")}
SETTINGS = {f"TIDEGATE_{name.upper()}" for name in Settings.__struct_fields__}
SETTINGS |= {f"TIDEGATE_{name.upper()}_FILE" for name in SECRETS}
# What a worker needs after TIDEGATE_SHUTDOWN_MS, and an API after its last request: closing connections, sending spans.
CLOSING_SECONDS = 15
# ${NAME:-default} in a compose file.
DEFAULT = re.compile(r"\$\{\w+:-(.*?)\}")


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, each on one line."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


def of(kind: str) -> list[str]:
    return [rest for name, rest in instructions() if name == kind]


def variables() -> dict[str, str]:
    """What the last stage of the Dockerfile sets."""
    found: dict[str, str] = {}
    for name, rest in instructions():
        if name == "FROM":
            found.clear()
        if name == "ENV":
            found |= dict(part.split("=", 1) for part in shlex.split(rest))
    return found


def is_checked(settings: dict[str, str]) -> None:
    """They exist, and their values are valid; secrets in files are not there."""
    given = {name: value for name, value in settings.items() if name.startswith("TIDEGATE_")}
    assert given.keys() <= SETTINGS, given.keys() - SETTINGS
    plain = {name: value for name, value in given.items() if not re.search(r"_(URL|KEY|TOKEN)_FILE$", name)}
    assert from_sources(plain, Path("absent.toml"), {}).auth == "on"


def test_the_image_copies_what_exists_and_nothing_else() -> None:
    copied = [rest for rest in of("COPY") if not rest.startswith("--from=")]
    sources = [path for rest in copied for path in rest.split()[:-1]]
    assert all((ROOT / path).exists() for path in sources) and "deploy/healthcheck.py" in sources
    allowed = re.findall(r"^!(.+)$", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    assert set(allowed) == set(sources)


def test_the_image_installs_by_hash_and_its_files_are_in_the_package() -> None:
    installs = [command.strip() for rest in of("RUN") for command in rest.split("&&") if "pip install" in command]
    assert installs == [
        "pip install --require-hashes -r requirements/image.txt",
        "pip install --no-deps --no-build-isolation .",
    ]
    project = (ROOT / "pyproject.toml").read_text()
    needed = {*re.findall(r'^(?:readme = |license-files = \[)"(.+?)"', project, re.MULTILINE), "pyproject.toml", "src"}
    assert needed <= set(" ".join(of("COPY")).split())


def test_the_image_is_not_run_by_root_and_starts_what_exists() -> None:
    assert len(of("FROM")) == 2 and len({rest.split()[0] for rest in of("FROM")}) == 1
    user = of("USER")
    assert user == ["10001:10001"] and "--uid 10001" in " ".join(of("RUN"))
    assert instructions().index(("USER", user[0])) > max(
        n for n, (name, _) in enumerate(instructions()) if name in ("RUN", "COPY")
    )
    assert json.loads(of("ENTRYPOINT")[0]) == ["tidegate"]
    assert set(json.loads(of("CMD")[0])) <= set(cli.list_commands(None))  # type: ignore[arg-type]
    asked = of("HEALTHCHECK")[0].partition(" CMD ")[2]
    assert json.loads(asked) == ["python", "/opt/tidegate/healthcheck.py"]
    assert f"deploy/healthcheck.py {json.loads(asked)[1]}" in of("COPY")
    assert of("WORKDIR")[-1] == "/app"


def test_the_image_sets_valid_settings_and_exposes_their_ports() -> None:
    given = variables()
    is_checked(given)
    assert of("EXPOSE") == [f"{given['TIDEGATE_PORT']} {given['TIDEGATE_METRICS_PORT']}"]


@pytest.mark.parametrize("name", COMPOSE)
def test_a_compose_file_fits_the_specification(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(DEPLOY / name)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def services() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for file, compose in COMPOSE.items():
        for name, service in compose["services"].items():
            yield file, name, service


@pytest.mark.parametrize(("file", "name", "service"), [pytest.param(*s, id=f"{s[0]} {s[1]}") for s in services()])
def test_a_service_names_what_exists(file: str, name: str, service: dict[str, Any]) -> None:
    compose = COMPOSE[file]
    environment = service.get("environment", {})
    is_checked({key: DEFAULT.sub(r"\1", value) for key, value in environment.items()})
    for volume in service.get("volumes", []):
        host = DEFAULT.sub(r"\1", volume).split(":")[0]
        assert (DEPLOY / host).exists() if host.startswith(".") else host in compose["volumes"], volume
    assert set(service.get("depends_on", [])) <= compose["services"].keys()
    assert set(service.get("networks", [])) <= compose.get("networks", {}).keys()
    assert set(service.get("secrets", [])) <= compose.get("secrets", {}).keys()
    for variable in (key for key in environment if key.endswith("_FILE") and key != "TIDEGATE_HTTP_CA_FILE"):
        assert environment[variable].removeprefix("/run/secrets/") in service["secrets"], variable
    if "dockerfile" in service.get("build", {}):
        built = service["build"]
        assert (DEPLOY / built["context"] / built["dockerfile"]).is_file()
        command = service["command"] if isinstance(service["command"], list) else shlex.split(service["command"])
        assert service.get("entrypoint") or command[0] in {*cli.list_commands(None), "--help"}  # type: ignore[arg-type]
    if service.get("restart") != "no":
        assert service["restart"] == "unless-stopped"


def seconds(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([sm])", text).groups()  # type: ignore[union-attr]
    return int(number) * {"s": 1, "m": 60}[unit]


def test_the_compose_file_for_production() -> None:
    compose = COMPOSE["compose.yml"]
    found = compose["services"]
    assert found["postgres"]["networks"] == ["back"] and compose["networks"]["back"] == {"internal": True}
    assert "ports" not in found["postgres"] and found["postgres"]["healthcheck"]["test"][0] == "CMD"
    assert all(port.startswith("127.0.0.1:") for port in found["balancer"]["ports"])
    subnet = compose["networks"]["front"]["ipam"]["config"][0]["subnet"]
    assert found["api"]["environment"]["TIDEGATE_TRUSTED_PROXIES"] == subnet
    assert found["balancer"]["environment"]["TG_FRONT_NETWORK"] == subnet
    for name in ("api", "worker", "migrate", "cli"):
        assert found[name]["environment"]["TIDEGATE_AUTH"] == "on"
        assert found[name]["read_only"] and found[name]["cap_drop"] == ["ALL"]
        assert not re.search(r"postgresql://|password", json.dumps(found[name]["environment"]))
        assert found[name]["env_file"] == [{"path": "./tidegate.env", "required": False}]
    for name in ("api", "worker"):
        assert found[name]["depends_on"] == {"migrate": {"condition": "service_completed_successfully"}}
    assert found["migrate"]["depends_on"] == {"postgres": {"condition": "service_healthy"}}
    assert seconds(found["worker"]["stop_grace_period"]) >= Settings().shutdown_ms / 1000 + CLOSING_SECONDS
    limit = int(re.search(r"max_connections=(\d+)", " ".join(found["postgres"]["command"]))[1])  # type: ignore[index]
    apis, workers = (int(DEFAULT.sub(r"\1", found[name]["deploy"]["replicas"])) for name in ("api", "worker"))
    # In a release there are twice as many for a moment.
    used = 2 * (apis * Settings().serve_connections + workers * Settings().worker_connections)
    assert apis == 2 and used + 5 <= limit


def test_api_processes_of_the_compose_file_are_behind_one_port() -> None:
    """Ports that an API process had for itself would be taken when a second one starts."""
    found = COMPOSE["compose.yml"]["services"]
    assert "ports" not in found["api"] and "container_name" not in found["api"]
    text = (DEPLOY / "caddy" / "balancer.Caddyfile").read_text()
    port = variables()["TIDEGATE_PORT"]
    assert re.search(rf"dynamic a \{{\s+name api\s+port {port}\s", text) and f"http://:{port} {{" in text
    assert found["balancer"]["ports"][0].endswith(f":{port}") and set(found["balancer"]["networks"]) == {"front"}
    assert set(re.findall(r"\{\$(\w+)\}", text)) == set(found["balancer"]["environment"])
    assert "header_up -Forwarded" in text
    assert found["proxy"]["environment"]["TG_UPSTREAM"] == f"balancer:{port}"
    assert found["cli"]["environment"]["TIDEGATE_URL"] == f"http://balancer:{port}"


def test_the_commands_of_an_upgrade_name_services_that_exist() -> None:
    text = (ROOT / "docs" / "upgrading.md").read_text().split("\n### Docker Compose\n")[1].split("```")[1]
    found = COMPOSE["compose.yml"]["services"]
    assert set(re.findall(r"run --rm (\w+)|ps --quiet (\w+)|=4 (\w+)", text)) == {
        ("migrate", "", ""), ("", "api", ""), ("", "", "api")
    }  # fmt: skip
    assert {"migrate", "api"} <= found.keys() and found["api"]["image"] == "${TG_IMAGE:-tidegate}"
    assert "--scale api=4" in text  # twice the processes, old and new
    assert DEFAULT.sub(r"\1", found["api"]["deploy"]["replicas"]) == "2"


def test_on_the_host_network_a_health_check_asks_its_own_port_only() -> None:
    for name, service in COMPOSE["compose.demo.yml"]["services"].items():
        environment = service.get("environment", {})
        if service.get("network_mode") != "host" or "TIDEGATE_METRICS_PORT" not in environment:
            continue
        own = environment["TIDEGATE_METRICS_PORT"]
        asked = service.get("healthcheck", {}).get("test", [])
        assert own == "0" or asked[-2:] == ["livez", own], name


def test_the_migration_of_the_compose_file_can_have_a_role_of_its_own() -> None:
    compose = COMPOSE["compose.yml"]
    migrate = compose["services"]["migrate"]
    assert migrate["environment"]["TIDEGATE_DATABASE_URL_FILE"] == "/run/secrets/owner_url"
    assert "database_url" not in migrate["secrets"]
    users = {name for name, service in compose["services"].items() if "owner_url" in service.get("secrets", [])}
    assert users == {"migrate"}
    assert DEFAULT.sub(r"\1", compose["secrets"]["owner_url"]["file"]) == compose["secrets"]["database_url"]["file"]
    assert DEFAULT.sub(r"\1", migrate["command"]).split() == ["migrate"]


def test_the_choices_of_the_compose_file_are_documented() -> None:
    used = dict(re.findall(r"\$\{(\w+):-(.*?)\}", (DEPLOY / "compose.yml").read_text()))
    documented: dict[str, str] = {}
    for names, defaults in re.findall(
        r"^\| (`TG_.*?) \| (.*?) \|", (ROOT / "docs/deploy.md").read_text(), re.MULTILINE
    ):
        given = ["" if one == "–" else one for one in defaults.replace("`", "").split(", ")]
        documented |= zip(names.strip("`").split("`, `"), given, strict=True)
    assert documented == used


def test_two_compose_files_are_two_projects() -> None:
    names = {file: compose["name"] for file, compose in COMPOSE.items()}
    assert names == {"compose.yml": "tidegate", "compose.demo.yml": "tidegate-demo"}


def test_the_secrets_of_the_compose_file(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    command = ["sh", str(DEPLOY / "make-secrets"), str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    made = {file.name: file.read_text() for file in folder.iterdir()}
    named = {DEFAULT.sub(r"\1", one["file"]) for one in COMPOSE["compose.yml"]["secrets"].values()}
    assert {f"./secrets/{name}" for name in made} == named
    given = COMPOSE["compose.yml"]["services"]["api"]["environment"]
    files = {key: value.replace("/run/secrets", str(folder)) for key, value in given.items() if key.endswith("_FILE")}
    settings = from_sources(files, Path("absent.toml"), {})
    password = made["database_password"]
    assert re.fullmatch("[0-9a-f]{48}", password) and settings.secrets_key
    assert settings.database_url == f"postgresql://tidegate:{password}@postgres/tidegate"
    # Another user, in the container, can read the files; on the host, nobody else can enter the folder.
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o644}
    subprocess.run(command, check=True, capture_output=True)
    assert made == {file.name: file.read_text() for file in folder.iterdir()}
    (folder / "database_password").unlink()
    assert subprocess.run(command, check=False, capture_output=True).returncode == 1
    assert {"deploy/secrets/", "deploy/tidegate.env"} <= set((ROOT / ".gitignore").read_text().splitlines())
