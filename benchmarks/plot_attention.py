"""Draws the prefill rows of benchmarks/results/<gpu>_attention.json. Needs matplotlib."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from kernel_hub.measure import results

RESULTS = Path(__file__).resolve().parent / "results"
CASE = re.compile(r"prefill \d+ x (\d+) h\S+ d(\d+) (full|causal) (bf16|fp16) burst")


def main() -> int:
    """One panel a head_dim and mask, bf16: TFLOP/s over the sequence length."""
    import matplotlib.pyplot as plt

    # Text stays text; the same bytes from the same rows.
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kernel_hub"})
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, nargs="?", default=RESULTS / "h200_attention.json")
    parser.add_argument("--out", type=Path, help="default: the source's name with .svg")
    options = parser.parse_args()
    source, target = options.source, options.out or options.source.with_suffix(".svg")
    panels: dict[tuple[int, str], dict[str, list[tuple[int, float]]]] = {}
    gpu = ""
    for row in results.read(source):
        found = CASE.fullmatch(row["case"])
        if found and found[4] == "bf16":
            gpu = row["gpu"]
            lines = panels.setdefault((int(found[2]), found[3]), {})
            lines.setdefault(row["contender"], []).append((int(found[1]), row["median"]))
    dims = sorted({dim for dim, _ in panels})
    figure, axes = plt.subplots(2, len(dims), figsize=(4 * len(dims), 6), squeeze=False)
    for (dim, mask), lines in panels.items():
        axis: Any = axes[int(mask == "causal")][dims.index(dim)]
        for contender, points in lines.items():
            xs, ys = zip(*sorted(points), strict=True)
            axis.plot(xs, ys, marker="o", label=contender)
        axis.set(title=f"head_dim {dim}, {mask}", ylim=(0, None))
        axis.set_xscale("log", base=2)
        lengths = sorted({x for points in lines.values() for x, _ in points})
        axis.set_xticks(lengths, [f"{x // 1024}k" if x >= 1024 else x for x in lengths])
        axis.set(xlabel="seqlen, 16k tokens in all", ylabel="TFLOP/s")
    figure.suptitle(f"Attention forward, bf16, {gpu}")
    # Below the panels: in one of them it lies on the lines.
    lines, names = axes[0][0].get_legend_handles_labels()
    figure.legend(lines, names, loc="lower center", ncols=len(names), frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(target, metadata={"Date": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
