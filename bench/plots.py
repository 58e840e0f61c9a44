"""The results as pictures, made from the file alone: `.venv/others/bin/python -m bench.plots [FILE]`.

They are written beside the file, under its name: `latest-rates.png` and so on. What was not measured is left out.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
from matplotlib import pyplot

LATEST = Path(__file__).parent / "results" / "latest.json"
OURS, THEIRS, FLOOR = "#1f6f8b", "#b0b7bd", "#d9a441"
MET, MISSED = "#2e8b57", "#c0392b"

# The sides of the figure `runs`, with what they are called and their colour.
_RUNS = {
    "floor": ("plain SQL, batches of 500", FLOOR),
    "tidegate": ("Tidegate", OURS),
    "tidegate_bullmq": ("Tidegate, queue bullmq", OURS),
    "pgqueuer": ("pgqueuer", THEIRS),
    "procrastinate": ("procrastinate", THEIRS),
    "bullmq": ("BullMQ, flushed once a second", THEIRS),
}


def main() -> None:
    pyplot.switch_backend("agg")  # draws files, wants no screen
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else LATEST
    found = msgspec.json.decode(path.read_bytes())
    for name, draw in {"rates": rates, "ratios": ratios, "latencies": latencies, "limit": limit}.items():
        target = path.with_name(f"{path.stem}-{name}.png")
        target.unlink(missing_ok=True)
        figure = draw(found)
        if figure is not None:
            figure.suptitle(_title(found), fontsize=8, color="#666666", y=0.995)
            figure.tight_layout()
            figure.savefig(target, dpi=100)
            pyplot.close(figure)


def rates(found: dict[str, Any]) -> Any:
    """What comes through in a second: the medians, and from the slowest turn to the fastest."""
    panels = []
    if launched := found["throughput"]:
        sides = [("plain SQL, batches of 500", FLOOR, launched["floor"]), ("Tidegate", OURS, launched["pipeline"])]
        panels.append(("publish until launched, events/s", sides))
    if runs := found["runs"]:
        sides = [(name, colour, runs[side]) for side, (name, colour) in _RUNS.items() if runs[side]]
        panels.append(("publish until succeeded (others: enqueue until handled), runs/s", sides))
    if not panels:
        return None
    heights = [len(sides) for _, sides in panels]
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(8, 1.4 + 0.45 * sum(heights)), squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for (title, sides), axis in zip(panels, axes[:, 0], strict=True):
        middle = [side["per_second"] for _, _, side in sides]
        spread = [
            [at - min(side["turns"]) for at, (_, _, side) in zip(middle, sides, strict=True)],
            [max(side["turns"]) - at for at, (_, _, side) in zip(middle, sides, strict=True)],
        ]
        bars = axis.barh([n for n, _, _ in sides], middle, xerr=spread, color=[c for _, c, _ in sides], capsize=3)
        axis.bar_label(bars, labels=[f"{value:,.0f}" for value in middle], padding=4, fontsize=8)
        axis.invert_yaxis()  # the first one on top
        axis.margins(x=0.12)
        _tidy(axis, title)
    return figure


def ratios(found: dict[str, Any]) -> Any:
    """The aims as shares of what is wanted: a bar that reaches the line is met. Where less is better, the share is
    upside down, so that longer is better everywhere."""
    aims = [aim for aim in found["aims"] if aim["wanted"] and aim["found"]]
    if not aims:
        return None
    shares = [aim["found"] / aim["wanted"] if aim["is_at_least"] else aim["wanted"] / aim["found"] for aim in aims]
    names = [
        f"{a['name']}\n{a['found']:g}, {'at least' if a['is_at_least'] else 'at most'} {a['wanted']:g}" for a in aims
    ]
    figure, axis = pyplot.subplots(figsize=(8, 0.8 + 0.42 * len(aims)))
    colours = [MET if aim["is_met"] else MISSED for aim in aims]
    bars = axis.barh(names, [min(share, 2) for share in shares], color=colours, height=0.6)
    axis.bar_label(bars, labels=[f"{share:.2f}" for share in shares], padding=4, fontsize=7)
    axis.axvline(1, color="black", linewidth=1)
    axis.set_xlim(0, 2.2)
    axis.set_ylim(len(aims) - 0.5, -0.5)
    _tidy(axis, "what was reached of each aim (1 is the aim; longer is better; cut at 2)")
    axis.tick_params(axis="y", labelsize=7)
    return figure


def latencies(found: dict[str, Any]) -> Any:
    """The median and the 99th percentile, on a logarithmic scale."""
    started = (found["start"] or [{}])[-1]
    known = {
        "one commit": found["commit"],
        "one step": (found["step_overhead"] or {}).get("latency"),
        "single POST at 50/s": started.get("answered"),
        "publish to start at 50/s": started.get("latency"),
        "single POST, 64 connections": (found["single"] or {}).get("latency"),
    }
    taken = {name: latency for name, latency in known.items() if latency}
    if not taken:
        return None
    figure, axis = pyplot.subplots(figsize=(8, 1.2 + 0.6 * len(taken)))
    for number, (part, colour) in enumerate((("p50_ms", OURS), ("p99_ms", THEIRS))):
        values = [latency[part] for latency in taken.values()]
        places = [place + 0.38 * number for place in range(len(taken))]
        bars = axis.barh(places, values, height=0.36, color=colour, label=part.removesuffix("_ms"))
        axis.bar_label(bars, labels=[f"{value:.2f} ms" for value in values], padding=4, fontsize=8)
    axis.set_yticks([place + 0.19 for place in range(len(taken))], list(taken))
    axis.set_xscale("log")
    axis.set_xlim(right=3 * max(latency["p99_ms"] for latency in taken.values()))
    axis.legend(loc="upper right", fontsize=8)
    axis.invert_yaxis()
    _tidy(axis, "latency, milliseconds")
    return figure


def limit(found: dict[str, Any]) -> Any:
    """Launches in each second under a limit, with several workers."""
    kept = found["limit"]
    if not kept:
        return None
    figure, axis = pyplot.subplots(figsize=(8, 3))
    axis.bar(range(len(kept["launches"])), kept["launches"], color=OURS, width=0.8)
    axis.axhline(kept["limit"], color=MISSED, linewidth=1, label=f"limit: {kept['limit']}")
    axis.set_xticks(range(len(kept["launches"])))
    axis.set_ylim(0, kept["limit"] * 1.25)
    axis.legend(loc="upper right", fontsize=8)
    axis.set_xlabel("seconds since the first launch; the last one is not whole", fontsize=8)
    _tidy(axis, f"launches in each second, {kept['workers']} workers, {kept['use']:.1%} of the allowance used")
    axis.grid(axis="x", visible=False)
    return figure


def _tidy(axis: Any, title: str) -> None:
    axis.set_title(title, fontsize=9, loc="left")
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_axisbelow(True)
    axis.grid(axis="x", color="#eeeeee")


def _title(found: dict[str, Any]) -> str:
    about = found["machine"]
    quick = " · QUICK: the numbers mean nothing" if found["quick"] else ""
    return (
        f"{about['cores']} cores, {about['processor']}, Postgres {about['postgres']}, Python {about['python']}{quick}"
    )


if __name__ == "__main__":
    main()
