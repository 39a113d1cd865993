"""What `accelerate` did to each module, and why not to the others: records and their print."""

from __future__ import annotations

import re
from typing import NamedTuple


class ModuleOutcome(NamedTuple):
    """A module: `op` says what runs it now; without one, `reason` says why it was left alone."""

    name: str
    module: str  # its class
    op: str | None
    reason: str


class Outcomes(NamedTuple):
    """Every module of interest. `print(table)` shows modules of one kind in one line."""

    rows: tuple[ModuleOutcome, ...]

    @property
    def replaced(self) -> tuple[ModuleOutcome, ...]:
        """The modules that ops run now."""
        return tuple(row for row in self.rows if row.op is not None)

    @property
    def left_alone(self) -> tuple[ModuleOutcome, ...]:
        """The others, with reasons."""
        return tuple(row for row in self.rows if row.op is None)

    def __str__(self) -> str:
        kinds: dict[tuple[str, str, str | None, str], int] = {}
        for row in self.rows:
            key = (re.sub(r"\b\d+\b", "*", row.name), row.module, row.op, row.reason)
            kinds[key] = kinds.get(key, 0) + 1
        lines = [("modules", "class", "count", "runs by")]
        for (name, module, op, reason), count in kinds.items():
            how = f"left alone: {reason}" if op is None else f"{op} ({reason})" if reason else op
            lines.append((name or "(the model)", module, str(count), how))
        widths = [max(len(line[column]) for line in lines) for column in range(3)]
        return "\n".join(
            "  ".join((*(part.ljust(w) for part, w in zip(line, widths, strict=False)), line[3]))
            for line in lines
        )
