"""What `kernel-hub tune` can tune: for each op its usual shapes and real tensors to measure on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..errors import KernelHubError
from ..ops import batched_matmul, grouped_linear, linear, qkv_linear, swiglu_linear
from ..ops.matmul import grouped_plan, linear_fp8_plan, linear_plan, paired_plan
from ..tuning import Gpu, Row, Table
from .timing import L2_FACTOR, l2_bytes
from .tune import Case, Key, Launch, Tunable

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# The layers of Llama 8B and 70B: (n, k).
LLAMA = {
    "8B-qkv": (6144, 4096), "8B-o": (4096, 4096), "8B-gate_up": (28672, 4096),
    "8B-down": (4096, 14336), "70B-qkv": (10240, 8192), "70B-o": (8192, 8192),
    "70B-gate_up": (57344, 8192), "70B-down": (8192, 28672),
}  # fmt: skip
ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# Layers of experts, gate and up together; EXPERT_ROWS are tokens times experts a token.
EXPERTS = {
    "mixtral-gate_up": {"num_products": 8, "n": 28672, "k": 4096},
    "mixtral-down": {"num_products": 8, "n": 4096, "k": 14336},
    "qwen3-30b-gate_up": {"num_products": 128, "n": 1536, "k": 2048},
    "qwen3-30b-down": {"num_products": 128, "n": 2048, "k": 768},
}
EXPERT_ROWS = (8, 64, 256, 1024, 4096, 16384)
# Absorbed projections of DeepSeek-V3's attention, a product a head.
BATCHES = {
    "deepseek-v3-q": {"num_products": 128, "n": 512, "k": 128},
    "deepseek-v3-v": {"num_products": 128, "n": 128, "k": 512},
}
_HEAD_DIM, _KV_HEADS = 128, 8
_MAX_SETS = 24


@dataclass(frozen=True)
class Product:
    """An op that multiplies a (m, k) by b (n, k).

    offer: (gpu, m, **key) -> its candidates; choose: (gpu, m, **key) -> its plan
    make: (m, dtype, **key) -> one launch over new tensors
    """

    table: Table
    offer: Callable[..., Iterator[Row]]
    choose: Callable[..., object]
    make: Callable[..., Launch]
    shapes: Mapping[str, Key]
    dtypes: Sequence[str] = ("bf16", "fp16")
    sizes: Sequence[int] = ROWS
    element_bytes: int = 2
    # Columns of the result for one row of b.
    share: float = 1.0
    # Of grouped products, `size` is the rows of all; else, of each.
    is_grouped: bool = False

    def candidates(self, gpu: Gpu, size: int, key: Key) -> Iterator[Row]:
        """As the op's plan offers them."""
        return self.offer(gpu, size, **key)

    def plan(self, gpu: Gpu, size: int, key: Key) -> object:
        """The op's choice."""
        return self.choose(gpu, size, **key)

    def case(self, size: int, key: Key, dtype: str) -> Case:
        """Random numbers, in sets that together pass the L2."""
        n, k, products = int(key["n"]), int(key["k"]), int(key.get("num_products", 1))
        m = size if self.is_grouped else size * products
        weights = n * k * (min(products, m) if self.is_grouped else products)
        num_bytes = self.element_bytes * (m * k + weights) + int(2 * m * n * self.share)
        made = [self.make(size, DTYPES[dtype], **key) for _ in range(num_sets(num_bytes))]
        return Case(made, num_bytes, 2 * m * n * k)


def num_sets(bytes_a_set: int) -> int:
    """Input sets to rotate over: past the L2, at least two, in at most half of what is free."""
    free, _ = torch.cuda.mem_get_info()
    wanted = max(2, -(-L2_FACTOR * l2_bytes() // bytes_a_set))
    return max(1, min(_MAX_SETS, wanted, free // 2 // bytes_a_set))


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def _linear(m: int, dtype: torch.dtype, *, n: int, k: int) -> Launch:
    a, b = _random(m, k, dtype=dtype), _random(n, k, dtype=dtype)
    return functools.partial(linear, a, b, out=torch.empty(m, n, device="cuda", dtype=dtype))


def _linear_fp8(m: int, dtype: torch.dtype, *, n: int, k: int, fast: int) -> Launch:
    """With one scale a tensor."""
    a, b = (_random(rows, k, dtype=dtype).to(torch.float8_e4m3fn) for rows in (m, n))
    one = torch.ones(1, device="cuda")
    out = torch.empty(m, n, device="cuda", dtype=dtype)
    return functools.partial(
        linear, a, b, out=out, out_dtype=dtype, a_scale=one, b_scale=one, use_fast_accum=bool(fast)
    )


def _swiglu_linear(m: int, dtype: torch.dtype, *, n: int, k: int) -> Launch:
    a, b = _random(m, k, dtype=dtype), _random(n, k, dtype=dtype)
    # Products of this size would let silu's result overflow fp16.
    b *= k**-0.5
    out = torch.empty(m, n // 2, device="cuda", dtype=dtype)
    return functools.partial(swiglu_linear, a, b, out=out)


def _qkv_linear(m: int, dtype: torch.dtype, *, n: int, k: int) -> Launch:
    """With rotation, into one tensor of queries, keys and values."""
    num_heads = n // _HEAD_DIM - 2 * _KV_HEADS
    if n % _HEAD_DIM or num_heads < 1:
        raise KernelHubError(
            f"qkv_linear is tuned with {_KV_HEADS} heads of keys and of values of {_HEAD_DIM}: "
            f"n is a multiple of {_HEAD_DIM} from {(2 * _KV_HEADS + 1) * _HEAD_DIM} up, not {n}"
        )
    x, w = _random(m, k, dtype=dtype), _random(n, k, dtype=dtype)
    cos, sin = _random(2, m, _HEAD_DIM // 2, dtype=dtype)
    positions = torch.arange(m, device="cuda", dtype=torch.int32)
    out = torch.empty(m, n, device="cuda", dtype=dtype)
    heads = out.view(m, -1, _HEAD_DIM).split([num_heads, _KV_HEADS, _KV_HEADS], 1)

    def run() -> torch.Tensor:
        qkv_linear(
            x, w, None, cos, sin, positions, num_heads=num_heads, num_kv_heads=_KV_HEADS,
            out_q=heads[0], out_k=heads[1], out_v=heads[2],
        )  # fmt: skip
        return out

    return run


def _grouped_linear(m: int, dtype: torch.dtype, *, num_products: int, n: int, k: int) -> Launch:
    """Rows choose experts at random."""
    a, b = _random(m, k, dtype=dtype), _random(num_products, n, k, dtype=dtype)
    experts = torch.randint(num_products, (m,), device="cuda")
    counts = torch.bincount(experts, minlength=num_products)
    offsets = torch.zeros(num_products + 1, device="cuda", dtype=torch.int32)
    offsets[1:] = counts.cumsum(0)
    out = torch.empty(m, n, device="cuda", dtype=dtype)
    return functools.partial(grouped_linear, a, b, offsets, out=out)


def _batched_matmul(m: int, dtype: torch.dtype, *, num_products: int, n: int, k: int) -> Launch:
    a, b = (_random(num_products, rows, k, dtype=dtype) for rows in (m, n))
    out = torch.empty(num_products, m, n, device="cuda", dtype=dtype)
    return functools.partial(batched_matmul, a, b, out=out)


def _many(op: str, make: Callable[..., Launch], shapes: Mapping[str, Key]) -> Product:
    def choose(gpu: Gpu, rows: int, *, num_products: int, n: int, k: int) -> object:
        problem = grouped_plan.GroupedProblem(op, num_products, rows, n, k)
        return grouped_plan.choose(*gpu[:2], problem, True, gpu.name)

    offer = functools.partial(grouped_plan.candidates, op)
    is_grouped = op == "grouped_linear"
    table = grouped_plan.TABLES[op]
    sizes = EXPERT_ROWS if is_grouped else ROWS[:-2]
    return Product(table, offer, choose, make, shapes, sizes=sizes, is_grouped=is_grouped)


def _paired(op: str, make: Callable[..., Launch], layer: str, share: float) -> Product:
    def choose(gpu: Gpu, m: int, *, n: int, k: int) -> object:
        return paired_plan.choose(op, gpu, m, n, k, True)

    shapes = {name: {"n": n, "k": k} for name, (n, k) in LLAMA.items() if name.endswith(layer)}
    offer = functools.partial(paired_plan.candidates, op)
    return Product(paired_plan.TABLES[op], offer, choose, make, shapes, share=share)


def _choose_linear(gpu: Gpu, m: int, *, n: int, k: int) -> object:
    return linear_plan.choose(gpu.compute_capability, gpu.num_sms, m, n, k, False, gpu.name)


def _choose_linear_fp8(gpu: Gpu, m: int, *, n: int, k: int, fast: int) -> object:
    return linear_fp8_plan.choose(gpu.num_sms, m, n, k, bool(fast), gpu.name)


_PRODUCTS = (
    Product(
        linear_plan.TABLE, linear_plan.candidates, _choose_linear, _linear,
        {name: {"n": n, "k": k} for name, (n, k) in LLAMA.items()},
    ),
    Product(
        linear_fp8_plan.TABLE, linear_fp8_plan.candidates, _choose_linear_fp8, _linear_fp8,
        {
            name + ("-fast" if fast else ""): {"n": n, "k": k, "fast": fast}
            for name, (n, k) in LLAMA.items()
            for fast in (0, 1)
        },
        dtypes=("bf16",), element_bytes=1,
    ),
    _paired("swiglu_linear", _swiglu_linear, "gate_up", 0.5),
    _paired("qkv_linear", _qkv_linear, "qkv", 1.0),
    _many("grouped_linear", _grouped_linear, EXPERTS),
    _many("batched_matmul", _batched_matmul, BATCHES),
)  # fmt: skip

TUNABLE: dict[str, Tunable] = {product.table.op: product for product in _PRODUCTS}
