"""A list that was cut says so, beside what a program reads."""

from __future__ import annotations

import pytest

from tidegate.cli.output import print_table

ROWS = [("a", "1"), ("b", "2")]


@pytest.mark.parametrize(
    ("page", "told"), [(None, False), ({"next_cursor": None}, False), ({"next_cursor": "x"}, True)]
)
def test_a_list_that_was_cut_says_so(
    capsys: pytest.CaptureFixture[str], page: dict[str, str | None] | None, told: bool
) -> None:
    print_table(("NAME", "N"), ROWS, "None.", page)
    output = capsys.readouterr()
    assert output.out.splitlines() == ["NAME  N", "a     1", "b     2"]
    assert ("more than these 2 exist: use --limit" in output.err) == told
