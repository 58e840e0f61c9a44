"""A soak as pictures, made from the file alone: `.venv/others/bin/python -m bench.soak_plots [FILE]`.

They are written beside the file, under its name: `soak-rates.png` and so on. The thirds that are compared are marked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
from matplotlib import pyplot

from bench.plots import FLOOR, MET, MISSED, OURS, THEIRS

SOAK = Path(__file__).parent / "results" / "soak.json"
PARTS = {"days": OURS, "live": MET, "default": MISSED, "external_ids": FLOOR, "other": THEIRS}
PROCESSES = {"api": OURS, "worker": MET, "postgres": FLOOR}

Line = tuple[str, str, list[float], list[float]]


def main() -> None:
    pyplot.switch_backend("agg")  # draws files, wants no screen
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else SOAK
    found = msgspec.json.decode(path.read_bytes())
    pictures: dict[str, Callable[[list[Any]], list[tuple[str, list[Line]]]]] = {
        "rates": rates, "latencies": latencies, "sizes": sizes, "processes": processes,
    }  # fmt: skip
    for name, panels in pictures.items():
        figure = _draw(panels(found["samples"]), found["samples"][-1]["at"])
        figure.suptitle(_title(found), fontsize=8, color="#666666", y=0.995)
        figure.tight_layout()
        figure.savefig(path.with_name(f"{path.stem}-{name}.png"), dpi=100)
        pyplot.close(figure)


def rates(samples: list[Any]) -> list[tuple[str, list[Line]]]:
    """How many a second, and how much was written to the server's log."""
    colours = {"accepted": THEIRS, "launched": FLOOR, "succeeded": OURS}
    wal = _rate("log", OURS, samples, lambda s: s["wal_bytes"] / 1e6)
    return [
        ("events per second", [_rate(name, colours[name], samples, itemgetter(name)) for name in colours]),
        ("MB per second to the server's log", [wal]),
    ]


def latencies(samples: list[Any]) -> list[tuple[str, list[Line]]]:
    """Of the events that were sent since the sample before."""
    found = []
    for part, title in (("publish", "publish until answered, ms"), ("start", "publish until the first line, ms")):
        taken = [s for s in samples if s[part]]
        at = [s["at"] / 60 for s in taken]
        found.append(
            (
                title,
                [
                    (p, colour, at, [s[part][f"{p}_ms"] for s in taken])
                    for p, colour in (("p50", OURS), ("p99", THEIRS))
                ],
            )
        )
    return found


def sizes(samples: list[Any]) -> list[tuple[str, list[Line]]]:
    """Tables with their indexes, and how many days are stored."""

    def mb(sample: Any, part: str) -> float:
        size = sample["sizes"].get(part)
        return (size["table_bytes"] + size["index_bytes"]) / 1e6 if size else 0.0

    at = [s["at"] / 60 for s in samples]
    total = ("all", "black", at, [sum(mb(s, part) for part in PARTS) for s in samples])
    parts = [(part, colour, at, [mb(s, part) for s in samples]) for part, colour in PARTS.items()]
    return [
        ("size of tables and indexes, MB", [total, *parts]),
        ("days that have partitions", [("days", OURS, at, [float(s["days_stored"]) for s in samples])]),
    ]


def processes(samples: list[Any]) -> list[tuple[str, list[Line]]]:
    """Memory and open files; of Postgres the memory that its processes do not share."""
    found = []
    for field, title in (("memory_mb", "memory, MB"), ("open_files", "open files")):
        lines = []
        for name, colour in PROCESSES.items():
            known = [s for s in samples if s["processes"][name][field] is not None]
            lines.append((name, colour, [s["at"] / 60 for s in known], [s["processes"][name][field] for s in known]))
        found.append((title, lines))
    return found


def _rate(name: str, colour: str, samples: list[Any], count: Callable[[Any], float]) -> Line:
    pairs = list(pairwise(samples))
    at = [later["at"] / 60 for _, later in pairs]
    return name, colour, at, [(count(b) - count(a)) / (b["at"] - a["at"]) for a, b in pairs]


def _draw(panels: list[tuple[str, list[Line]]], seconds: float) -> Any:
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(8, 2.6 * len(panels)), squeeze=False)
    for (title, lines), axis in zip(panels, axes[:, 0], strict=True):
        for name, colour, at, values in lines:
            axis.plot(at, values, color=colour, linewidth=1, label=name)
        for third in (1, 2):
            axis.axvline(seconds / 60 * third / 3, color="#cccccc", linewidth=1, linestyle=":")
        axis.set_ylim(bottom=0)
        axis.set_title(title, fontsize=9, loc="left")
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#eeeeee")
        axis.legend(loc="lower right", fontsize=7, ncols=len(lines))
    axes[-1, 0].set_xlabel("minutes; the dotted lines are the thirds that are compared", fontsize=8)
    return figure


def _title(found: dict[str, Any]) -> str:
    about = found["machine"]
    return (
        f"{found['days']} days of {found['day_seconds']:g} s at {found['rate']:g} events/s · {about['cores']} cores, "
        f"{about['processor']}, Postgres {about['postgres']}, Python {about['python']}"
    )


if __name__ == "__main__":
    main()
