"""Parameters, results of steps, payloads and outputs keep their types, the first time and when the run resumes."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pydantic
import pytest

from tests.flow import typed_values
from tests.flow.conftest import eventually
from tests.flow.typed_values import CASES, ORDER, Circle, Customer, Line, Order, Strict, maker, same
from tests.processes import worker
from tidegate import Context, NonRetryable, StepFailed, SyncContext, Tidegate
from tidegate.errors import AppError, InvalidInput
from tidegate.model import typed
from tidegate.store.db import Connection, Database
from tidegate.testing import Harness

if TYPE_CHECKING:
    from decimal import Decimal as OnlyForCheckers

NAMES = [name for name, _, _ in CASES]


def wrapper(name: str, kind: Any) -> Any:
    """A class with one field of that type, `value`. Only pydantic tells unions of its models apart in a field."""
    if name.startswith("pydantic-union"):
        return pydantic.create_model("Wrapper", value=(kind, ...))
    return dataclasses.make_dataclass("Wrapper", [("value", kind)])


async def test_every_type_arrives_as_declared_everywhere() -> None:
    """The table: each type as a parameter, a step's result the first time and on replay, an output and a payload."""
    app = Tidegate()
    seen: dict[str, list[tuple[str, object]]] = {name: [] for name in NAMES}
    wrappers = {name: wrapper(name, kind) for name, kind, _ in CASES}

    def declare(name: str, kind: Any, value: Any) -> None:
        async def work(ctx: Context, given: Any) -> Any:
            seen[name].append(("parameter", given))
            result = await ctx.step("make", maker(kind, value))
            seen[name].append(("replay" if ctx.attempt > 1 else "first", result))
            await ctx.sleep("1h")
            return result

        async def take(ctx: Context, whole: Any) -> None:
            seen[name].append(("payload", whole.value))

        work.__annotations__ |= {"given": kind, "return": kind}
        take.__annotations__ |= {"whole": wrappers[name]}
        app.workflow(on=f"work.{name}", name=f"work-{name}")(work)
        app.workflow(on=f"take.{name}", name=f"take-{name}")(take)

    for case in CASES:
        declare(*case)
    async with Harness(app) as harness:
        for name, _, value in CASES:
            await harness.publish(
                f"work.{name}", source="t", payload={"given": msgspec.json.decode(typed.encode(value))}
            )
            await harness.publish(f"take.{name}", source="t", payload=wrappers[name](value=value))
        await harness.run_until_idle()
        await harness.advance("2h")
        for name, _, value in CASES:
            assert all(same(found, value) for _, found in seen[name]), (name, seen[name])
            counted = Counter(what for what, _ in seen[name])
            assert counted == {"parameter": 2, "first": 1, "replay": 1, "payload": 1}, name
            run = await harness.only_run(f"work-{name}")
            assert run.status == "succeeded", run.error
            rule = app.workflows[run.workflow].result_rule
            assert same(rule.restored(run.output) if rule else run.output, value), (name, run.output)


@pytest.mark.parametrize("point", ["step.before_commit=kill@20", "run.before_finish=kill@1"])
async def test_the_same_in_a_worker_that_takes_over_from_a_killed_one(
    database_url: str,
    database: Database,
    connection: Connection,
    effects: Callable[[], Awaitable[list[tuple[Any, str]]]],
    point: str,
) -> None:
    path = Path(typed_values.__file__)
    await connection.execute("select tidegate.publish('typed.all', 'test')")
    with worker(database_url, path, TIDEGATE_FAILPOINTS=point, TIDEGATE_LEASE_MS="1000") as first:
        assert first.wait() == 137
    with worker(database_url, path, TIDEGATE_LEASE_MS="1000"):
        await eventually(database, "select count(*) = 1 from tidegate.workflow_runs where status = 'succeeded'")
    noted = [what for _, what in await effects()]
    assert [what for what in noted if not what.startswith("attempt ")] == []
    assert any(what.endswith("after the sleep") for what in noted)
    assert await connection.fetchval("select output from tidegate.workflow_runs") == len(CASES)


async def test_a_synchronous_workflow_too() -> None:
    app, seen = Tidegate(), []

    @app.workflow(on="go")
    def work(ctx: SyncContext) -> None:
        seen.append(ctx.step("order", maker(Order, ORDER)))
        ctx.sleep("1h")

    async with Harness(app) as harness:
        await harness.publish("go", source="t")
        await harness.advance("2h")
    assert len(seen) == 2 and all(same(one, ORDER) for one in seen)


class Maker:
    """Things that can be called: what they declare is found."""

    def method(self) -> Circle:
        return Circle(1.0)

    def __call__(self) -> Circle:
        return Circle(1.0)

    @classmethod
    def of_class(cls, radius: float = 1.0) -> Circle:
        return Circle(radius)

    @staticmethod
    def of_none() -> Circle:
        return Circle(1.0)


def decorated(function: Callable[[], Circle]) -> Callable[[], Circle]:
    @functools.wraps(function)
    def call() -> Circle:
        return function()

    return call


@decorated
def wrapped() -> Circle:
    return Circle(1.0)


def later() -> Awaitable[Circle]:
    async def inner() -> Circle:
        return Circle(1.0)

    return inner()


def hidden() -> OnlyForCheckers:
    return 1  # type: ignore[return-value]


async def results_of(*functions: Any) -> list[Any]:
    app, seen = Tidegate(), []

    @app.workflow(on="go")
    async def work(ctx: Context) -> None:
        seen.clear()
        for n, function in enumerate(functions):
            try:
                seen.append(await ctx.step(f"s-{n}", function))
            except StepFailed as failed:
                seen.append(failed.error)
        await ctx.sleep("1h")

    async with Harness(app) as harness:
        await harness.publish("go", source="t")
        await harness.run_until_idle()
        first = list(seen)
        await harness.advance("2h")
        assert (await harness.only_run()).status == "succeeded"
    assert [type(one) for one in seen] == [type(one) for one in first] and seen == first
    return seen


async def test_what_is_declared_is_found_whatever_is_called() -> None:
    @dataclasses.dataclass
    class Local:
        at: datetime

    def local() -> Local:
        return Local(typed_values.AT)

    made = Maker()
    callables = [
        made.method,
        made,
        Maker.of_class,
        functools.partial(Maker.of_class, 1.0),
        Maker.of_none,
        wrapped,
        later,
    ]
    assert await results_of(*callables, functools.partial(Circle, 1.0)) == [Circle(1.0)] * 8
    assert await results_of(local) == [Local(typed_values.AT)]


async def test_without_a_declared_type_results_are_json() -> None:
    def untyped():  # type: ignore[no-untyped-def]
        return Line("a", 1, frozenset({"x"}))  # type: ignore[arg-type]

    def anything() -> Any:
        return (1, 2)

    def unknown() -> object:
        return Circle(1.0)

    found = await results_of(untyped, anything, unknown, lambda: {1}, hidden)
    line = {"sku": "a", "price": 1, "tags": ["x"]}
    assert found == [line, [1, 2], {"type": "circle", "radius": 1.0}, [1], 1]


async def test_a_result_that_is_not_what_is_declared_fails_the_step() -> None:
    def number() -> int:
        return "seven"  # type: ignore[return-value]

    def nothing() -> Order:
        return None  # type: ignore[return-value]

    class Special(Customer):
        more: int = 1

    def base() -> Customer:
        return Special(**typed_values.CUSTOMER.model_dump(by_alias=True))

    found = await results_of(number, nothing, base)
    assert found[0].startswith(
        "NonRetryable: the result of step 's-0' is not the int that it is declared to be: Expected"
    )
    assert "the result of step 's-1' is not the Order that it is declared to be" in found[1]
    assert "'s-2' is test_a_result" in found[2] and "would come back as the Customer" in found[2]


class Unknown:
    pass


class Holder(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    unknown: Unknown


REFUSED: list[tuple[Any, str]] = [
    (Unknown, "Unknown is not a type that can be restored"),
    (list[Unknown], "Unknown is not a type that can be restored"),
    (pathlib.Path, "Path is not a type that can be restored"),
    (Iterator[int], "Iterator is not a type that can be restored from JSON; use list[…]"),
    (str | datetime, "may not contain more than one str-like type"),
    (Order | Line, "may not contain more than one dict-like type"),
    (Customer | Strict, "may not contain more than one custom type"),
    (dict[tuple[int, int], int], "the keys of an object in JSON are text"),
    (Holder, "Holder holds what JSON has not"),
]


@pytest.mark.parametrize(("kind", "reason"), REFUSED)
async def test_what_cannot_be_kept_is_refused_before_anything_happens(kind: Any, reason: str) -> None:
    async def with_argument(ctx: Context, thing: Any) -> None: ...

    async def with_output(ctx: Context) -> Any: ...

    with_argument.__annotations__["thing"] = kind
    with_output.__annotations__["return"] = kind
    with pytest.raises(AppError, match="workflow with_argument: argument thing is of type") as refused:
        Tidegate().workflow(on="a")(with_argument)
    assert reason in str(refused.value)
    with pytest.raises(AppError, match="workflow with_output: what it returns is of type") as refused:
        Tidegate().workflow(on="a")(with_output)
    assert reason in str(refused.value)

    called = []

    def effect() -> Any:
        called.append(1)

    effect.__annotations__["return"] = kind
    app = Tidegate()

    @app.workflow(on="go")
    async def work(ctx: Context) -> None:
        await ctx.step("s", effect)

    async with Harness(app) as harness:
        await harness.publish("go", source="t")
        await harness.run_until_idle()
        run = await harness.only_run()
    assert called == [] and run.status == "failed" and run.attempts == 1
    assert (run.error or "").startswith("NonRetryable: step 's': ") and reason in (run.error or "")


def late_argument(ctx: Context, thing: DefinedLater) -> None: ...  # type: ignore[name-defined]  # noqa: F821


def test_a_type_that_is_defined_after_the_workflow_is_found_when_the_worker_starts() -> None:
    app = Tidegate()
    app.workflow(on="a")(late_argument)
    workflow = app.workflows["late_argument"]
    assert workflow.bind({"thing": {"at": "x"}}) == {"thing": {"at": "x"}}
    try:
        globals()["DefinedLater"] = Order
        workflow.check_types()
    finally:
        del globals()["DefinedLater"]
    with pytest.raises(NonRetryable, match="parameter 'thing' of workflow late_argument is wrong"):
        workflow.bind({"thing": {"at": "x"}})


async def test_the_whole_payload_as_one_argument() -> None:
    app, seen = Tidegate(), dict[str, list[Any]]()

    @app.workflow(on="order.*")
    async def pay(ctx: Context, order: Order) -> None:
        seen.setdefault("pay", []).append(order)

    @app.workflow(on="customer.*")
    async def greet(ctx: Context, customer: Customer) -> None:
        seen.setdefault("greet", []).append(customer)

    @app.workflow(on="customer.*", params={"customer": {"id": "{{ event.payload.id }}", "since": "2000-01-01"}})
    async def by_template(ctx: Context, customer: Customer) -> None:
        seen.setdefault("by_template", []).append(customer.since.year)

    @app.workflow(on="customer.*")
    async def two(ctx: Context, customer: Customer | None = None, id: str = "") -> None:
        seen.setdefault("two", []).append((customer, id))

    async with Harness(app) as harness:
        await harness.publish("order.created", source="t", payload=ORDER)
        await harness.publish("order.created", source="t", payload={"order": ORDER.before or msgspec.to_builtins(
            ORDER, enc_hook=typed.plain), "more": 1})  # fmt: skip
        await harness.publish("customer.new", source="t", payload=typed_values.CUSTOMER)
        await harness.publish("order.created", source="t", payload={"id": 1})
        await harness.run_until_idle()
        runs = await harness.runs("pay")
    assert len(seen["pay"]) == 2 and all(same(one, ORDER) for one in seen["pay"])
    assert same(seen["greet"], [typed_values.CUSTOMER])
    assert seen["by_template"] == [2000]
    assert seen["two"] == [(None, str(typed_values.ID))]
    assert runs[0].parameters["id"] == 7
    assert "parameter 'order' of workflow pay is wrong: Object missing required field" in (runs[2].error or "")


async def test_publishing_sets_twice_is_one_event_whatever_their_order() -> None:
    app = Tidegate()
    one = Customer(id=typed_values.ID, since=typed_values.CUSTOMER.since, roles=set("abcdefgh"))
    other = Customer(id=typed_values.ID, since=typed_values.CUSTOMER.since, roles=set("hgfedcba"))
    async with Harness(app) as harness:
        for payload in (one, other, one.model_dump(mode="json", by_alias=True) | {"roles": sorted("abcdefgh")}):
            answer = await harness.publish("a.b", source="t", payload=payload, id="one")
    assert answer.status == "duplicate"


async def test_a_model_inside_a_payload_and_what_is_no_object() -> None:
    app = Tidegate()
    async with Harness(app) as harness:
        await harness.publish("a.b", source="t", payload={"of": typed_values.Card(number="4")})
        with pytest.raises(InvalidInput, match="payload"):
            await harness.publish("a.b", source="t", payload=[1])  # type: ignore[arg-type]


def test_pydantic_is_not_imported_for_those_who_do_not_use_it() -> None:
    probe = """
import sys
class Never:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "pydantic": raise ImportError(name)
sys.meta_path.insert(0, Never())
import dataclasses, asyncio
from tidegate import Tidegate, Context, Client
from tidegate.model import typed
app = Tidegate()
@dataclasses.dataclass
class Order:
    id: int
@app.workflow(on="a.b")
async def f(ctx: Context, order: Order) -> Order: ...
assert app.workflows["f"].bind({"id": 1}) == {"order": Order(1)}
assert typed.encode(Order(1)) == b'{"id":1}'
assert "pydantic" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
