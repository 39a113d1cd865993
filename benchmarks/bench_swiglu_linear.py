"""swiglu_linear against cuBLAS and a fused SwiGLU on the gate and up weights of Llama 8B and 70B.

Peers: torch.matmul, then silu(gate) * up by torch.compile (the target is 1.1 x that), or by our
silu_and_mul. Timed as bench_linear.py does. --activation gelu_tanh: `gated_linear` by it, also on
the weights of Gemma 2 9B.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence

import torch
from bench_linear import QUICK, sound_products
from harness import OURS, Inputs, Launch, Report, compiled, plan_of, product_arguments, replays

from kernel_hub.ops import gated_linear, gelu_and_mul, silu_and_mul, swiglu_linear
from kernel_hub.testing import reference
from kernel_hub.testing.compare import compare

PEER = "cuBLAS + torch.compile"
# name -> (rows of gate and up, k)
SHAPES = {"8B": (28672, 4096), "70B": (57344, 8192), "9B": (28672, 3584)}
Set = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# Activation -> (the op, its name, what joins a product's halves)
GATES: dict[str, tuple[Callable[..., torch.Tensor], str, Callable[..., torch.Tensor]]] = {
    "silu": (swiglu_linear, "silu_and_mul", silu_and_mul),
    **{
        name: (
            functools.partial(gated_linear, activation=name), "gelu_and_mul",
            functools.partial(gelu_and_mul, approximate=form),
        )
        for name, form in (("gelu", "none"), ("gelu_tanh", "tanh"))
    },
}  # fmt: skip


def joined(product: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = product.chunk(2, dim=-1)
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    form = "tanh" if activation == "gelu_tanh" else "none"
    return torch.nn.functional.gelu(gate, approximate=form) * up


def wrong(inputs: Set, activation: str) -> str:
    """'' or what is wrong with our output, on up to 256 rows and the last 256 columns."""
    a, b, _ = inputs
    out = GATES[activation][0](a, b)
    rows, columns = a[:256], torch.cat([half[-256:] for half in b.chunk(2)])
    truth, own = (
        reference.gated_linear(rows, columns, activation, dtype=to)
        for to in (torch.double, a.dtype)
    )
    result = compare(out[:256, -256:], truth, own)
    return "" if result.ok else result.message


def contenders(
    ss: Sequence[Set], wanted: Sequence[str], activation: str
) -> dict[str, list[Launch]]:
    """`ss`: a, b and a place for the product."""
    own, name, then = GATES[activation]
    outs = [torch.empty_like(product.chunk(2, dim=-1)[0]) for _, _, product in ss]

    def two(
        join: Callable[..., object], a: torch.Tensor, b: torch.Tensor, to: torch.Tensor
    ) -> None:
        join(torch.matmul(a, b.T, out=to))

    made: dict[str, list[Launch]] = {
        OURS: [
            functools.partial(own, a, b, out=out) for (a, b, _), out in zip(ss, outs, strict=True)
        ],
        f"cuBLAS + {name}": [functools.partial(two, then, *s) for s in ss],
    }
    if "torch.compile" in wanted:
        join = compiled(functools.partial(joined, activation=activation))
        made[PEER] = [functools.partial(two, join, *s) for s in ss]
    return made


def run(options: argparse.Namespace, inputs: Inputs) -> int:
    activation = options.activation
    report = Report("swiglu_linear" if activation == "silu" else "gated_linear", options)
    check = functools.partial(wrong, activation=activation)
    for name, m, n, k, ss in sound_products(report, options, SHAPES, inputs.sets, check):
        found = contenders(ss, options.peers, activation)
        samples = replays(found, *plan_of(m, n, k, options.rounds))
        case = f"{name} gate_up {n}x{k} m{m}"
        base = PEER if PEER in samples else f"cuBLAS + {GATES[activation][1]}"
        report.product(case, samples, base, m, 2 * m * n * k)
    return report.done()


def main() -> int:
    """Measure, write, print."""
    options = product_arguments(
        __doc__, QUICK, SHAPES, peers="torch.compile",
        more=lambda parser: parser.add_argument("--activation", choices=GATES, default="silu"),
    )  # fmt: skip
    return run(options, Inputs(options.torch_dtype))


if __name__ == "__main__":
    sys.exit(main())
