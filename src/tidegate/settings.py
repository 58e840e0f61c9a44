"""One frozen Settings, checked at construction. This is the only module that reads the environment.

Sources, in increasing precedence: defaults, `tidegate.toml` in the working directory, variables `TIDEGATE_*`. Each of
them can name the file of a secret instead (`secret_files.py`).
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from tidegate import failpoints
from tidegate.errors import SettingsError
from tidegate.model.addresses import parse_allowed
from tidegate.model.client_address import parse_networks
from tidegate.model.event import EventLimits, is_name
from tidegate.model.health import HEALTH, HealthPolicy
from tidegate.model.retention import Retention
from tidegate.model.retry import EVENT_RETRY, STEP_RETRY, TRIGGER_RETRY, RetryPolicy
from tidegate.model.secrets import SecretKeys
from tidegate.model.server_urls import check_database_url, check_public_url, is_loopback, is_redis_url
from tidegate.model.source import SOURCE_BREAKER, TRIGGER_BREAKER, BreakerPolicy, RateLimit, SourceBreakerPolicy
from tidegate.model.worker_share import parse_only, parse_reserve
from tidegate.secret_files import SECRETS, read_secret

TOML_FILE = "tidegate.toml"
MAX_RETENTION_SECONDS = 100 * 366 * 86_400
_OTLP_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_OTLP_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
TRACE_QUEUE_SIZE = 20_000
Policy = RetryPolicy | BreakerPolicy | HealthPolicy
_POLICIES: dict[str, Policy] = {
    "event_retry": EVENT_RETRY,
    "trigger_retry": TRIGGER_RETRY,
    "step_retry": STEP_RETRY,
    "source_error": SOURCE_BREAKER,
    "trigger_error": TRIGGER_BREAKER,
    "health": HEALTH,
}
# Settings that are lists of objects, each with a `source`, and the type of the other fields.
_BY_SOURCE: dict[str, type[RateLimit | SourceBreakerPolicy]] = {
    "source_rate_limits": RateLimit,
    "source_breakers": SourceBreakerPolicy,
}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings; `docs/settings.md` describes each."""

    database_url: str | None = None
    database_direct_url: str | None = None
    queue: Literal["postgres", "bullmq"] = "postgres"
    redis_url: str | None = None
    auth: Literal["on", "off"] = "on"
    trusted_proxies: str = ""
    max_connections: int = 10_000
    max_connections_per_address: int = 2000
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "console"] = "json"
    event_retry: RetryPolicy = EVENT_RETRY
    trigger_retry: RetryPolicy = TRIGGER_RETRY
    step_retry: RetryPolicy = STEP_RETRY
    source_rate_limits: dict[str, RateLimit] = {}
    source_breakers: dict[str, SourceBreakerPolicy] = {}
    source_error: SourceBreakerPolicy = SOURCE_BREAKER
    trigger_error: BreakerPolicy = TRIGGER_BREAKER
    health: HealthPolicy = HEALTH
    host: str = "127.0.0.1"
    port: int = 8700
    url: str = "http://127.0.0.1:8700"
    public_url: str | None = None
    token: str | None = None
    ca_file: str | None = None
    batch_size: int = 500
    poll_ms: int = 1000
    lease_ms: int = 15_000
    worker_concurrency: int = 20
    worker_only: str = ""
    worker_reserve: str = ""
    serve_connections: int = 9
    worker_connections: int = 10
    transaction_connections: int = 4
    shutdown_ms: int = 20_000
    max_body_bytes: int = 1024 * 1024
    max_batch_events: int = 1000
    max_payload_bytes: int = 256 * 1024
    ingest_max_waiting: int = 20_000
    allow_unsafe_durability: bool = False
    metrics_port: int = 0
    runbook_url: str = "docs/operations/event-scheduler.md"
    http_allow: str = ""
    http_ca_file: str | None = None
    secrets_key: str = ""
    retention_events_seconds: int = 30 * 86_400
    retention_dead_letters_seconds: int = 0
    retention_audit_seconds: int = 0
    failpoints: str = ""

    @property
    def retention(self) -> Retention:
        """How long finished rows are kept."""
        return Retention(
            self.retention_events_seconds, self.retention_dead_letters_seconds, self.retention_audit_seconds
        )

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 0, 65535),
            ("batch_size", 1, 5000),
            ("poll_ms", 10, 60_000),
            ("lease_ms", 500, 3_600_000),
            ("worker_concurrency", 1, 1000),
            ("serve_connections", 3, 1000),
            ("worker_connections", 6, 1000),
            ("transaction_connections", 1, 1000),
            ("shutdown_ms", 0, 600_000),
            ("max_body_bytes", 1024, 64 * 1024 * 1024),
            ("max_batch_events", 1, 10_000),
            ("max_payload_bytes", 1024, 16 * 1024 * 1024),
            ("ingest_max_waiting", 1, 1_000_000),
            ("max_connections", 10, 1_000_000),
            ("max_connections_per_address", 0, 1_000_000),
            ("metrics_port", 0, 65535),
            ("retention_events_seconds", 0, MAX_RETENTION_SECONDS),
            ("retention_dead_letters_seconds", 0, MAX_RETENTION_SECONDS),
            ("retention_audit_seconds", 0, MAX_RETENTION_SECONDS),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise SettingsError(f"{_env(name)} must lie between {low} and {high}, not {value}")
        for name in ("database_url", "database_direct_url"):
            check_database_url(_env(name), getattr(self, name))
        if self.redis_url is not None and not is_redis_url(self.redis_url):
            raise SettingsError(  # without the value: it may contain a password
                f"{_env('redis_url')} must be an address such as redis://localhost:6379/0, rediss://… or unix://…"
            )
        if self.queue == "bullmq":
            self.require_redis_url()
        if not re.fullmatch(r"[^\s#]+", self.runbook_url):
            raise SettingsError(
                f"{_env('runbook_url')} must be the URL of the runbook page without #section and spaces, such as "
                f"https://wiki.example/tidegate, not {self.runbook_url!r}"
            )
        if self.public_url is not None:
            check_public_url(_env("public_url"), self.public_url)
        if self.auth == "off" and not self.is_loopback:
            raise SettingsError(
                f"{_env('host')} is {self.host!r}: without tokens ({_env('auth')}=off, the default of `tidegate dev`) "
                f"the API listens on loopback only (127.0.0.1, ::1 or localhost); set {_env('auth')}=on to require "
                "tokens, and create them with `tidegate token create`"
            )

        for name, parse in (
            ("trusted_proxies", parse_networks),
            ("http_allow", parse_allowed),
            ("secrets_key", SecretKeys),
            ("worker_only", parse_only),
            ("worker_reserve", parse_reserve),
        ):
            try:
                parse(getattr(self, name))
            except ValueError as exc:
                raise SettingsError(f"{_env(name)}: {exc}") from exc

    @property
    def is_loopback(self) -> bool:
        """Whether the API is reachable from this machine only."""
        return is_loopback(self.host)

    @property
    def limits(self) -> EventLimits:
        return EventLimits(max_payload_bytes=self.max_payload_bytes)

    @property
    def link_base(self) -> str:
        """Where people reach the API, for the links that are sent to them. SettingsError unless links can begin with
        it."""
        if self.public_url is None:
            name = f"{_env('public_url')} is not set, so links of approvals begin with {_env('url')}, which"
            check_public_url(name, self.url)
        return self.public_url or self.url

    def require_redis_url(self) -> str:
        """The address of Redis; SettingsError if it is not set."""
        if self.redis_url is None:
            raise SettingsError(
                "TIDEGATE_QUEUE is bullmq and TIDEGATE_REDIS_URL is not set; set it to a Redis address such as "
                "redis://localhost:6379/0"
            )
        return self.redis_url

    def require_database_url(self) -> str:
        """The address of the database; SettingsError if it is not set."""
        if self.database_url is None:
            raise SettingsError(
                "TIDEGATE_DATABASE_URL is not set; set it, or TIDEGATE_DATABASE_URL_FILE, to a Postgres address such "
                "as postgresql://user@localhost/tidegate, or use `tidegate dev`, which starts a bundled Postgres"
            )
        return self.database_url

    def require_direct_url(self) -> str:
        """The address of the database for what needs a session; SettingsError if there is none."""
        return self.database_direct_url or self.require_database_url()


def load(overrides: Mapping[str, object] | None = None, defaults: Mapping[str, object] | None = None) -> Settings:
    """Settings from `tidegate.toml` and the environment; `overrides` (by field name) take precedence.

    `defaults` are a command's own defaults, used where no source sets a value.
    """
    return from_sources(os.environ, Path(TOML_FILE), overrides or {}, defaults or {})


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    """Variables `TIDEGATE_…` that are not settings, each with the name that was probably meant, or an empty one."""
    given = [name for name in (os.environ if environ is None else environ) if name.startswith(_env(""))]
    policies = {f"{name}_{part}" for name, policy in _POLICIES.items() for part in policy.__struct_fields__}
    files = {f"{name}_file" for name in SECRETS}
    known = {_env(name) for name in {*_plain_fields(), *_BY_SOURCE, *policies, *files}}
    return [(name, _closest(name, known)) for name in sorted(given) if name not in known]


def _closest(name: str, known: Iterable[str]) -> str:
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.75)), "")


def client_token() -> str | None:
    """`TIDEGATE_TOKEN`, or what is in `TIDEGATE_TOKEN_FILE`: the default token of clients."""
    return read_secret(os.environ, _env("token"), _env("token_file")) or os.environ.get(_env("token")) or None


def client_ca_file() -> tuple[str, str]:
    """The variable that names the file with the authorities whom clients trust, and that file; "" if there is none."""
    return next(((n, file) for n in (_env("ca_file"), "SSL_CERT_FILE") if (file := os.environ.get(n))), ("", ""))


def is_tracing_disabled() -> bool:
    """`OTEL_SDK_DISABLED`."""
    return os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def trace_exporters() -> list[str]:
    """The trace exporters that the environment names, as OpenTelemetry entry points; empty: no traces."""
    given = os.environ.get("OTEL_TRACES_EXPORTER", "").strip()
    if not given and any(os.environ.get(name) for name in _OTLP_ENDPOINTS):
        given = "otlp"
    protocol = next((text for name in _OTLP_PROTOCOLS if (text := os.environ.get(name))), "http/protobuf")
    otlp = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    names = [name.strip() for name in given.split(",")]
    return [otlp if name == "otlp" else name for name in names if name not in ("", "none")]


def trace_queue_size() -> int | None:
    """Maximum number of buffered spans: a batch of events creates thousands at once. None: `OTEL_BSP_…` sets it."""
    return None if os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE") else TRACE_QUEUE_SIZE


def from_sources(
    environ: Mapping[str, str],
    toml: Path,
    overrides: Mapping[str, object],
    defaults: Mapping[str, object] | None = None,
) -> Settings:
    """Settings from the given sources. SettingsError names the setting, what was expected and what was given."""
    values: dict[str, Any] = dict(defaults or {})
    if toml.is_file():
        try:
            values.update(_from_toml(tomllib.loads(toml.read_text(encoding="utf-8")), toml.name))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
            raise SettingsError(f"{toml.name} is not valid TOML: {exc}") from exc
    values.update(_from_environment(environ, values))
    unknown = set(overrides) - set(Settings.__struct_fields__)
    if unknown:
        raise SettingsError(f"unknown setting {sorted(unknown)[0]!r}; see docs/settings.md")
    values.update({k: v for k, v in overrides.items() if v is not None})
    settings = Settings(**values)
    try:
        failpoints.arm(settings.failpoints)
    except ValueError as exc:
        raise SettingsError(f"{_env('failpoints')}: {exc}") from exc
    return settings


def _from_environment(environ: Mapping[str, str], below: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the environment sets; the unset fields of a policy are taken from `below`."""
    values: dict[str, Any] = {}
    for name, hint in _plain_fields().items():
        text = environ.get(_env(name))
        if text is not None and text != "":
            values[name] = _parse(_env(name), hint, text)
    for name in SECRETS:
        if (secret := read_secret(environ, _env(name), _env(f"{name}_file"))) is not None:
            values[name] = secret
    for name, default in _POLICIES.items():
        names = {part: _env(f"{name}_{part}") for part in default.__struct_fields__}
        given = {part: environ[variable] for part, variable in names.items() if environ.get(variable)}
        if given:
            values[name] = _policy(names, below.get(name, default), given)
    for name in _BY_SOURCE:
        if environ.get(_env(name)):
            values[name] = _by_source(name, _env(name), environ[_env(name)])
    return values


def _from_toml(table: dict[str, Any], file: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    plain = _plain_fields()
    for name, value in table.items():
        where = f"{file}: {name}"
        if name in _POLICIES:
            parts = _POLICIES[name].__struct_fields__
            if not isinstance(value, dict) or value.keys() - set(parts):
                raise SettingsError(f"{where} must be a table with {', '.join(parts)}, not {value!r}")
            names = {part: f"{where}.{part}" for part in parts}
            values[name] = _policy(names, _POLICIES[name], {part: str(given) for part, given in value.items()})
        elif name in _BY_SOURCE:
            values[name] = _by_source(name, where, msgspec.json.encode(value).decode())
        elif name in plain:
            values[name] = _parse(where, plain[name], str(value) if not isinstance(value, bool) else str(value).lower())
        elif (secret := name.removesuffix("_file")) in SECRETS:
            if (text := read_secret(table, secret, name, f"{file}: ")) is not None:
                values[secret] = text
        else:
            meant = _closest(name, {*plain, *_POLICIES, *_BY_SOURCE})
            raise SettingsError(
                f"{where} is not a setting; {f'did you mean {meant}?' if meant else 'see docs/settings.md'}"
            )
    return values


def _policy(names: dict[str, str], default: Policy, given: dict[str, str]) -> Policy:
    """The default with the given fields parsed and replaced; `names` are the field names for error messages."""
    hints = get_type_hints(type(default))
    parsed = {part: _parse(names[part], hints[part], text) for part, text in given.items()}
    if isinstance(default, RetryPolicy) and "base_ms" in parsed:  # an unset max_ms is raised to base_ms
        parsed.setdefault("max_ms", max(default.max_ms, parsed["base_ms"]))
    try:
        return msgspec.structs.replace(default, **parsed)
    except ValueError as exc:
        field = re.compile("|".join(rf"\b{part}\b" for part in names))
        raise SettingsError(field.sub(lambda found: names[found[0]], str(exc))) from exc


def _by_source(name: str, where: str, text: str) -> dict[str, Any]:
    """Parse `[{"source", …}, …]`; an error names the entry and the reason. `*` sets the default rate limit; the default
    breaker is set by `TIDEGATE_SOURCE_ERROR_…`."""
    try:
        entries = msgspec.json.decode(text, type=list[dict[str, Any]])
    except msgspec.MsgspecError as exc:
        raise SettingsError(f"{where} must be a JSON list of objects: {exc}") from exc
    found: dict[str, Any] = {}
    has_default = name == "source_rate_limits"
    for i, entry in enumerate(entries):
        source = entry.pop("source", None)
        if not isinstance(source, str) or not ((source == "*" and has_default) or is_name(source)):
            what = "the name of a source or *" if has_default else "the name of a source"
            raise SettingsError(f"{where}[{i}].source must be {what}, not {source!r}")
        if source in found:
            raise SettingsError(f"{where}[{i}].source is {source!r}, which an earlier entry already has")
        try:
            found[source] = msgspec.convert(entry, _BY_SOURCE[name])
        except (ValueError, msgspec.ValidationError) as exc:
            raise SettingsError(f"{where}[{i}] ({source}): {exc}") from exc
    return found


def _plain_fields() -> dict[str, Any]:
    special = {*_POLICIES, *_BY_SOURCE}
    return {name: hint for name, hint in get_type_hints(Settings).items() if name not in special}


def _parse(where: str, hint: Any, text: str) -> Any:
    """Parse one value by the type of its field."""
    choices = [c for c in get_args(hint) if isinstance(c, str)]
    if choices:
        if text.lower() not in choices:
            raise SettingsError(f"{where} must be {' or '.join(choices)}, not {text!r}")
        return text.lower()
    if hint is bool:
        if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
            raise SettingsError(f"{where} must be true or false, not {text!r}")
        return text.lower() in ("true", "1", "yes")
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError as exc:
            kind = "a whole number" if hint is int else "a number"
            raise SettingsError(f"{where} must be {kind}, not {text!r}") from exc
    return text


def _env(name: str) -> str:
    return f"TIDEGATE_{name.upper()}"
