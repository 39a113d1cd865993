"""Draws benchmarks/results/<gpu>_sweep_linear_s<seed>.json: ours and cuBLAS over the number of
rows, a panel a weight. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from kernel_hub.measure import results

CASE = re.compile(r"(\d+x\d+) m(\d+) \w+")
Lines = dict[str, list[tuple[int, float]]]


def panels(rows: list[dict[str, Any]]) -> dict[str, Lines]:
    """Weight -> contender -> (m, microseconds), ascending."""
    found: dict[str, Lines] = {}
    for row in rows:
        if case := CASE.fullmatch(row["case"]):
            lines = found.setdefault(case[1], {})
            lines.setdefault(row["contender"], []).append((int(case[2]), row["median"]))
    return {
        weight: {name: sorted(x) for name, x in lines.items()} for weight, lines in found.items()
    }


def main(argv: list[str] | None = None) -> int:
    """One picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("--out", type=Path, help="default: the source's name with .svg")
    options = parser.parse_args(argv)
    rows = results.read(options.source)
    found = panels(rows)
    if not found:
        sys.exit(f"{options.source} has no rows of a sweep")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(found), 1, figsize=(10, 3.2 * len(found)), squeeze=False)
    for axis, (weight, lines) in zip(axes[:, 0], found.items(), strict=True):
        for contender, points in lines.items():
            xs, ys = zip(*points, strict=True)
            axis.plot(xs, ys, linewidth=1, label=contender)
        axis.set(title=weight, xlim=(0, None), ylim=(0, None), ylabel="us")
        axis.grid(alpha=0.3)
    axes[0][0].legend()
    axes[-1][0].set(xlabel="rows (m)")
    figure.suptitle(f"linear, bf16, {rows[0]['gpu']}")
    figure.tight_layout()
    figure.savefig(options.out or options.source.with_suffix(".svg"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
