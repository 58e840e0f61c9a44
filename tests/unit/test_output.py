"""Tables of commands: every value is there whole, however narrow the terminal is."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from tidegate.cli.output import table_lines

COLUMNS = ("ID", "TRIGGER", "RUN", "STATUS", "WHY")
ID, RUN = "01a1e332-e633-7000-928a-af51d29cb606", "01a1e332-e633-7001-930a-1f8e0d570018"
ROWS = (
    (ID, "fulfil/code", RUN, "launched", ""),
    (ID, "boom/code", "", "paused", "paused by ann: until the printer has been mended, which may take a week or two"),
)


def test_piped_a_row_is_one_line() -> None:
    heading, first, second = table_lines(COLUMNS, ROWS, None)
    assert len(heading) == len(first) == len(second) == 1
    assert second[0].index("paused") == first[0].index("launched") == heading[0].index("STATUS")


def test_a_table_that_fits_is_the_same_on_a_terminal() -> None:
    assert table_lines(COLUMNS, ROWS, 200) == table_lines(COLUMNS, ROWS, None)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 132])
def test_on_a_narrow_terminal_nothing_is_cut(width: int) -> None:
    rows = table_lines(COLUMNS, ROWS, width)
    for lines, cells in zip(rows, (COLUMNS, *ROWS), strict=True):
        assert all(cell_len(line) <= width for line in lines)
        told = " ".join(" ".join(lines).split())
        assert all(cell in told for cell in cells)
        assert lines == [lines[0], *(line for line in lines[1:] if line.startswith("  ") and line.strip())]


def test_at_80_columns() -> None:
    assert table_lines(COLUMNS, ROWS[:1], 80) == [
        ["ID                                    TRIGGER", "  RUN                                   STATUS    WHY"],
        [f"{ID}  fulfil/code", f"  {RUN}  launched"],
    ]


def test_wide_characters_take_two_places() -> None:
    heading, row = table_lines(("NAME", "STATUS"), [("\u5de5\u5834", "open")], 80)
    assert cell_len(row[0].partition("open")[0]) == heading[0].index("STATUS")
