"""What a launch costs on this GPU beside a C loop and the launchers that are installed.

Writes benchmarks/results/<gpu>_launch.json and prints the table; `kernel-hub bench` is the same
measurement with a plot.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from kernel_hub import KernelHubError
from kernel_hub.measure import launch, results

RESULTS = Path(__file__).resolve().parent / "results"


def gpu_token(name: str) -> str:
    """'NVIDIA H200' -> 'h200'."""
    words = re.findall(r"[a-z0-9]+", name.lower().removeprefix("nvidia"))
    return "_".join(words) or "gpu"


def main() -> int:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="of 300 launches each (default 60)")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<gpu>_launch.json")
    args = parser.parse_args()
    try:
        about = results.environment()
    except KernelHubError as error:
        print(f"needs an NVIDIA GPU: {error}", file=sys.stderr)
        return 1
    rows = launch.run(args.rounds, lambda text: print(text, file=sys.stderr, flush=True))
    rows += launch.import_milliseconds()
    out = args.out or RESULTS / f"{gpu_token(about['gpu'])}_launch.json"
    results.write(out, rows)
    print(results.table(rows))
    print(f"{about['gpu']}, driver {about['driver']}; wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
