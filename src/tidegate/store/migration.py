"""A migration file, and what its first lines declare.

    -- kind: expand          the schema can also be used by code that does not know this migration
    -- kind: contract        removes what older code needs: waits until no process is alive that knows only a schema
    -- needs: 3              version before this one
    -- transaction: no       statements that cannot run in a transaction (`store/online.py`)

A file that declares no kind is an expansion, in one transaction.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

_DECLARATION = re.compile(r"-- (\w+): +(\S+)\s*")
_VALUES = {"kind": r"expand|contract", "needs": r"[1-9]\d*", "transaction": r"no"}


@dataclass(frozen=True)
class Migration:
    """One numbered file."""

    version: int
    name: str
    sql: str

    @cached_property
    def declared(self) -> dict[str, str]:
        """What the first lines declare, by name. ValueError if that cannot be."""
        found: dict[str, str] = {}
        for line in self.sql.splitlines():
            declaration = _DECLARATION.fullmatch(line)
            if declaration is None:
                break
            name, value = declaration.groups()
            if name in found or not re.fullmatch(_VALUES.get(name, ""), value):
                raise ValueError(f"migration {self.name}: `{line}` is not a declaration, or is there twice")
            found[name] = value
        kind, needs = found.get("kind", "expand"), found.get("needs")
        if (kind == "contract") != (needs is not None):
            raise ValueError(f"migration {self.name}: a contraction, and nothing else, declares what it `needs`")
        if kind == "contract" and "transaction" in found:
            raise ValueError(f"migration {self.name}: a contraction is one transaction, with what is recorded of it")
        if needs is not None and int(needs) >= self.version:
            raise ValueError(f"migration {self.name} needs an earlier version than its own, not {needs}")
        return found

    @property
    def kind(self) -> Literal["expand", "contract"]:
        return "contract" if self.declared.get("kind") == "contract" else "expand"

    @property
    def compatible_from(self) -> int:
        """The oldest schema version whose code can use the schema after this migration, as far as it depends on it."""
        return int(self.declared.get("needs", 1))

    @property
    def is_online(self) -> bool:
        """Whether it is not one transaction, but statements that are each repeated after a crash."""
        return "transaction" in self.declared

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()[:16]
