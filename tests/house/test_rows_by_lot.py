"""Families of the ops of rows in benchmarks/by_lot.py without a GPU: what is drawn, what becomes of
a case."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmarks measure torch ops")
pytest.importorskip("triton", reason="some peers are kernels of Triton's")

import torch
from lot_cases import FOLDER, lot_modules

from kernel_hub import ops

lot = lot_modules()
NAMES = lot.by_lot.families(["rows"])
# Drawn in families of other names, what computes nothing of its own, and what no peer has.
ELSEWHERE = {
    "linear", "qkv_linear", "swiglu_linear", "gated_linear", "grouped_linear", "batched_matmul",
    "flash_attention", "flash_attention_qkvpacked", "decode_attention", "mla_decode", "log_softmax",
    "unpad_input", "sample_slice",
}  # fmt: skip


def test_every_op_has_a_family() -> None:
    made = {name for name in ops.__all__ if callable(getattr(ops, name))}
    assert made - set(NAMES) - ELSEWHERE == set()
    assert set(ops.__all__) >= ELSEWHERE


def test_a_seed_draws_the_same_whatever_else_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)  # of the benchmarks whose kinds are drawn

    def told(cases: Any) -> list[Any]:
        return [(x.family, x.name, x.num_tokens) for x in cases]

    many = told(lot.by_lot.drawn(NAMES, 5, 200))
    assert many == told(lot.by_lot.drawn(NAMES, 5, 200))
    assert (
        told(lot.by_lot.drawn(["rope"], 5, 1, first=4)) == [x for x in many if x[0] == "rope"][4:5]
    )
    assert len({x[:2] for x in many}) == len(many)
    found = [x[2] for x in many]
    assert min(found) <= 2 and max(found) > 4000
    assert sum(x % 2 for x in found) > len(found) / 2.5


class Once:
    """In place of a timer."""

    def measure(self, contenders: dict[str, Any], num_bytes: int) -> dict[str, list[float]]:
        for launches in contenders.values():
            for launch in launches:
                launch()
        return {name: [2.0 + i] for i, name in enumerate(contenders)}


@pytest.mark.parametrize("spoilt", ["", "kernel_hub", "torch"])
def test_wrong_outputs_are_said(spoilt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    harness: Any = lot.harness
    monkeypatch.setattr(harness.timing, "capture", lambda launches: None)
    x = torch.randn(4, 8)

    def contender(name: str) -> Any:
        return harness.Contender([lambda: x + (name == spoilt)])

    def kind(dtype: torch.dtype, num_tokens: int, size: int) -> Any:
        peers = {name: lambda name=name: contender(name) for name in ("torch", "liger (in place)")}
        return harness.Case(f"of {size}", 64, contender("kernel_hub"), [x.double()], [x], peers)

    case = lot.rowwise.RowLot("rope", 3, "", kind, "bf16", 4, (8,))
    found = lot.rowwise.run(case, Once(), ["torch", "liger"])
    assert bool(found.wrong) == (spoilt == "kernel_hub")
    if not found.wrong:
        assert found.peers.keys() == {"torch", "liger (in place)"} - {spoilt}
        assert found.ratio() == 2.0 / 3.0
