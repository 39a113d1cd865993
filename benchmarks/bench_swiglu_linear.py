"""swiglu_linear against cuBLAS and a fused SwiGLU on the gate and up weights of Llama 8B and 70B.

Peers: torch.matmul, then silu(gate) * up by torch.compile (the target is 1.1 x that), or by our
silu_and_mul. Timed as bench_linear.py does.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence

import torch
from bench_linear import QUICK, sound_products
from harness import OURS, Inputs, Launch, Report, compiled, plan_of, product_arguments, replays

from kernel_hub.ops import silu_and_mul, swiglu_linear
from kernel_hub.testing.compare import compare

OP = "swiglu_linear"
PEER = "cuBLAS + torch.compile"
# name -> (rows of gate and up, k)
SHAPES = {"8B": (28672, 4096), "70B": (57344, 8192)}
Set = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def joined(product: torch.Tensor) -> torch.Tensor:
    gate, up = product.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def wrong(inputs: Set) -> str:
    """'' or what is wrong with our output, on up to 256 rows and the last 256 columns."""
    a, b, _ = inputs
    out = swiglu_linear(a, b)
    rows, columns = a[:256], [half[-256:] for half in b.chunk(2)]
    gate, up = (rows.double() @ half.double().T for half in columns)
    truth = torch.nn.functional.silu(gate) * up
    gate, up = (rows @ half.T for half in columns)
    result = compare(out[:256, -256:], truth, torch.nn.functional.silu(gate) * up)
    return "" if result.ok else result.message


def contenders(ss: Sequence[Set], wanted: Sequence[str]) -> dict[str, list[Launch]]:
    """`ss`: a, b and a place for the product."""
    outs = [torch.empty_like(product.chunk(2, dim=-1)[0]) for _, _, product in ss]

    def two(
        join: Callable[..., object], a: torch.Tensor, b: torch.Tensor, to: torch.Tensor
    ) -> None:
        join(torch.matmul(a, b.T, out=to))

    made: dict[str, list[Launch]] = {
        OURS: [
            functools.partial(swiglu_linear, a, b, out=out)
            for (a, b, _), out in zip(ss, outs, strict=True)
        ],
        "cuBLAS + silu_and_mul": [functools.partial(two, silu_and_mul, *s) for s in ss],
    }
    if "torch.compile" in wanted:
        join = compiled(joined)
        made[PEER] = [functools.partial(two, join, *s) for s in ss]
    return made


def run(options: argparse.Namespace, inputs: Inputs) -> int:
    report = Report(OP, options)
    for name, m, n, k, ss in sound_products(report, options, SHAPES, inputs.sets, wrong):
        found = contenders(ss, options.peers)
        samples = replays(found, *plan_of(m, n, k, options.rounds))
        case = f"{name} gate_up {n}x{k} m{m}"
        base = PEER if PEER in samples else "cuBLAS + silu_and_mul"
        report.product(case, samples, base, m, 2 * m * n * k)
    report.write()
    return report.finish()


def main() -> int:
    """Measure, write, print."""
    options = product_arguments(__doc__, QUICK, SHAPES, peers="torch.compile")
    return run(options, Inputs(options.torch_dtype))


if __name__ == "__main__":
    sys.exit(main())
