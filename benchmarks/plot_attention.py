"""Draws the prefill rows of benchmarks/results/<gpu>_attention.json. Needs matplotlib.

python benchmarks/plot_attention.py benchmarks/results/h200_attention.json attention.svg
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

CASE = re.compile(r"prefill \d+ x (\d+) h\S+ d(\d+) (full|causal) (bf16|fp16) burst")


def main() -> int:
    """One panel a head_dim and mask, bf16: TFLOP/s over the sequence length."""
    import matplotlib.pyplot as plt

    source, target = (Path(argument) for argument in sys.argv[1:3])
    panels: dict[tuple[int, str], dict[str, list[tuple[int, float]]]] = {}
    gpu = ""
    for row in json.loads(source.read_text(encoding="utf-8")):
        found = CASE.fullmatch(row["case"])
        if found and found[4] == "bf16":
            gpu = row["gpu"]
            lines = panels.setdefault((int(found[2]), found[3]), {})
            lines.setdefault(row["contender"], []).append((int(found[1]), row["median"]))
    dims = sorted({dim for dim, _ in panels})
    figure, axes = plt.subplots(2, len(dims), figsize=(4 * len(dims), 6), squeeze=False)
    for (dim, mask), lines in panels.items():
        axis: Any = axes[mask == "causal"][dims.index(dim)]
        for contender, points in lines.items():
            xs, ys = zip(*sorted(points), strict=True)
            axis.plot(xs, ys, marker="o", label=contender)
        axis.set(title=f"head_dim {dim}, {mask}", xscale="log", ylim=(0, None))
        axis.set_xscale("log", base=2)
        axis.set(xlabel="seqlen, 16k tokens in all", ylabel="TFLOP/s")
    axes[0][0].legend()
    figure.suptitle(f"Attention forward, bf16, {gpu}")
    figure.tight_layout()
    figure.savefig(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
