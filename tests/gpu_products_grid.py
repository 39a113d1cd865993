"""Products on cases drawn by lot, each held against fp64. A script, not a test.

    python tests/gpu_products_grid.py --cases 1000 --seed 7 [--op linear] [--variants 20]

Outputs are poisoned and lie between guards; every launch runs twice, for the same bits. Case i of a
seed is always the same: a failure prints the command that runs it alone. Ends with what was covered
and the worst error in units of what is allowed; the exit status is 1 where one failed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import grids

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/ops")]


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, run, print."""
    from product_cases import MOST, OPS, draw

    parser = grids.parser(__doc__, ("all", *OPS))
    parser.add_argument("--most", type=int, default=MOST, help="rows, columns and k at the most")
    parser.add_argument(
        "--variants", type=int, default=0, metavar="N",
        help="with every variant of the plan, one case in N",
    )  # fmt: skip
    options = grids.parsed(parser, arguments)
    from product_runs import run_product

    def run(index: int, case: Any) -> float:
        every = options.variants > 0 and index % options.variants == 0
        return run_product(case, options.device, every)

    return grids.main(
        "tests/gpu_products_grid.py", options,
        lambda index: draw(options.op, (options.seed, index), most=options.most), run,
        f" --most {options.most} --variants {options.variants}",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
