"""What the tests of benchmarks/by_lot.py share: its modules, a timer without a GPU, small cases."""

from __future__ import annotations

import dataclasses
import importlib
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FOLDER = str(Path(__file__).resolve().parents[2] / "benchmarks")


def lot_modules() -> SimpleNamespace:
    """The modules of benchmarks/lot, by_lot and plot_sweep, by name; they import torch."""
    sys.path.insert(0, FOLDER)
    try:
        names = (
            "shapes", "models", "run", "outcome", "clock", "contenders", "sweep",
            "attention_shapes", "attention_peers", "attention_backward",
            "product_peers", "rowwise", "sdpa", "sdpa_shapes",
        )  # fmt: skip
        modules = {name: importlib.import_module(f"lot.{name}") for name in names}
        scripts = {
            name: importlib.import_module(name) for name in ("by_lot", "harness", "plot_sweep")
        }
    finally:
        sys.path.remove(FOLDER)
    return SimpleNamespace(**modules, **scripts)


class Eager:
    """In place of a clock: launches everything once, and makes up times."""

    def __init__(self, spoilt: str = "") -> None:
        self.spoilt = spoilt

    def measure(
        self, contenders: Mapping[str, Sequence[Any]], expected_us: float, **_: bool
    ) -> Any:
        assert expected_us > 2
        for launches in contenders.values():
            for launch in launches:
                launch()
        failed = {name: "no graph" for name in contenders if name == self.spoilt}
        train = {
            name: [2.0, 1.0 + i, 3.0] for i, name in enumerate(contenders) if name not in failed
        }
        return importlib.import_module("lot.clock").Times(train, {}, failed)


def smaller(case: Any) -> Any:
    """The same of sizes that a CPU does at once."""
    lots = random.Random(case.name)
    step = importlib.import_module("lot.shapes").step_of(case.family)
    n, heads = min(case.n, lots.randrange(8, 40, 2)), case.heads
    if any(heads):
        heads = (min(heads[0], 3), min(heads[1], 2), 32)
        n = (heads[0] + 2 * heads[1]) * 32
    most = max(case.num_chosen, min(case.num_products, 8))
    return dataclasses.replace(
        case, m=min(case.m, lots.choice((1, 3, 7, 17))), n=n,
        k=min(case.k, step * lots.randrange(1, 12)), heads=heads, num_products=most,
    )  # fmt: skip


def smaller_attention(case: Any) -> Any:
    """The same for attention: heads, lengths and sequences; the mask and head_dim stay."""
    lots = random.Random(case.name)
    heads, kv_heads, head_dim = case.heads
    group, kv_heads = min(heads // kv_heads, 3), min(kv_heads, 2)
    most = lots.randrange(17, 60)
    keys = tuple(min(x, most) for x in case.seqlens_k[:3])
    queries = tuple(min(x, *keys) for x in case.seqlens_q[:3])
    return dataclasses.replace(
        case, heads=(group * kv_heads, kv_heads, head_dim), seqlens_k=keys,
        seqlens_q=keys if case.seqlens_q == case.seqlens_k else queries,
        window=tuple(min(x, 7) for x in case.window), page_size=min(case.page_size, 16),
    )  # fmt: skip
