"""The map in `tidegate.flow` names every room and module, and nothing that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tidegate.flow

FOLDER = Path(tidegate.flow.__file__).parent
MAP = tidegate.flow.__doc__ or ""
ROOMS = sorted(path.parent.name for path in FOLDER.glob("*/__init__.py"))


def modules_on_the_map(room: str) -> list[str]:
    found = re.search(rf"^{room}: .*?(?=^\w+: |\Z)", MAP, re.MULTILINE | re.DOTALL)
    assert found is not None, f"{room} is not on the map"
    return re.findall(r"^    (\w+)  ", found[0], re.MULTILINE)


@pytest.mark.parametrize("room", ROOMS)
def test_the_map_names_every_module_of_a_room(room: str) -> None:
    files = {path.stem for path in (FOLDER / room).glob("*.py")} - {"__init__"}
    assert sorted(modules_on_the_map(room)) == sorted(files)


def test_the_map_names_the_modules_beside_the_rooms() -> None:
    beside = {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}
    assert beside and all(f"`{name}`" in MAP for name in beside)
    assert sorted(re.findall(r"^([a-z]+): ", MAP, re.MULTILINE)) == ROOMS
