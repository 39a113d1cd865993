"""The int4 and int8 weight kernels of cpm_kernels' clients beside torch's own expressions.

Launched as those clients do, a block a row; kernel time by CUDA-graph replays over inputs rotated
past the L2, outputs held against fp64 first (kernel_hub/measure/timing.py). Shapes: the layers of
ChatGLM2-6B. Writes benchmarks/results/<gpu>_weight_extraction.json.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from harness import CHECKED_TOKENS, Case, Contender, compiled, row_arguments, run_cases

from kernel_hub import Kernel
from kernel_hub.measure import timing

NAMES = {torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float32: "Float"}


@functools.cache
def shipped() -> Kernel:
    """The kernels."""
    return Kernel("weight_extraction")


def launch(name: str, weight: torch.Tensor, out: torch.Tensor, *scale: torch.Tensor) -> Any:
    """One launch with the clients' geometry; gives `out`."""
    n, m = len(weight), weight.shape[1] // (2 if name == "int4WeightCompression" else 1)
    threads = min(-(-m // 32) * 32, 1024)
    shipped()[name]((n, 1, 1), (threads, 1, 1), 0, None, [weight, *scale, out, n, m])
    return out


def unpack(weight: torch.Tensor) -> torch.Tensor:
    """(n, m) -> (n, 2 m), in torch."""
    return torch.stack((weight >> 4, (weight << 4) >> 4), -1).flatten(1)


def scaled(weight: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    """What a model without the kernels runs."""
    return (unpack(weight) if bits == 4 else weight).to(scale.dtype) * scale[:, None]


def packed(weight: torch.Tensor) -> torch.Tensor:
    """int4WeightCompression in torch."""
    return (weight[:, ::2] << 4) | (weight[:, 1::2] & 15)


def random_bytes(bytes_a_launch: int, *shape: int) -> torch.Tensor:
    """Input sets past the L2."""
    sets = timing.num_sets(bytes_a_launch)
    return torch.randint(-128, 128, (sets, *shape), dtype=torch.int8, device="cuda")


def extraction(bits: int, dtype: torch.dtype, rows: int, columns: int) -> Case:
    """(rows, columns) weights of `bits` bits -> dtype."""
    num_bytes = rows * columns * bits // 8 + rows * columns * dtype.itemsize
    weight = random_bytes(num_bytes, rows, columns * bits // 8)
    scale = torch.rand(rows, device="cuda", dtype=dtype)
    name = f"int{bits}WeightExtraction{NAMES[dtype]}"

    def ours(i: int) -> torch.Tensor:
        return launch(name, weight[i], weight.new_empty(rows, columns, dtype=dtype), scale)

    def each(function: Callable[..., Any]) -> Contender:
        return Contender([partial(function, weight[i], scale, bits) for i in range(len(weight))])

    head, factors = weight[0, :CHECKED_TOKENS], scale[:CHECKED_TOKENS]
    return Case(
        f"{name} {rows} x {columns}",
        num_bytes,
        Contender([partial(ours, i) for i in range(len(weight))]),
        [scaled(head, factors.double(), bits)],
        [scaled(head, factors, bits)],
        {"torch": lambda: each(scaled), "torch.compile": lambda: each(compiled(scaled))},
    )


def compression(rows: int, columns: int) -> Case:
    """(rows, columns) bytes -> (rows, columns / 2)."""
    num_bytes = rows * columns * 3 // 2
    weight = random_bytes(num_bytes, rows, columns)

    def ours(i: int) -> torch.Tensor:
        return launch("int4WeightCompression", weight[i], weight.new_empty(rows, columns // 2))

    def numbers(found: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (found.float(),)

    def each(function: Callable[..., Any]) -> Contender:
        return Contender([partial(function, part) for part in weight], numbers)

    truth = packed(weight[0, :CHECKED_TOKENS])
    return Case(
        f"int4WeightCompression {rows} x {columns}",
        num_bytes,
        Contender([partial(ours, i) for i in range(len(weight))], numbers),
        [truth.double()],
        [truth.float()],
        {"torch": lambda: each(packed), "torch.compile": lambda: each(compiled(packed))},
    )


def main() -> int:
    """Measure, write, print."""
    options = row_arguments(
        __doc__,
        {"shapes": "4096x4096,27392x4096"},
        shapes="4608x4096,4096x4096,27392x4096,4096x13696",
    )

    def cases() -> Iterator[Callable[[], Case]]:
        for shape in options.shapes:
            rows, columns = map(int, shape.split("x"))
            for bits in (4, 8):
                yield partial(extraction, bits, options.torch_dtype, rows, columns)
        yield partial(compression, *map(int, options.shapes[-1].split("x")))

    with torch.no_grad():
        return run_cases("weight_extraction", cases(), options)


if __name__ == "__main__":
    sys.exit(main())
