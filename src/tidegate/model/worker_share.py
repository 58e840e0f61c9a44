"""Which runs a worker takes: those of some workflows only, and slots that are reserved for some."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from tidegate.errors import SettingsError


class WorkerShare(NamedTuple):
    """`only`: the workflows whose runs a worker takes (empty: all whose code it has). `reserved`: slots, by workflow,
    that no other workflow may use."""

    only: Sequence[str] = ()
    reserved: Mapping[str, int] = MappingProxyType({})

    @classmethod
    def of(cls, only: str, reserve: str) -> WorkerShare:
        """As the settings say it."""
        return cls(parse_only(only), parse_reserve(reserve))

    def takes(self, workflow: str) -> bool:
        """Whether a worker takes runs of the workflow."""
        return not self.only or workflow in self.only

    def left_out(self, workflows: Iterable[str]) -> list[str]:
        """Those of the workflows whose runs it does not take."""
        return sorted(workflow for workflow in workflows if not self.takes(workflow))

    def check(self, workflows: Iterable[str], concurrency: int) -> None:
        """SettingsError unless the worker has all that is named, and slots for all that it takes."""
        known = set(workflows)
        for option, names in (("--only", self.only), ("--reserve", self.reserved)):
            unknown = sorted(set(names) - known)
            if unknown:
                has = ", ".join(sorted(known)) or "none"
                raise SettingsError(
                    f"{option} names {unknown[0]!r}, which is no workflow of this worker; it has: {has}"
                )
        for name in self.reserved:
            if not self.takes(name):
                raise SettingsError(f"--reserve keeps slots for {name!r}, which --only leaves out: name it in both")
        total = sum(self.reserved.values())
        if total > concurrency:
            raise SettingsError(f"--reserve keeps {total} slots, but the worker has {concurrency} (--concurrency)")
        others = sorted(name for name in known - set(self.reserved) if self.takes(name))
        if total == concurrency and others:
            raise SettingsError(
                f"--reserve keeps all {total} slots, so {others[0]!r} could never run: leave it a slot, or leave it "
                "out with --only"
            )


def parse_only(text: str) -> tuple[str, ...]:
    """The workflows in `a,b`. ValueError says what was expected."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names and text:
        raise ValueError(f"expected workflows such as fulfil,report, not {text!r}")
    return names


def parse_reserve(text: str) -> dict[str, int]:
    """The slots in `fulfil=4,report=2`. ValueError says what was expected."""
    found: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, count = (piece.strip() for piece in part.partition("="))
        if not name or not count.isascii() or not count.isdecimal() or not 1 <= int(count) <= 1000:
            raise ValueError(f"expected a workflow and its slots such as fulfil=4, not {part!r}")
        if name in found:
            raise ValueError(f"names {name!r} twice in {text!r}")
        found[name] = int(count)
    return found


ALL = WorkerShare()


class ReservedSlots(NamedTuple):
    """The slots of a worker: some are reserved for a workflow each, the others are for all."""

    concurrency: int
    reserved: Mapping[str, int] = MappingProxyType({})

    def shared_free(self, used: Mapping[str, int]) -> int:
        """How many of the slots that are for all are free, while workflows use so many."""
        beyond = sum(max(0, count - self.reserved.get(name, 0)) for name, count in used.items())
        return max(0, self.concurrency - sum(self.reserved.values()) - beyond)

    def own_free(self, workflow: str, used: Mapping[str, int]) -> int:
        """How many of the slots that are reserved for the workflow are free."""
        return max(0, self.reserved.get(workflow, 0) - used.get(workflow, 0))

    def may_begin(self, workflow: str, used: Mapping[str, int]) -> bool:
        """Whether a run of the workflow may have a slot."""
        return self.own_free(workflow, used) > 0 or self.shared_free(used) > 0
