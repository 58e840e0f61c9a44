"""Backlog policies: what a declaration, or a request, may say, and what a full backlog does. By table."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from tidegate import Batch, Tidegate
from tidegate.cli.trigger_files import trigger_fields
from tidegate.errors import AppError, InvalidInput
from tidegate.model.backlog import MAX_LEAVING, BacklogPolicy, Backlogs
from tidegate.model.ids import TriggerId
from tidegate.model.trigger import TriggerSpec
from tidegate.model.trigger_change import created

PAIR = (TriggerId(uuid.UUID(int=1)), "")


def declared(**options: Any) -> TriggerSpec:
    app = Tidegate()

    @app.workflow(**{"on": "cart.changed", **options})
    async def handle(ctx: Any) -> None: ...

    return app.workflows["handle"].triggers[0]


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({}, None),
        ({"max_waiting": 10}, BacklogPolicy(max_waiting=10)),
        ({"max_waiting": 10, "when_full": "skip"}, BacklogPolicy(max_waiting=10)),
        ({"max_waiting": 10, "when_full": "drop_oldest"}, BacklogPolicy(max_waiting=10, when_full="drop_oldest")),
        ({"max_waiting": 1, "when_full": "dead_letter", "max_wait": "1h"},
         BacklogPolicy(max_waiting=1, when_full="dead_letter", max_wait_ms=3_600_000)),
        ({"keep": "latest"}, BacklogPolicy(keep="latest")),
        ({"max_wait": "90s"}, BacklogPolicy(max_wait_ms=90_000)),
        ({"debounce": "5s", "max_wait": "1m"}, None),
        ({"debounce": "5s", "max_waiting": 3}, BacklogPolicy(max_waiting=3)),
        ({"batch": Batch(5, "5s"), "max_waiting": 3}, BacklogPolicy(max_waiting=3)),
    ],
)  # fmt: skip
def test_a_declaration_says_one_thing(options: dict[str, Any], policy: BacklogPolicy | None) -> None:
    spec = declared(**options)
    assert spec.backlog == policy
    assert spec.is_limited == ("debounce" in options or "batch" in options or "keep" in options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_waiting": 0}, "max_waiting: must be a whole number from 1 to 1000000, not 0"),
        ({"max_waiting": True}, "max_waiting: must be a whole number"),
        ({"max_waiting": "10"}, "max_waiting: must be a whole number"),
        ({"max_waiting": 5, "when_full": "refuse"}, "when_full: refuse is for sources"),
        ({"max_waiting": 5, "when_full": "explode"}, "when_full: must be skip, drop_oldest or dead_letter"),
        ({"when_full": "skip"}, "when_full: requires max_waiting"),
        ({"keep": "latest", "when_full": "skip"}, "when_full: requires max_waiting"),
        ({"keep": "first"}, "keep: must be latest"),
        ({"keep": "latest", "max_waiting": 5}, "keep: cannot be combined with max_waiting"),
        ({"keep": "latest", "debounce": "5s"}, "keep: cannot be combined with collect"),
        ({"batch": Batch(5, "5s"), "max_wait": "1h"}, "max_wait: cannot be combined with batch"),
        ({"max_wait": "0s"}, "max_wait"),
        ({"while_running": "cancel", "max_waiting": 5}, "max_waiting: cannot be combined with cancel_running"),
        ({"on": None, "every": "10m", "max_waiting": 5}, "max_waiting: requires on"),
        ({"on": None, "every": "10m", "max_wait": "1h"}, "max_wait: requires on"),
        ({"key": "{{ event.payload.customer }}"}, "key: requires debounce or batch"),
    ],
)
def test_what_a_declaration_cannot_say_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(AppError) as refused:
        declared(**options)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("backlog", "more", "field"),
    [
        ({"max_waiting": 0}, {}, "backlog.max_waiting"),
        ({"max_waiting": 1_000_001}, {}, "backlog.max_waiting"),
        ({}, {}, "backlog"),
        ({"when_full": "drop_oldest"}, {}, "backlog"),
        ({"max_waiting": 5, "when_full": "refuse"}, {}, "backlog.when_full"),
        ({"keep": "latest", "max_waiting": 5}, {}, "backlog.keep"),
        ({"max_wait_ms": 5}, {"collect": {"debounce_ms": 5}}, "backlog.max_wait_ms"),
        ({"keep": "latest"}, {"collect": {"debounce_ms": 5}}, "backlog.keep"),
        ({"keep": "latest"}, {"max_concurrency": 1, "cancel_running": True}, "backlog.keep"),
        ({"most": 5}, {}, "backlog.most"),
    ],
)
def test_a_request_that_is_wrong_is_refused_and_names_the_field(
    backlog: dict[str, Any], more: dict[str, Any], field: str
) -> None:
    given = {"name": "t", "event_type": "cart.changed", "backlog": backlog, **more}
    with pytest.raises(InvalidInput) as refused:
        created(given, "handle", ["*"])
    assert field in [one.field for one in refused.value.errors]


def test_a_file_may_write_the_time_as_a_duration() -> None:
    fields, names = trigger_fields({"backlog": {"max_waiting": 5, "max_wait": "1h"}}, keep_version=False)
    assert fields == {"backlog": {"max_waiting": 5, "max_wait_ms": 3_600_000}}
    assert names == {"backlog.max_wait_ms": "backlog.max_wait"}


@pytest.mark.parametrize(
    ("when_full", "waiting", "newcomers", "answers", "leaving"),
    [
        ("skip", 0, 3, [None, None, "skip"], 0),
        ("skip", 2, 2, ["skip", "skip"], 0),
        ("skip", 9, 1, ["skip"], 0),
        ("dead_letter", 1, 2, [None, "dead_letter"], 0),
        ("drop_oldest", 0, 2, [None, None], 0),
        ("drop_oldest", 1, 3, [None, None, None], 2),
        ("drop_oldest", 5, 1, [None], 4),  # the cap was lowered
        ("drop_oldest", 2 + 2 * MAX_LEAVING, 1, [None], MAX_LEAVING),
    ],
)
def test_what_a_full_backlog_does(
    when_full: Any, waiting: int, newcomers: int, answers: list[str | None], leaving: int
) -> None:
    backlogs = Backlogs({PAIR: waiting})
    policy = BacklogPolicy(max_waiting=2, when_full=when_full)
    assert [backlogs.over(PAIR, policy) for _ in range(newcomers)] == answers
    assert backlogs.leaving.get(PAIR, 0) == leaving


def test_a_policy_is_shown_in_words() -> None:
    policy = BacklogPolicy(max_waiting=5, when_full="drop_oldest", max_wait_ms=3_600_000)
    assert str(policy) == "at most 5 waiting, then drop_oldest, waits at most 1h"
    assert str(BacklogPolicy(keep="latest")) == "keeps the latest"
