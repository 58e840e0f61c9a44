"""What `tidegate dev` watches and reloads, and the lines it prints."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tidegate.cli.live_lines import line_of, show
from tidegate.cli.reload import Code
from tidegate.clock import utc_now
from tidegate.errors import AppError
from tidegate.model.declared import result_rule

APP = "from tidegate import Tidegate\nimport part_of_it\napp = Tidegate()\napp.value = part_of_it.VALUE\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    modules, path, flag = dict(sys.modules), list(sys.path), sys.dont_write_bytecode
    (tmp_path / "whole.py").write_text(APP)
    (tmp_path / "part_of_it.py").write_text("VALUE = 1\n")
    (tmp_path / "not_imported.py").write_text("")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - set(modules):
        del sys.modules[name]
    sys.path[:], sys.dont_write_bytecode = path, flag


def change(file: Path, text: str) -> None:
    """Another text, at another time: two changes may come within one tick of the file system's clock."""
    before = file.stat().st_mtime_ns if file.exists() else 0
    file.write_text(text)
    os.utime(file, ns=(before + 1000, before + 1000))


@pytest.mark.parametrize("spec", ["whole.py", "whole:app", "./whole.py:app"])
def test_a_change_of_what_is_imported_is_noticed_and_loaded(folder: Path, spec: str) -> None:
    code = Code(spec)
    first = code.load()
    assert vars(first)["value"] == 1 and not code.has_changed()
    change(folder / "not_imported.py", "X = 1")
    assert not code.has_changed()
    change(folder / "part_of_it.py", "VALUE = 2\n")
    assert code.has_changed()
    second = code.load()
    assert vars(second)["value"] == 2 and second is not first and not code.has_changed()


def test_what_cannot_be_loaded_leaves_the_old_modules(folder: Path) -> None:
    code = Code("whole.py")
    code.load()
    old = sys.modules["part_of_it"]
    change(folder / "whole.py", APP.replace("import part_of_it", "import part_of_it, another"))
    with pytest.raises(AppError, match="another"):
        code.load()
    assert sys.modules["part_of_it"] is old and not code.has_changed()
    change(folder / "another.py", "VALUE = (\n")  # any file may be the reason now
    assert code.has_changed()
    with pytest.raises(AppError, match=r"SyntaxError: .* \(another.py, line 1\)$"):
        code.load()
    assert not code.has_changed()
    change(folder / "another.py", "VALUE = 1\n")
    assert code.has_changed()
    code.load()
    assert sys.modules["part_of_it"] is not old


def test_what_is_imported_later_or_away_for_a_moment_is_no_change(folder: Path) -> None:
    code = Code("whole.py")
    code.load()
    import not_imported  # type: ignore[import-not-found]

    assert not_imported.__file__ and not code.has_changed()
    text = (folder / "part_of_it.py").read_text()
    (folder / "part_of_it.py").rename(folder / "saved")  # as an editor does
    assert not code.has_changed()
    (folder / "saved").rename(folder / "part_of_it.py")
    assert not code.has_changed() and text
    change(folder / "not_imported.py", "X = 2")
    assert code.has_changed()


TYPED = """
from __future__ import annotations
from dataclasses import dataclass
from enum import Enum
from tidegate import Tidegate
app = Tidegate()
@dataclass
class Receipt:
    total: int
class Size(Enum):
    SMALL = "small"
async def charge() -> Receipt: ...
async def measure() -> list[Size]: ...
"""


def test_results_come_back_as_the_classes_of_the_code_that_is_loaded(folder: Path) -> None:
    """The code of a function that was loaded again equals that of before; what its annotations mean does not."""
    code = Code("typed_app.py")
    for text in (TYPED, f"{TYPED}# changed\n"):
        change(folder / "typed_app.py", text)
        code.load()
        module = sys.modules["typed_app"]
        receipt, sizes = result_rule(module.charge), result_rule(module.measure)
        assert receipt is not None and type(receipt.restored({"total": 1})) is module.Receipt
        assert sizes is not None and sizes.restored(["small"]) == [module.Size.SMALL]
        assert result_rule(module.charge) is receipt, "it is found once"


def test_lines(capsys: pytest.CaptureFixture[str]) -> None:
    run_id, at = uuid.uuid4(), utc_now() + timedelta(seconds=5)
    fields = {"run_id": run_id, "workflow": "fulfil", "step": "charge", "reason": "OSError: no", "next_attempt_at": at}
    assert line_of("step.failed", fields) == (
        f"run   {run_id} step charge failed, again at {at.astimezone():%H:%M:%S}: fulfil: OSError: no"
    )
    later = line_of("event.held", {"event_id": "e", "next_attempt_at": at + timedelta(days=3), "reason": "paused"})
    assert later == f"event e held until {(at + timedelta(days=3)).astimezone():%Y-%m-%d %H:%M}: paused"
    assert line_of("run.failed", {"run_id": "r", "workflow": "w"}) == "run   r failed: w: -"
    assert line_of("worker.started", {}) is None
    assert show("run.succeeded", {"run_id": "r", "workflow": "w"}) and show("run.started", {})
    assert not show("store.connections_replaced", {})
    assert capsys.readouterr().out.endswith("run   r finished: w\n")
