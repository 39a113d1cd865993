"""Attention on cases drawn by lot, each held against fp64. A script, not a test.

    python tests/gpu_attention_grid.py --cases 2000 --seed 7 [--op forward|backward|decode|all]

--op short: decode steps that are a cluster an item, in clusters of any shape.

Case i of a seed is always the same: a failure prints the command that runs it alone. Ends with what
was covered and the worst error in units of what is allowed; the exit status is 1 where one failed.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import grids

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/ops")]
OPS = ("all", "forward", "backward", "decode", "short")
DECODE_SHARE = 0.3
SHAPES = tuple((warps, blocks) for warps in (4, 8) for blocks in (1, 2, 4, 8))


def draw(op: str, seed: int, index: int) -> Any:
    """Case `index` of a seed."""
    from attention_random import random_case
    from decode_cases import random_decode_case, random_short_case

    generator = random.Random(f"{seed} {index}")
    if op == "short":
        return random_short_case(generator)
    if op == "decode" or (op == "all" and generator.random() < DECODE_SHARE):
        return random_decode_case(generator)
    share = {"forward": 0.0, "backward": 1.0, "all": 0.4}[op]
    while True:
        case = random_case(generator, backward_share=share)
        if case.backward or op != "backward":
            return case


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, run, print."""
    parser = grids.parser(__doc__, OPS)
    parser.add_argument("--portable", action="store_true", help="not Hopper's own forward kernels")
    options = grids.parsed(parser, arguments)
    from attention_cases import Case
    from attention_cases import run as run_attention
    from decode_cases import run_decode

    if options.portable:
        from kernel_hub.ops.attention import forward_sm90
        from kernel_hub.ops.attention.backward import sm90 as backward_sm90

        forward_sm90.is_enabled = backward_sm90.is_enabled = False

    from kernel_hub.ops.core.launch import forget_all
    from kernel_hub.ops.kv_cache import decode_short

    def run(index: int, case: Any) -> float:
        if options.op == "short":
            shapes = SHAPES if case.head_dim <= decode_short.MAX_EIGHT_WARPS else SHAPES[:4]
            shape = random.Random(f"shape {options.seed} {index}").choice(shapes)
            decode_short.shape_for = lambda _: shape
            forget_all()
        return (run_attention if isinstance(case, Case) else run_decode)(case, options.device)

    return grids.main(
        "tests/gpu_attention_grid.py", options,
        lambda index: draw(options.op, options.seed, index), run, " --portable" * options.portable,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
