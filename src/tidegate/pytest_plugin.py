"""The pytest plugin: a `tidegate` fixture, a harness for the application that `tidegate_app` names (docs/testing.md).

It is loaded in every session of an environment that has Tidegate installed, so it imports nothing else until the
fixture is used. Async tests are run by pytest-asyncio if that is there, and otherwise by this plugin.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tidegate.app import Tidegate
    from tidegate.testing import Harness


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("tidegate_app", "The application of the `tidegate` fixture: module:name, or a Python file.")
    parser.addini("tidegate_log_level", "The log level of the `tidegate` fixture.", default="error")


@pytest.fixture
def tidegate_app(request: pytest.FixtureRequest) -> Tidegate:
    """The application under test: the option `tidegate_app`, unless you override this fixture."""
    from tidegate.cli.load import load_app

    spec = str(request.config.getini("tidegate_app") or "")
    if not spec:
        raise pytest.UsageError(
            'the tidegate fixture needs an application: set `tidegate_app = "app.py"` in [tool.pytest.ini_options] of '
            "pyproject.toml, or define a fixture tidegate_app that returns it"
        )
    found = _loaded.get(spec)
    if found is None:
        found = _loaded[spec] = load_app(spec)
    return found


@pytest.fixture
def tidegate_settings() -> dict[str, Any]:
    """Settings of the application in tests, by field name; override this fixture to change them."""
    return {}


_loaded: dict[str, Tidegate] = {}


def _harness(request: pytest.FixtureRequest, app: Tidegate, settings: dict[str, Any]) -> Harness:
    from tidegate.telemetry import logs
    from tidegate.testing import Harness

    logs.quieten(str(request.config.getini("tidegate_log_level")))
    return Harness(app, **settings)


def pytest_configure(config: pytest.Config) -> None:
    """Add the fixture `tidegate`, as whatever runs the async tests needs it."""
    fixtures: Any = ModuleType("tidegate_fixtures")
    fixtures.tidegate = _for_pytest_asyncio() if config.pluginmanager.hasplugin("asyncio") else _by_itself()
    config.pluginmanager.register(fixtures, "tidegate-fixtures")


def _for_pytest_asyncio() -> object:
    import pytest_asyncio

    @pytest_asyncio.fixture
    async def tidegate(
        request: pytest.FixtureRequest, tidegate_app: Tidegate, tidegate_settings: dict[str, Any]
    ) -> AsyncIterator[Harness]:
        """A harness: the application on a database of its own, with a clock that the test moves."""
        async with _harness(request, tidegate_app, tidegate_settings) as harness:
            yield harness

    return tidegate


def _by_itself() -> object:
    @pytest.fixture
    def tidegate(
        request: pytest.FixtureRequest, tidegate_app: Tidegate, tidegate_settings: dict[str, Any]
    ) -> Iterator[Harness]:
        """A harness: the application on a database of its own, with a clock that the test moves."""
        with asyncio.Runner() as runner:
            harness = _harness(request, tidegate_app, tidegate_settings)
            runner.run(harness.__aenter__())
            _runners[harness] = runner
            try:
                yield harness
            finally:
                del _runners[harness]
                runner.run(harness.__aexit__(None, None, None))

    return tidegate


NO_MODE = (
    'pytest-asyncio does not run this async test: set `asyncio_mode = "auto"` in [tool.pytest.ini_options] of '
    "pyproject.toml, or mark the test with @pytest.mark.asyncio"
)
_runners: dict[Harness, asyncio.Runner] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an async test that uses the fixture in the harness's event loop, where nothing else runs async tests."""
    harness = pyfuncitem.funcargs.get("tidegate")
    runner = next((runner for mine, runner in _runners.items() if mine is harness), None)
    function: Callable[..., Any] = pyfuncitem.obj
    if not inspect.iscoroutinefunction(function):
        return None
    if runner is None:
        is_left = harness is not None and pyfuncitem.get_closest_marker("anyio") is None
        if is_left and pyfuncitem.config.pluginmanager.hasplugin("asyncio"):
            pytest.fail(NO_MODE, pytrace=False)
        return None
    names = pyfuncitem._fixtureinfo.argnames
    runner.run(function(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
