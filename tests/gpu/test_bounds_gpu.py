"""Hostile tables between guard bands for every body that this GPU runs, and what is said of them.

tests/ops/bounds runs the bodies that are chosen; here are the others: portable ones on Hopper too,
each variant of qkv_linear and grouped_linear, e4m3 attention. What is read outside is nan, or a
fault; tests/gpu/sanitize_bounds.py looks closer.
"""

# ruff: noqa: E402
from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
TESTS = Path(__file__).resolve().parents[1]
sys.path.extend([str(TESTS / "ops"), str(TESTS / "ops/bounds"), str(TESTS / "gpu")])

from arena import SEED, Arena
from hostile_attention import HostileAttention
from hostile_decode import HostileStep
from hostile_fp8 import HostileFp8
from hostile_grouped import HostileGroups
from hostile_mla import HostileLatents
from hostile_rows import forcing_qkv, hostile_append, hostile_qkv, hostile_rope
from led_outside import forget
from sanitize_grouped import choices, forced

from kernel_hub import ops
from kernel_hub.errors import TensorError
from kernel_hub.ops.attention import forward_sm90 as hopper
from kernel_hub.ops.attention.backward import sm90 as hopper_backward
from kernel_hub.ops.core import bounds
from kernel_hub.ops.matmul import grouped_plan, paired_plan

pytestmark = pytest.mark.gpu
Hostile = Callable[[random.Random, Arena], None]


def is_hopper() -> bool:
    return torch.cuda.get_device_capability() == (9, 0)


def _run(name: str, lots: int, hostile: Hostile) -> None:
    for lot in range(lots):
        generator = random.Random(f"{SEED} {name} {lot}")
        print(f"KERNEL_HUB_SEED={SEED}, {name}, lot {lot}")
        with Arena("cuda", generator) as arena:
            hostile(generator, arena)
        torch.cuda.synchronize()


@pytest.fixture(params=["chosen", "portable"])
def body(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Hopper's kernels where there are any, or the portable ones."""
    if request.param == "portable":
        for module in (hopper, hopper_backward):
            monkeypatch.setattr(module, "is_enabled", False)
    yield request.param


def test_attention(body: str) -> None:
    _run(f"attention {body}", 80, lambda *given: HostileAttention(*given).forward())


@pytest.mark.parametrize("deterministic", [False, True])
def test_attention_backward(body: str, deterministic: bool) -> None:
    def hostile(generator: random.Random, arena: Arena) -> None:
        layout = generator.choice(("varlen", "varlen_q", "varlen_k", "cache", "varlen_cache"))
        shape = {"softcap": 0.0, "window_size": (-1, -1), "head_dim": 128}
        fixed: dict[str, Any] = shape if generator.random() < 0.5 else {}
        case = HostileAttention(generator, arena, layout=layout, **fixed)
        case.backward(deterministic=deterministic)

    _run(f"backward {body}", 40, hostile)


def test_attention_fp8() -> None:
    if not is_hopper():
        pytest.skip("e4m3 attention needs a GPU of compute capability 9.0")
    _run("fp8", 50, lambda *given: HostileFp8(*given).forward())


def test_decode() -> None:
    _run("decode", 80, lambda *given: HostileStep(*given).run())


def test_mla() -> None:
    _run("mla", 80, lambda *given: HostileLatents(*given).run())


@pytest.mark.parametrize("hostile", [hostile_rope, hostile_append, hostile_qkv])
def test_rows(hostile: Hostile) -> None:
    _run(hostile.__name__, 60, hostile)


def _qkv_variants() -> list[str]:
    names = [found.name for found in paired_plan.HOPPER["qkv_linear"]]
    return ["m8", "m8_deep", "m16", "128x128", "64x128", *names]


@pytest.mark.parametrize("variant", _qkv_variants())
def test_every_variant_of_qkv_linear(variant: str) -> None:
    if variant in _qkv_variants()[5:] and not is_hopper():
        pytest.skip("this variant needs a GPU of compute capability 9.0")
    with forcing_qkv(variant) as taken:
        _run(f"qkv {variant}", 40, hostile_qkv)
    assert len(taken) >= 5


def test_every_variant_of_grouped_linear() -> None:
    def hostile(generator: random.Random, arena: Arena) -> None:
        case = HostileGroups(generator, arena)
        drawn = case.drawn
        problem = grouped_plan.GroupedProblem(
            "grouped_linear", drawn["experts"], drawn["rows"], drawn["n"], drawn["k"]
        )
        for choice in choices(problem):
            patch, _ = forced("grouped_linear", choice)
            with patch:
                case.run()

    _run("grouped", 25, hostile)


def _rope(position: int) -> None:
    x, table = torch.ones(1, 2, 64, device="cuda"), torch.ones(5, 32, device="cuda")
    ops.rope(x, x, table, table, torch.tensor([position], device="cuda"))


def test_what_a_graph_met_is_named_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    x, table = torch.ones(1, 2, 64, device="cuda"), torch.ones(5, 32, device="cuda")
    positions = torch.zeros(1, dtype=torch.int32, device="cuda")
    _rope(0)
    forget(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        monkeypatch.setenv("KERNEL_HUB_DEBUG", "1")
        ops.rope(x, x, table, table, positions)  # cannot wait, and does not
    graph.replay()
    _rope(0)
    positions.fill_(5)
    graph.replay()
    with pytest.raises(TensorError, match=r"^rope: positions: expected "):
        _rope(0)
    _rope(0)


def test_a_first_call_in_a_capture_has_no_flag() -> None:
    with (
        mock.patch.object(bounds, "_words", {}),
        mock.patch.object(bounds, "_flags", {}),
        mock.patch.object(bounds, "_ops", []),
    ):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _in_capture = bounds.flag("rope", torch.empty(1, device="cuda"))
        assert _in_capture is None
        assert bounds.flag("rope", torch.empty(1, device="cuda")) is not None


def test_launches_name_their_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(torch.empty(1, device="cuda"))
    monkeypatch.setenv("KERNEL_HUB_DEBUG", "1")
    with pytest.raises(TensorError, match=r"^rope: positions: expected "):
        _rope(-1)
    _rope(4)
