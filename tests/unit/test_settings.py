"""Settings: defaults, sources in order, and refusals that say the name, what was expected and what was given."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tidegate import failpoints
from tidegate.errors import SettingsError
from tidegate.model.retry import RetryPolicy
from tidegate.model.secrets import new_key
from tidegate.secret_files import SECRETS
from tidegate.settings import Settings, client_ca_file, client_token, from_sources, trace_exporters, unknown_variables

# The numbers of the contract: base_ms, factor, max_ms, jitter_ratio, max_attempts.
DEFAULT_RETRIES = {
    "event": (5000, 2, 600_000, 0.2, 50, 0),
    "trigger": (10_000, 2, 900_000, 0.2, 50, 0),
    "step": (1000, 2, 300_000, 0.2, 5, 0),
}
PARTS = RetryPolicy.__struct_fields__


def load(environ: dict[str, str] | None = None, toml: Path = Path("absent.toml"), **overrides: Any) -> Settings:
    return from_sources(environ or {}, toml, overrides)


def refusal(environ: dict[str, str] | None = None, toml: Path = Path("absent.toml"), **overrides: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        load(environ, toml, **overrides)
    return str(caught.value)


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "tidegate.toml"


def test_the_file_of_authorities_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load({"TIDEGATE_CA_FILE": "/etc/ca.crt"}).ca_file == "/etc/ca.crt"
    monkeypatch.setenv("SSL_CERT_FILE", "/etc/all.crt")
    assert client_ca_file() == ("SSL_CERT_FILE", "/etc/all.crt")
    monkeypatch.setenv("TIDEGATE_CA_FILE", "/etc/ca.crt")
    assert client_ca_file() == ("TIDEGATE_CA_FILE", "/etc/ca.crt")


def test_defaults_are_the_contracts() -> None:
    settings = load()
    assert settings == Settings()
    for kind, numbers in DEFAULT_RETRIES.items():
        assert getattr(settings, f"{kind}_retry") == RetryPolicy(**dict(zip(PARTS, numbers, strict=True)))
    assert (settings.host, settings.port, settings.url) == ("127.0.0.1", 8700, "http://127.0.0.1:8700")
    assert (settings.queue, settings.auth, settings.token, settings.database_url) == ("postgres", "on", None, None)
    assert (settings.log_level, settings.log_format) == ("info", "json")
    assert settings.limits.max_payload_bytes == 256 * 1024
    assert settings.allow_unsafe_durability is False


@pytest.mark.parametrize("kind", DEFAULT_RETRIES)
@pytest.mark.parametrize(
    ("part", "text", "value"),
    [
        ("base_ms", "250", 250),
        ("factor", "1.5", 1.5),
        ("max_ms", "1000000", 1_000_000),
        ("jitter_ratio", "0", 0.0),
        ("max_attempts", "7", 7),
        ("max_age_ms", "86400000", 86_400_000),
    ],
)
def test_each_retry_variable(kind: str, part: str, text: str, value: float) -> None:
    settings = load({f"TIDEGATE_{kind.upper()}_RETRY_{part.upper()}": text})
    expected = dict(zip(PARTS, DEFAULT_RETRIES[kind], strict=True)) | {part: value}
    assert getattr(settings, f"{kind}_retry") == RetryPolicy(**expected)
    for other in DEFAULT_RETRIES.keys() - {kind}:
        assert getattr(settings, f"{other}_retry") == getattr(Settings(), f"{other}_retry")


@pytest.mark.parametrize("kind", DEFAULT_RETRIES)
@pytest.mark.parametrize(
    ("part", "text", "expected"),
    [
        ("base_ms", "0", "between 1 and"),
        ("base_ms", "-5", "between 1 and"),
        ("base_ms", "5s", "a whole number"),
        ("base_ms", "1.5", "a whole number"),
        ("factor", "0.5", "between 1 and 100"),
        ("factor", "nan", "between 1 and 100"),
        ("factor", "inf", "between 1 and 100"),
        ("factor", "two", "a number"),
        ("max_ms", "0", "between 1 and"),
        ("max_ms", "1", "below"),
        ("max_ms", "9" * 30, "between 1 and"),
        ("jitter_ratio", "1.1", "between 0 and 1"),
        ("jitter_ratio", "-0.1", "between 0 and 1"),
        ("jitter_ratio", "20%", "a number"),
        ("max_attempts", "0", "between 1 and"),
        ("max_attempts", "1000001", "between 1 and"),
        ("max_attempts", "many", "a whole number"),
    ],
)
def test_retry_variable_refused(kind: str, part: str, text: str, expected: str) -> None:
    variable = f"TIDEGATE_{kind.upper()}_RETRY_{part.upper()}"
    message = refusal({variable: text})
    assert variable in message
    assert expected in message
    assert text in message


def test_a_longest_wait_that_is_not_set_follows_the_first_one() -> None:
    given = load({"TIDEGATE_STEP_RETRY_BASE_MS": "1000000"}, Path("absent.toml"))
    assert given.step_retry.max_ms == 1_000_000
    both = {"TIDEGATE_STEP_RETRY_BASE_MS": "1000000", "TIDEGATE_STEP_RETRY_MAX_MS": "999"}
    assert "TIDEGATE_STEP_RETRY_MAX_MS must not be below TIDEGATE_STEP_RETRY_BASE_MS, 1000000: it is 999" in refusal(
        both
    )


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("database_url", "postgresql://u@h/d", "postgresql://u@h/d"),
        ("database_url", "postgres://u@h/d", "postgres://u@h/d"),
        ("database_direct_url", "postgresql://u@h1:1,h2:2/d", "postgresql://u@h1:1,h2:2/d"),
        ("queue", "Postgres", "postgres"),
        ("log_level", "WARNING", "warning"),
        ("log_format", "console", "console"),
        ("host", "::1", "::1"),
        ("host", "localhost", "localhost"),
        ("host", "127.8.0.1", "127.8.0.1"),
        ("port", "0", 0),
        ("port", "65535", 65535),
        ("batch_size", "5000", 5000),
        ("poll_ms", "10", 10),
        ("lease_ms", "500", 500),
        ("worker_concurrency", "1", 1),
        ("worker_only", "fulfil, report", "fulfil, report"),
        ("worker_reserve", "fulfil=4", "fulfil=4"),
        ("shutdown_ms", "0", 0),
        ("max_payload_bytes", "1024", 1024),
        ("allow_unsafe_durability", "TRUE", True),
        ("allow_unsafe_durability", "0", False),
        ("token", "secret", "secret"),
        ("port", "", 8700),
    ],
)
def test_variable(name: str, text: str, value: Any) -> None:
    assert getattr(load({f"TIDEGATE_{name.upper()}": text}), name) == value


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("port", "-1", "between 0 and 65535"),
        ("port", "65536", "between 0 and 65535"),
        ("port", "http", "a whole number"),
        ("port", "8700.0", "a whole number"),
        ("batch_size", "0", "between 1 and 5000"),
        ("batch_size", "5001", "between 1 and 5000"),
        ("poll_ms", "9", "between 10 and 60000"),
        ("lease_ms", "499", "between 500 and 3600000"),
        ("worker_concurrency", "0", "between 1 and 1000"),
        ("worker_only", ",", "expected workflows such as fulfil,report"),
        ("worker_reserve", "fulfil", "expected a workflow and its slots such as fulfil=4, not 'fulfil'"),
        ("worker_reserve", "fulfil=0", "such as fulfil=4, not 'fulfil=0'"),
        ("worker_reserve", "fulfil=1,fulfil=2", "names 'fulfil' twice"),
        ("shutdown_ms", "-1", "between 0 and 600000"),
        ("max_body_bytes", "1023", "between 1024 and 67108864"),
        ("max_batch_events", "10001", "between 1 and 10000"),
        ("max_payload_bytes", "16777217", "between 1024 and 16777216"),
        ("ingest_max_waiting", "0", "between 1 and 1000000"),
        ("queue", "rabbitmq", "postgres"),
        ("log_level", "loud", "debug or info or warning or error"),
        ("log_format", "xml", "json or console"),
        ("allow_unsafe_durability", "maybe", "true or false"),
        ("auth", "maybe", "on or off"),
        ("runbook_url", "https://wiki.example/page#section", "without #section"),
        ("runbook_url", "two words", "without #section and spaces"),
        ("public_url", "gate.example", "must be an address such as https://"),
        ("public_url", "ftp://gate.example", "must be an address such as https://"),
        ("public_url", "https://gate.example/?a=b", "must be an address such as https://"),
        ("public_url", "https://gate.example:port", "must be an address such as https://"),
        ("public_url", "https://gate. example", "must be an address such as https://"),
    ],
)
def test_variable_refused(name: str, text: str, expected: str) -> None:
    message = refusal({f"TIDEGATE_{name.upper()}": text})
    assert f"TIDEGATE_{name.upper()}" in message
    assert expected in message
    assert text in message


@pytest.mark.parametrize("address", ["mysql://user:hunter2@h/d", "user:hunter2@h/d"])
def test_refused_address_does_not_show_the_password(address: str) -> None:
    message = refusal({"TIDEGATE_DATABASE_URL": address})
    assert "TIDEGATE_DATABASE_URL must start with postgresql://" in message
    assert "hunter2" not in message


def test_other_variables_are_left_alone() -> None:
    assert load({"PATH": "/bin", "TIDEGATE_URL": "http://h:1", "PORT": "1"}) == Settings(url="http://h:1")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("TIDEGATE_PROT", "TIDEGATE_PORT"),
        ("TIDEGATE_DATABASEURL", "TIDEGATE_DATABASE_URL"),
        ("TIDEGATE_EVENT_RETRY_MAX_ATTEMPT", "TIDEGATE_EVENT_RETRY_MAX_ATTEMPTS"),
        ("TIDEGATE_SOURCE_LIMITS", "TIDEGATE_SOURCE_RATE_LIMITS"),
        ("TIDEGATE_COLOUR_OF_THE_CONSOLE", ""),
    ],
)
def test_a_misspelt_variable_is_found_with_what_was_meant(name: str, meant: str) -> None:
    environ = {name: "1", "TIDEGATE_HEALTH_WORKER_DEGRADED_MS": "1", "TIDEGATE_TOKEN": "x", "PATH": "/bin"}
    assert unknown_variables(environ) == [(name, meant)]


def test_toml_is_read(toml: Path) -> None:
    toml.write_text(
        """
        port = 9000
        log_level = "debug"
        allow_unsafe_durability = true
        [event_retry]
        base_ms = 7000
        factor = 3
        jitter_ratio = 0.5
        """
    )
    policy = RetryPolicy(base_ms=7000, factor=3, max_ms=600_000, jitter_ratio=0.5, max_attempts=50)
    expected = Settings(port=9000, log_level="debug", allow_unsafe_durability=True, event_retry=policy)
    assert load({}, toml) == expected


def test_environment_beats_toml_and_overrides_beat_both(toml: Path) -> None:
    toml.write_text('port = 9000\nlog_level = "debug"\nbatch_size = 9')
    settings = load({"TIDEGATE_PORT": "9001", "TIDEGATE_LOG_LEVEL": "error"}, toml, port=9002)
    assert (settings.port, settings.log_level, settings.batch_size) == (9002, "error", 9)
    assert load({"TIDEGATE_PORT": "9001"}, toml, port=None).port == 9001


def test_variable_beats_its_own_part_of_a_policy_in_toml(toml: Path) -> None:
    toml.write_text("[step_retry]\nbase_ms = 50\nmax_attempts = 9")
    policy = load({"TIDEGATE_STEP_RETRY_MAX_ATTEMPTS": "3"}, toml).step_retry
    assert policy == RetryPolicy(base_ms=50, factor=2, max_ms=300_000, jitter_ratio=0.2, max_attempts=3)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("port = ", ["tidegate.toml", "TOML"]),
        ("prot = 1", ["tidegate.toml: prot", "not a setting"]),
        ("port = 'x'", ["tidegate.toml: port", "whole number", "'x'"]),
        ("port = 1.5", ["tidegate.toml: port", "whole number", "1.5"]),
        ("port = true", ["tidegate.toml: port", "whole number", "true"]),
        ("port = 70000", ["PORT", "between 0 and 65535", "70000"]),
        ("log_level = 'loud'", ["tidegate.toml: log_level", "debug or info", "loud"]),
        ("auth = 'off'\nhost = '0.0.0.0'", ["HOST", "loopback only", "0.0.0.0"]),
        ("event_retry = 5", ["tidegate.toml: event_retry", "base_ms", "5"]),
        ("[event_retry]\ndelay = 5", ["tidegate.toml: event_retry", "base_ms", "delay"]),
        ("[event_retry]\nbase_ms = 0", ["tidegate.toml: event_retry.base_ms", "between 1 and", "0"]),
        ("[event_retry]\nbase_ms = 'x'", ["tidegate.toml: event_retry.base_ms", "whole number", "x"]),
        ("[event_retry]\nfactor = nan", ["tidegate.toml: event_retry.factor", "between 1 and 100", "nan"]),
    ],
)
def test_toml_refused(toml: Path, text: str, parts: list[str]) -> None:
    toml.write_text(text)
    message = refusal({}, toml)
    assert [part for part in parts if part not in message] == []


def test_toml_that_is_no_text_is_refused(toml: Path) -> None:
    toml.write_bytes(b"\xff\xfe")
    assert "tidegate.toml is not valid TOML" in refusal({}, toml)


def test_unknown_override_is_refused() -> None:
    assert "'prot'" in refusal(prot=1)


def test_the_direct_address_is_checked_and_is_the_database_url_unless_it_is_set() -> None:
    assert load(database_url="postgresql://u@h/d").require_direct_url() == "postgresql://u@h/d"
    both = load(database_url="postgresql://u@pooler/d", database_direct_url="postgresql://u@h/d")
    assert both.require_direct_url() == "postgresql://u@h/d"
    with pytest.raises(SettingsError, match="TIDEGATE_DATABASE_DIRECT_URL must start with postgresql://, not mysql://"):
        load(database_direct_url="mysql://u:secret@h/d")


def test_links_begin_with_the_public_address() -> None:
    assert load().link_base == "http://127.0.0.1:8700"
    assert load(url="http://gate:8700").link_base == "http://gate:8700"
    assert load(url="http://gate:8700", public_url="https://gate.example/a/").link_base == "https://gate.example/a/"


@pytest.mark.parametrize("url", ["https://user:password@gate.example", "not a url", "gate.example", ""])
def test_an_address_that_links_cannot_begin_with(url: str) -> None:
    settings = Settings(url=url)  # commands may use it
    wrong = r"TIDEGATE_PUBLIC_URL is not set, so links .* begin with TIDEGATE_URL, which must be an address such as"
    with pytest.raises(SettingsError, match=wrong) as refused:
        _ = settings.link_base
    assert "password@" not in str(refused.value)
    assert load(url=url or None, public_url="https://gate.example").link_base == "https://gate.example"


def test_a_password_in_the_public_address_is_refused_and_not_repeated() -> None:
    message = refusal({"TIDEGATE_PUBLIC_URL": "https://user:secret@gate.example"})
    assert message.startswith("TIDEGATE_PUBLIC_URL must be an address such as https://")
    assert "secret" not in message


def test_missing_database_url_is_explained() -> None:
    assert load(database_url="postgresql://u@h/d").require_database_url() == "postgresql://u@h/d"
    with pytest.raises(SettingsError, match="TIDEGATE_DATABASE_URL is not set"):
        load().require_database_url()


SECRET_TEXTS = {
    "database_url": "postgresql://u:p@h/d?sslmode=verify-full",
    "database_direct_url": "postgresql://tidegate:pw@db-direct/tidegate",
    "redis_url": "rediss://h:6379/0",
    "token": "tg_secret",
    "secrets_key": ",".join(new_key() for _ in range(2)),
}


def test_every_secret_can_be_in_a_file() -> None:
    """A setting whose documented value holds a password, token or key is one of them."""
    assert SECRET_TEXTS.keys() == set(SECRETS)
    words = re.compile("url$|token|key|password|secret")
    open_ones = {"url", "public_url", "runbook_url"}  # addresses without a password
    assert {name for name in Settings.__struct_fields__ if words.search(name)} - open_ones == set(SECRETS)


@pytest.mark.parametrize("name", SECRET_TEXTS)
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_secret_is_read_from_its_file(tmp_path: Path, toml: Path, name: str, end: str) -> None:
    file = tmp_path / "secret"
    file.write_bytes((SECRET_TEXTS[name] + end).encode())
    expected = load(**{name: SECRET_TEXTS[name]})
    assert load({f"TIDEGATE_{name.upper()}_FILE": str(file)}) == expected
    assert load({f"TIDEGATE_{name.upper()}_FILE": str(file), f"TIDEGATE_{name.upper()}": ""}) == expected
    toml.write_text(f"{name}_file = {str(file)!r}")
    assert load({}, toml) == expected


def test_only_one_line_break_is_not_part_of_a_secret(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(" tg_secret \n\n")
    assert load({"TIDEGATE_TOKEN_FILE": str(tmp_path / "token")}).token == " tg_secret \n"


def test_the_environment_beats_a_file_that_toml_names(tmp_path: Path, toml: Path) -> None:
    toml.write_text("token_file = '/absent'")
    assert "tidegate.toml: token_file is '/absent', which cannot be read" in refusal({}, toml)
    (tmp_path / "token").write_text("from the file\n")
    toml.write_text(f"token_file = '{tmp_path / 'token'}'")
    assert load({"TIDEGATE_TOKEN": "given"}, toml).token == "given"
    toml.write_text("token = 'in toml'\nsecrets_key_file = ''")
    assert load({"TIDEGATE_TOKEN_FILE": str(tmp_path / "token")}, toml).token == "from the file"


@pytest.mark.parametrize("name", SECRET_TEXTS)
def test_a_secret_given_twice_or_unreadable_is_refused(tmp_path: Path, toml: Path, name: str) -> None:
    variable, file = f"TIDEGATE_{name.upper()}", tmp_path / "secret"
    file.write_text(SECRET_TEXTS[name])
    both = refusal({variable: SECRET_TEXTS[name], f"{variable}_FILE": str(file)})
    assert both == f"{variable} and {variable}_FILE are both set; set only one of them"
    toml.write_text(f"{name} = {SECRET_TEXTS[name]!r}\n{name}_file = {str(file)!r}")
    assert refusal({}, toml) == f"tidegate.toml: {name} and {name}_file are both set; set only one of them"
    named = f"{variable}_FILE is {str(file)!r}, which "
    file.write_bytes(b"\xff\xfe")
    assert refusal({f"{variable}_FILE": str(file)}) == named + "cannot be read: it is not text in UTF-8"
    file.write_text("\n")
    assert refusal({f"{variable}_FILE": str(file)}) == named + "is empty"
    file.unlink()
    assert refusal({f"{variable}_FILE": str(file)}) == named + "cannot be read: No such file or directory"
    assert "cannot be read: Is a directory" in refusal({f"{variable}_FILE": str(tmp_path)})


def test_a_wrong_value_in_a_file_does_not_show_it(tmp_path: Path) -> None:
    (tmp_path / "url").write_text("mysql://user:hunter2@h/d")
    message = refusal({"TIDEGATE_DATABASE_URL_FILE": str(tmp_path / "url")})
    assert "TIDEGATE_DATABASE_URL must start with postgresql://" in message and "hunter2" not in message


def test_the_token_of_clients_may_be_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TIDEGATE_TOKEN", "TIDEGATE_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert client_token() is None
    (tmp_path / "token").write_text("tg_secret\n")
    monkeypatch.setenv("TIDEGATE_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("TIDEGATE_DATABASE_URL_FILE", "/absent")  # not a client's concern
    assert client_token() == "tg_secret"
    monkeypatch.setenv("TIDEGATE_TOKEN", "tg_other")
    with pytest.raises(SettingsError, match="TIDEGATE_TOKEN and TIDEGATE_TOKEN_FILE are both set"):
        client_token()


@pytest.mark.parametrize(
    ("text", "expected", "given"),
    [
        ("nosuch=kill", "unknown failpoint", "'nosuch'"),
        ("migrate.mid_migration=explode", "kill, raise or sleep", "'explode'"),
    ],
)
def test_bad_failpoint_is_refused(text: str, expected: str, given: str) -> None:
    message = refusal({"TIDEGATE_FAILPOINTS": text})
    assert [part for part in ("TIDEGATE_FAILPOINTS", expected, given) if part not in message] == []


def test_failpoints_are_armed() -> None:
    load({"TIDEGATE_FAILPOINTS": "migrate.mid_migration=raise@2"})
    failpoints.hit("migrate.mid_migration")
    with pytest.raises(failpoints.FailpointHit):
        failpoints.hit("migrate.mid_migration")


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Settings().port = 1  # type: ignore[misc]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com", "localhost.example.com"])
def test_without_authentication_only_loopback(host: str) -> None:
    for given in ({}, {"TIDEGATE_AUTH": "on"}):
        settings = load({"TIDEGATE_HOST": host} | given)
        assert (settings.auth, settings.is_loopback) == ("on", False)
    message = refusal({"TIDEGATE_HOST": host, "TIDEGATE_AUTH": "off"})
    assert "TIDEGATE_HOST" in message and "loopback only" in message and host in message
    assert "TIDEGATE_AUTH must be on or off, not 'auto'" in refusal({"TIDEGATE_AUTH": "auto"})


def test_a_commands_own_defaults_give_way() -> None:
    defaults = {"auth": "off", "log_level": "warning"}
    assert from_sources({}, Path("none.toml"), {}, defaults).auth == "off"
    given = from_sources({"TIDEGATE_AUTH": "on", "TIDEGATE_LOG_LEVEL": "info"}, Path("none.toml"), {}, defaults)
    assert (given.auth, given.log_level) == ("on", "info")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, []),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, ["otlp_proto_http"]),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318"}, ["otlp_proto_http"]),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ["otlp_proto_grpc"]),
        ({"OTEL_TRACES_EXPORTER": "console, otlp"}, ["console", "otlp_proto_http"]),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, []),
    ],
)
def test_the_exporters_of_traces_are_those_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: list[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert trace_exporters() == expected
