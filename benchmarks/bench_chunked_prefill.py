"""17 to 1,024 new tokens over a long cache: equal shares, whole tiles, FlashAttention-3.

    python benchmarks/bench_chunked_prefill.py [--quick] [--seconds 60] [--out out.json]

Columns, us: auto (what the op takes), split and whole (each forced), main (the split's first
launch alone), FA3 (fa3-fwd; paged: xformers'), then the floor and the plan's own estimates. FA3
chooses its own number of splits. A result of split is held against whole's before it is timed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import case_rows
import torch
from lot.attention_peers import fa3, xformers_fa3

from kernel_hub.measure.timing import l2_bytes, replays
from kernel_hub.ops import flash_attention
from kernel_hub.ops.attention import forward_split_sm90 as split
from kernel_hub.ops.attention import split_costs as costs
from kernel_hub.ops.core.device import device_of
from kernel_hub.ops.core.launch import Launch, forget_all

FLOPS_A_US, BYTES_A_US = 650e6, 4.2e6
ROUNDS, IDLE_SECONDS, REPLAY_US, MOST_LAUNCHES, MOST_SETS = 5, 0.008, 3000.0, 60, 6
TOLERANCE = 2e-2


@dataclass(frozen=True)
class Case:
    """page_size 0: contiguous."""

    batch_size: int
    num_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int = 128
    page_size: int = 0
    causal: bool = True
    window_left: int = -1

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        more = f" pages of {self.page_size}" * (self.page_size > 0)
        more += f" window {self.window_left}" * (self.window_left >= 0)
        return (
            f"{self.batch_size} x {self.seqlen_q} over {self.seqlen_k} h{self.num_heads}/"
            f"{self.num_kv_heads} d{self.head_dim} {mask}{more}"
        )

    @property
    def seen(self) -> int:
        window = self.window_left + 1 + self.seqlen_q if self.window_left >= 0 else self.seqlen_k
        return min(self.seqlen_k, window)

    @property
    def flops(self) -> float:
        return 4.0 * self.batch_size * self.num_heads * self.seqlen_q * self.seen * self.head_dim

    @property
    def cache_bytes(self) -> float:
        return 4.0 * self.batch_size * self.num_kv_heads * self.seen * self.head_dim


QUICK = [
    Case(1, 8, 1, 64, 65_536), Case(1, 28, 4, 128, 32_768), Case(16, 28, 4, 17, 2048),
    Case(1, 32, 8, 512, 8192), Case(4, 32, 8, 256, 16_384), Case(1, 32, 8, 64, 1024),
    Case(2, 16, 4, 200, 20_000, 256), Case(1, 16, 2, 100, 5000, 64),
]  # fmt: skip
CASES = [
    *QUICK,
    Case(1, 32, 8, 1024, 32_768), Case(1, 64, 8, 17, 131_072), Case(8, 32, 8, 32, 4096),
    Case(32, 32, 8, 20, 1024), Case(2, 8, 8, 64, 16_384), Case(1, 32, 32, 512, 4096),
    Case(4, 40, 8, 128, 2048), Case(1, 32, 8, 1024, 4096), Case(2, 32, 8, 1024, 2048),
    Case(64, 28, 4, 32, 8192), Case(1, 12, 12, 300, 3000, 64), Case(8, 32, 8, 1024, 8192),
    Case(16, 28, 4, 17, 2048, page_size=64), Case(1, 28, 4, 128, 32_768, page_size=16),
    Case(4, 32, 8, 256, 16_384, page_size=256), Case(1, 28, 4, 128, 32_768, causal=False),
    Case(2, 32, 8, 256, 16_384, window_left=4095), Case(1, 8, 1, 1024, 8192),
    Case(1, 71, 1, 40, 8192, 64), Case(1, 48, 1, 33, 16_384), Case(3, 20, 4, 600, 12_345),
]  # fmt: skip


def inputs(case: Case) -> dict[str, Any]:
    """The arguments of `flash_attention`."""
    like: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    batch_size, tail = case.batch_size, (case.num_kv_heads, case.head_dim)
    q = torch.randn(batch_size, case.seqlen_q, case.num_heads, case.head_dim, **like)
    options: dict[str, Any] = {"causal": case.causal, "window_size": (case.window_left, -1)}
    if not case.page_size:
        k, v = (torch.randn(batch_size, case.seqlen_k, *tail, **like) for _ in range(2))
        return {"q": q, "k": k, "v": v, **options}
    pages = -(-case.seqlen_k // case.page_size)
    k, v = (torch.randn(batch_size * pages, case.page_size, *tail, **like) for _ in range(2))
    order = torch.randperm(batch_size * pages, device="cuda").to(torch.int32)
    lengths = torch.full((batch_size,), case.seqlen_k, device="cuda", dtype=torch.int32)
    tables = {"block_table": order.view(batch_size, pages), "cache_seqlens": lengths}
    return {"q": q, "k": k, "v": v, **options, **tables}


def forced(choice: bool | None, has_merge: bool, given: dict[str, Any]) -> torch.Tensor:
    """Our op with its choice made for it; without the merge: its time, not its result."""
    plan = split.plan
    split.choice = choice
    if not has_merge:
        split.plan = lambda *of: _without_merge(plan(*of))
    forget_all()
    try:
        out: torch.Tensor = flash_attention(**given)
        return out
    finally:
        split.choice, split.plan = None, plan


def _without_merge(planned: Launch) -> Launch:
    packed: Any = planned.maps
    nothing = Launch(lambda *_, **__: None)
    return planned._replace(maps=packed._replace(merge=nothing))


def peer(case: Case, given: dict[str, Any]) -> torch.Tensor:
    """FlashAttention-3."""
    options: dict[str, Any] = {"is_causal": case.causal, "num_splits": 0}
    options["softmax_scale"] = 1 / math.sqrt(case.head_dim)
    if case.window_left >= 0:
        options |= {"window_size_left": case.window_left, "window_size_right": 0}
    op = fa3()
    if case.page_size:
        op = xformers_fa3()
        options |= {"seqused_k": given["cache_seqlens"], "page_table": given["block_table"]}
    out: torch.Tensor = op(given["q"], given["k"], given["v"], **options)[0]
    return out


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """One row."""
    num_sets = max(1, min(MOST_SETS, -int(-3 * l2_bytes() // case.cache_bytes)))
    sets = [inputs(case) for _ in range(num_sets)]
    contenders: dict[str, list[Callable[[], object]]] = {
        name: [partial(forced, choice, name != "main", given) for given in sets]
        for name, choice in (("auto", None), ("split", True), ("whole", False), ("main", True))
    }
    torch.testing.assert_close(
        contenders["split"][0](), contenders["whole"][0](), rtol=TOLERANCE, atol=TOLERANCE
    )
    row: dict[str, Any] = {"case": str(case)}
    try:
        peer(case, sets[0])
        contenders["FA3"] = [partial(peer, case, given) for given in sets]
    except (ImportError, OSError, RuntimeError) as missing:  # not there, or it refuses
        row["without FA3"] = f"{type(missing).__name__}: {str(missing)[:100]}"
    floor = max(case.flops / FLOPS_A_US, case.cache_bytes / BYTES_A_US)
    count = max(4, min(MOST_LAUNCHES, int(REPLAY_US / max(20.0, 1.5 * floor))))
    samples = replays(contenders, count, IDLE_SECONDS, rounds)
    row |= {name: round(statistics.median(each), 1) for name, each in samples.items()}
    sizes = costs.Sizes(
        case.batch_size, case.num_heads, case.num_kv_heads, case.seqlen_q, case.seqlen_k,
        case.window_left, 0 if case.causal else -1, case.seqlen_k, case.head_dim,
    )  # fmt: skip
    body = next(each for each in split.BODIES if each.head_dim >= case.head_dim)
    block = body.stated.sizes
    tile = costs.PackedTile(body.head_dim, block["block_m"], block["block_n"])
    sms = device_of(sets[0]["q"].device).num_sms
    row["floor"] = round(floor, 1)
    row["estimates"] = [
        round(costs.split_us(sizes, tile, sms), 1),
        round(costs.whole_us(sizes, *tile[:3], sms), 1),
    ]
    return row


def main() -> None:
    """Parse the command line, measure, print."""
    case_rows.main(__doc__, QUICK, CASES, measure, ROUNDS)


if __name__ == "__main__":
    main()
