"""What the overload and the hostile run complain about; and that what they send can be repeated."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from chaos import hostile, overload


def wave(**changes: Any) -> overload.Wave:
    made = overload.Wave(
        offered_per_second=1000.0, accepted_events=100, statuses={202: 5, 503: 50}, without_retry_after=0,
        accepted_per_second=100.0, shed_p50_seconds=0.01, shed_p99_seconds=0.1, probe_refused=100,
        probe_refused_p50_seconds=0.002, probe_refused_p99_seconds=0.02, probe_accepted_p99_seconds=1.0, peak_mb=100.0,
        normal_after_seconds=0.1,
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def flood(*waves: overload.Wave, **changes: Any) -> list[str]:
    made = overload.Found(
        capacity_per_second=100.0, calm_mb=70.0, calm_p50_seconds=0.01, waves=list(waves), accepted=200, stored=200
    )
    return msgspec.structs.replace(made, **changes).complaints


def test_a_flood_that_was_shed_well() -> None:
    assert flood(wave(), wave()) == []
    assert flood(wave(statuses={202: 1, 429: 3, 0: 1}), wave(), stored=201) == []  # one was stored, its answer lost


@pytest.mark.parametrize(
    ("waves", "changes", "complaint"),
    [
        ([wave(statuses={202: 55}), wave()], {}, "wave 1: nothing was refused"),
        ([wave(), wave(statuses={500: 1, 503: 1})], {}, "wave 2: unexpected answers {500: 1}"),
        ([wave(without_retry_after=2), wave()], {}, "wave 1: 2 refusals without Retry-After"),
        ([wave(shed_p50_seconds=0.06), wave()], {}, "wave 1: half of the refusals took longer than 0.06 s"),
        ([wave(), wave(probe_refused_p99_seconds=0.6)], {}, "wave 2: a client beside it was refused after 0.6 s"),
        ([wave(), wave(normal_after_seconds=11.0)], {}, "wave 2: normal again only after 11.0 s"),
        ([wave(accepted_per_second=49.0), wave()], {}, "wave 1: 49 events a second of 100"),
        ([wave(), wave()], {"stored": 199}, "1 acknowledged events are not there"),
        ([wave(peak_mb=500.0), wave(peak_mb=500.0)], {}, "memory grew from 70 to 500 MB"),
        ([wave(), wave(peak_mb=200.0)], {}, "the last wave needed 200 MB, the first 100 MB"),
    ],
)
def test_each_complaint(waves: list[overload.Wave], changes: dict[str, Any], complaint: str) -> None:
    assert flood(*waves, **changes) == [complaint]


@pytest.mark.parametrize(
    "changes",
    [
        {"server_errors": ["x"]},
        {"unanswered": ["x"]},
        {"shut_out": ["x"]},
        {"probes_unanswered": 1},
        {"honest_run_succeeded": False},
    ],
)
def test_each_hostile_complaint(changes: dict[str, Any]) -> None:
    clean = hostile.Found(seed=1, requests=1, statuses={400: 1}, honest_run_succeeded=True)
    assert clean.is_clean
    assert not msgspec.structs.replace(clean, **changes).is_clean


def test_hostile_requests_can_be_repeated() -> None:
    routes = [hostile.Route("POST", "/v1/workflows/{slug}/triggers"), hostile.Route("GET", "/v1/runs/{run_id}")]
    first, second = hostile.Hostile(1, routes), hostile.Hostile(1, routes)
    made = [first.request() for _ in range(300)]
    assert made == [second.request() for _ in range(300)]
    assert {method for method, *_ in made} >= {"GET", "POST"}
    assert all(path.startswith("/v1/") and "{" not in path for _, path, *_ in made)
