"""What `kernel-hub demo` runs: each op on real tensors, held against its reference, and timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from .. import ops
from ..engine.engine import Engine
from ..engine.requests import SamplingParams
from ..errors import KernelHubError
from ..testing import reference
from ..testing.compare import Comparison, compare
from ..testing.reference_attention import reference_attention
from .rates import Result, Roofs
from .timing import MATRIX_SIZE, GraphTimer, copy_bandwidth, matrix_products, matrix_rate, num_sets

Inputs = dict[str, torch.Tensor]
Outputs = tuple[torch.Tensor, ...]
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# Inputs whose first dimension is that of the outputs: tokens, or sequences for attention.
_A_ROW_A_TOKEN = frozenset({"x", "residual", "q", "k", "v", "positions", "cache_seqlens"})
# The reference is fp64 and makes several temporaries: rows are checked this many at a time.
_CHECKED_ROWS = 1024
_HIDDEN, _INTERMEDIATE, _HEAD_DIM, _HEADS, _KV_HEADS = 4096, 14336, 128, 32, 8
_SEQLEN, _SEQUENCES = 1024, 8
_MATRIX_BYTES = 3 * 2 * MATRIX_SIZE**2


@dataclass(frozen=True)
class DemoCase:
    """One op on one shape and dtype.

    `num_bytes` is what it reads and writes at least, `num_flops` what its matrix products take.
    """

    op: str
    shape: str
    dtype: str
    num_bytes: int
    make: Callable[[], Inputs]
    run: Callable[[Inputs], Outputs]
    refer: Callable[[Inputs, torch.dtype], Outputs]
    num_flops: int = 0


def cases(device: str, num_tokens: int) -> Iterator[DemoCase]:
    """An op of each kind in every dtype, in the shapes of an 8-billion-parameter Llama."""
    for dtype in DTYPES:
        yield from _cases(device, num_tokens, dtype)
        if dtype != "fp32":
            yield from _attention_cases(device, num_tokens, dtype)
            yield from _product_cases(device, num_tokens, dtype)


def _cases(device: str, num_tokens: int, token: str) -> Iterator[DemoCase]:
    dtype = DTYPES[token]
    row_bytes = num_tokens * dtype.itemsize

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    yield DemoCase(
        "rms_norm",
        f"{num_tokens} x {_HIDDEN}",
        token,
        2 * row_bytes * _HIDDEN,
        lambda: {"x": random(num_tokens, _HIDDEN), "weight": random(_HIDDEN)},
        lambda i: (ops.rms_norm(i["x"], i["weight"]),),
        lambda i, dtype: (reference.rms_norm(i["x"], i["weight"], dtype=dtype),),
    )
    yield DemoCase(
        "rms_norm + residual",
        f"{num_tokens} x {_HIDDEN}",
        token,
        4 * row_bytes * _HIDDEN,
        lambda: {
            "x": random(num_tokens, _HIDDEN),
            "residual": random(num_tokens, _HIDDEN),
            "weight": random(_HIDDEN),
        },
        lambda i: ops.rms_norm(i["x"], i["weight"], residual=i["residual"]),
        lambda i, dtype: (
            reference.rms_norm(i["x"], i["weight"], residual=i["residual"], dtype=dtype),
            i["x"].to(dtype) + i["residual"].to(dtype),
        ),
    )
    yield DemoCase(
        "silu_and_mul",
        f"{num_tokens} x 2 x {_INTERMEDIATE}",
        token,
        3 * row_bytes * _INTERMEDIATE,
        lambda: {"x": random(num_tokens, 2 * _INTERMEDIATE)},
        lambda i: (ops.silu_and_mul(i["x"]),),
        lambda i, dtype: (reference.silu_and_mul(i["x"], dtype=dtype),),
    )
    yield DemoCase(
        "rope",
        f"{num_tokens} x ({_HEADS} + {_KV_HEADS}) x {_HEAD_DIM}",
        token,
        2 * row_bytes * (_HEADS + _KV_HEADS) * _HEAD_DIM,
        lambda: {
            "q": random(num_tokens, _HEADS, _HEAD_DIM),
            "k": random(num_tokens, _KV_HEADS, _HEAD_DIM),
            "positions": torch.arange(num_tokens, device=device),
            **rotary_table(num_tokens, _HEAD_DIM, device),
        },
        lambda i: ops.rope(i["q"], i["k"], i["cos"], i["sin"], i["positions"]),
        lambda i, dtype: tuple(
            reference.rope(i[name], i["cos"], i["sin"], i["positions"], dtype=dtype)
            for name in ("q", "k")
        ),
    )


def _attention_cases(device: str, num_tokens: int, token: str) -> Iterator[DemoCase]:
    """A causal prompt of all the tokens, and one new token for each of a few sequences of them."""
    dtype = DTYPES[token]
    seqlen = min(num_tokens, _SEQLEN)
    batch_size = -(-num_tokens // seqlen)
    kv_bytes = 2 * num_tokens * _KV_HEADS * _HEAD_DIM * dtype.itemsize

    def random(batch_size: int, seqlen: int, num_heads: int) -> torch.Tensor:
        return torch.randn(batch_size, seqlen, num_heads, _HEAD_DIM, device=device, dtype=dtype)

    def refer(i: Inputs, dtype: torch.dtype) -> Outputs:
        lengths = i.get("cache_seqlens")
        is_prompt = lengths is None
        return (
            reference_attention(
                i["q"], i["k"], i["v"], causal=is_prompt, cache_seqlens=lengths, dtype=dtype
            )[0],
        )

    yield DemoCase(
        "flash_attention, causal",
        f"{batch_size} x {seqlen} x {_HEADS}/{_KV_HEADS} x {_HEAD_DIM}",
        token,
        kv_bytes + 2 * num_tokens * _HEADS * _HEAD_DIM * dtype.itemsize,
        lambda: {
            "q": random(batch_size, seqlen, _HEADS),
            "k": random(batch_size, seqlen, _KV_HEADS),
            "v": random(batch_size, seqlen, _KV_HEADS),
        },
        lambda i: (ops.flash_attention(i["q"], i["k"], i["v"], causal=True),),
        refer,
        # Query i of a sequence sees i + 1 keys: two products for each pair.
        4 * batch_size * (seqlen * (seqlen + 1) // 2) * _HEADS * _HEAD_DIM,
    )
    yield DemoCase(
        "decode_attention",
        f"{_SEQUENCES} x 1 over {num_tokens} x {_HEADS}/{_KV_HEADS} x {_HEAD_DIM}",
        token,
        _SEQUENCES * kv_bytes,
        lambda: {
            "q": random(_SEQUENCES, 1, _HEADS),
            "k": random(_SEQUENCES, num_tokens, _KV_HEADS),
            "v": random(_SEQUENCES, num_tokens, _KV_HEADS),
            "cache_seqlens": torch.full((_SEQUENCES,), num_tokens, device=device).int(),
        },
        lambda i: (ops.decode_attention(i["q"], i["k"], i["v"], cache_seqlens=i["cache_seqlens"]),),
        refer,
        4 * _SEQUENCES * num_tokens * _HEADS * _HEAD_DIM,
    )


def _product_cases(device: str, num_tokens: int, token: str) -> Iterator[DemoCase]:
    """The output projection with its residual, and the first half of the feed-forward layer."""
    dtype = DTYPES[token]
    intermediate = _INTERMEDIATE if device == "cuda" else _HIDDEN // 4  # the reference is fp64

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype) * scale

    def weight(num_rows: int) -> torch.Tensor:
        return random(num_rows, _HIDDEN, scale=_HIDDEN**-0.5)

    def refer_gated(i: Inputs, dtype: torch.dtype) -> Outputs:
        gate, up = (i["x"].to(dtype) @ i["weight"].to(dtype).T).chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up,)

    yield DemoCase(
        "linear + residual",
        f"{num_tokens} x {_HIDDEN} x {_HIDDEN}",
        token,
        (3 * num_tokens + _HIDDEN) * _HIDDEN * dtype.itemsize,
        lambda: {
            "x": random(num_tokens, _HIDDEN),
            "weight": weight(_HIDDEN),
            "residual": random(num_tokens, _HIDDEN),
        },
        lambda i: (ops.linear(i["x"], i["weight"], residual=i["residual"]),),
        lambda i, dtype: (i["x"].to(dtype) @ i["weight"].to(dtype).T + i["residual"].to(dtype),),
        2 * num_tokens * _HIDDEN * _HIDDEN,
    )
    yield DemoCase(
        "swiglu_linear",
        f"{num_tokens} x {_HIDDEN} x 2 x {intermediate}",
        token,
        (num_tokens * (_HIDDEN + intermediate) + 2 * intermediate * _HIDDEN) * dtype.itemsize,
        lambda: {"x": random(num_tokens, _HIDDEN), "weight": weight(2 * intermediate)},
        lambda i: (ops.swiglu_linear(i["x"], i["weight"]),),
        refer_gated,
        2 * num_tokens * _HIDDEN * 2 * intermediate,
    )


def rotary_table(num_positions: int, head_dim: int, device: str) -> Inputs:
    """cos and sin, (num_positions, head_dim // 2) each."""
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    angles = torch.arange(num_positions, device=device)[:, None] * frequencies
    return {"cos": angles.cos(), "sin": angles.sin()}


def checked(case: DemoCase, inputs: Inputs | None = None) -> Result:
    """Run the op once and compare every element with the fp64 reference."""
    inputs = case.make() if inputs is None else inputs
    outputs = case.run(inputs)
    found: list[Comparison] = []
    for start in range(0, len(outputs[0]), _CHECKED_ROWS):
        rows = slice(start, start + _CHECKED_ROWS)
        part = {name: t[rows] if name in _A_ROW_A_TOKEN else t for name, t in inputs.items()}
        truths = case.refer(part, torch.float64)
        owns = case.refer(part, DTYPES[case.dtype])
        for out, truth, own in zip(outputs, truths, owns, strict=True):
            found.append(compare(out[rows], truth, own, name=case.op))
    worst = max(found, key=lambda one: (not one.ok, one.error / max(one.limit, 1e-30)))
    return Result(
        case.op, case.shape, case.dtype, worst.ok, worst.error, worst.limit, worst.message
    )


def _copied() -> float:
    gigabytes = min(2.0, torch.cuda.mem_get_info()[0] / 2**30 / 8)  # twice that is allocated
    return copy_bandwidth(gigabytes)


def roofs(timer: GraphTimer) -> Roofs:
    """What this GPU copies and multiplies, measured as the ops are."""
    matrix = {}
    for name in ("fp16", "bf16"):
        products = matrix_products(DTYPES[name], 2)
        matrix[name] = matrix_rate(timer.measure({"matmul": products}, _MATRIX_BYTES)["matmul"])
    return Roofs(_copied(), matrix)


def measured(case: DemoCase, timer: GraphTimer, roofs: Roofs) -> Result:
    """`checked`, and the kernel's median time over inputs rotated past the L2 (GPU only).

    The roofs are measured again beside it, the matrix rate in turn with the kernel: what else runs
    on the card slows both. A copy that was faster before was the less disturbed.
    """
    sets = [case.make() for _ in range(num_sets(case.num_bytes))]
    result = checked(case, sets[0])
    contenders: dict[str, list[Callable[[], object]]] = {
        case.op: [partial(case.run, inputs) for inputs in sets]
    }
    if has_matrix := bool(case.num_flops) and case.dtype in roofs.matrix:
        contenders["matmul"] = matrix_products(DTYPES[case.dtype], len(sets))
    samples = timer.measure(contenders, case.num_bytes)
    copy, matrix = max(roofs.copy, _copied()), dict(roofs.matrix)
    if has_matrix:
        matrix[case.dtype] = matrix_rate(samples["matmul"])
    time_us = statistics.median(samples[case.op])
    return Roofs(copy, matrix).rated(result, case.num_bytes, case.num_flops, time_us)


def words(device: str) -> str:
    """What a tiny model of random weights says when it may use letters and blanks alone."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of products this small more of them wait for each other
    try:
        engine = Engine.random("tiny", device=device, cache_tokens=256)
        letters = dict.fromkeys(b" abcdefghijklmnopqrstuvwxyz", 50.0)
        params = SamplingParams(max_tokens=32, seed=3, logit_bias=letters)
        answer = engine.generate(["once upon a time"], params)[0]
    finally:
        torch.set_num_threads(num_threads)
    if answer.error:
        raise KernelHubError(f"the engine failed: {answer.error}")
    return answer.text.strip()
