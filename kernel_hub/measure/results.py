"""Benchmark rows: one a measurement, written as JSON with what is needed to repeat them."""

from __future__ import annotations

import json
import platform
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "cupy-cuda13x",
    "cuda-core",
    "apache-tvm-ffi",
    "flashinfer-python",
    "liger-kernel",
)


@dataclass(frozen=True)
class ResultRow:
    """One contender in one case. `ratio` is its median over that of `ratio_to` in the same run.

    note: what else there is to say, as which variant ran; not written where there is none.
    """

    family: str
    case: str
    contender: str
    median: float
    p20: float
    p80: float
    unit: str
    ratio: float | None = None
    ratio_to: str | None = None
    note: str = ""


def summarise(
    family: str, case: str, samples: Mapping[str, Sequence[float]], unit: str, *, ratio_to: str
) -> list[ResultRow]:
    """Rows of all contenders of a case, each beside `ratio_to` where that one was measured."""
    base = statistics.median(samples[ratio_to]) if ratio_to in samples else None
    rows = []
    for contender, values in samples.items():
        ordered = sorted(values)
        median = statistics.median(ordered)
        rows.append(
            ResultRow(
                family,
                case,
                contender,
                median,
                ordered[int(0.2 * (len(ordered) - 1))],
                ordered[int(0.8 * (len(ordered) - 1))],
                unit,
                median / base if base else None,
                ratio_to if base else None,
            )
        )
    return rows


def environment() -> dict[str, Any]:
    """GPU, driver and versions of this process."""
    from .. import driver

    cuda = driver.get()
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "gpu": cuda.device_name(0),
        "driver": f"CUDA {cuda.version // 1000}.{cuda.version % 1000 // 10}{_kernel_module()}",
        "versions": versions,
        "command": " ".join(["python", *sys.argv]),
    }


def _kernel_module() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    numbers = [word for word in text.split() if word.count(".") == 2 and word[0].isdigit()]
    return f" ({numbers[0]})" if numbers else ""


def write(path: Path, rows: Iterable[ResultRow]) -> None:
    """Write their environment, once, and `rows` to `path` as JSON: the names of what a row has,
    then each row's values in that order on a line, numbers in seven digits."""
    names = [each.name for each in fields(ResultRow)]
    lines = []
    for row in rows:
        values = [_rounded(getattr(row, name)) for name in names]
        lines.append(json.dumps(values if row.note else values[:-1]))
    path.parent.mkdir(parents=True, exist_ok=True)
    head = f'"about": {json.dumps(environment())},\n"columns": {json.dumps(names)}'
    path.write_text(f'{{{head},\n"rows": [\n' + ",\n".join(lines) + "\n]}\n")


def _rounded(value: Any) -> Any:
    return float(f"{value:.7g}") if isinstance(value, float) else value


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that `write` made, each with the environment; `.xz`: one packed since."""
    raw = path.read_bytes()
    if path.suffix == ".xz":
        import lzma  # Some Pythons are built without it.

        raw = lzma.decompress(raw)
    found = json.loads(raw)
    # A row has no note where there is none.
    rows = (dict(zip(found["columns"], row, strict=False)) for row in found["rows"])
    return [{**found["about"], **row} for row in rows]


def table(rows: Iterable[ResultRow]) -> str:
    """The rows as aligned text."""
    cells: list[tuple[str, ...]] = [("case", "contender", "median", "p20", "p80", "unit", "ratio")]
    for row in rows:
        ratio = f"{row.ratio:.2f} x {row.ratio_to}" if row.ratio is not None else ""
        cells.append(
            (
                row.case,
                row.contender,
                *(f"{v:.4g}" for v in (row.median, row.p20, row.p80)),
                row.unit,
                ratio,
            )
        )
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )
