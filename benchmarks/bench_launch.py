"""What a launch costs on this GPU beside a C loop and the launchers that are installed.

Writes benchmarks/results/<gpu>_launch.json and prints the table; `kernel-hub bench` is the same
measurement with a plot.
"""

from __future__ import annotations

import sys

from harness import Report, arguments

from kernel_hub.measure import launch, results


def main() -> int:
    """Measure, write, print."""
    options = arguments(__doc__, rounds=60, quick={"rounds": 15})  # of 300 launches each
    report = Report("launch", options)
    report.rows += launch.run(options.rounds, lambda text: print(text, file=sys.stderr, flush=True))
    report.rows += launch.import_milliseconds()
    report.write()
    print(results.table(report.rows))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
