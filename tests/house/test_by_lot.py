"""benchmarks/by_lot.py without a GPU: what is drawn, that it runs, what is summed up."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmarks measure torch ops")

import torch
from lot_cases import Eager, lot_modules, smaller

from kernel_hub.measure import results

lot = lot_modules()
CASES = 200


@pytest.fixture(scope="module")
def cases() -> dict[str, list[Any]]:
    """Family -> its first cases under a seed."""
    return {
        family: [lot.run.draw(family, 3, i) for i in range(CASES)]
        for family in lot.run.GROUPS["products"]
    }


def test_a_seed_draws_the_same_whatever_else_is_drawn() -> None:
    names = lot.by_lot.families(["products"])
    assert names == list(lot.shapes.OPTIONS)
    many = list(lot.by_lot.drawn(names, 5, 100))
    assert many == list(lot.by_lot.drawn(names, 5, 100))
    assert [x.family for x in many[:9]] == names
    alone = list(lot.by_lot.drawn(["swiglu_linear"], 5, 1, first=4))
    assert alone == [x for x in many if x.family == "swiglu_linear" and x.number == 4]
    assert many != list(lot.by_lot.drawn(names, 6, 100))
    assert len({(x.family, x.name) for x in many}) == len(many)
    with pytest.raises(ValueError, match="no family convolution; there are linear, "):
        lot.by_lot.families(["linear", "convolution"])


def test_token_counts_are_those_of_servers(cases: Mapping[str, list[Any]]) -> None:
    found = [x.m for x in cases["linear"] if "vocab" not in x.layer]
    assert 1 <= min(found) <= 2 and 4000 < max(found) <= 8192
    assert sum(m % 2 for m in found) > len(found) / 2
    assert sum(m % 8 == 0 for m in found) < len(found) / 3
    for least, most in ((1, 20), (20, 400), (400, 8193)):  # as many of each size
        assert len(found) / 5 < sum(least <= m < most for m in found) < len(found) / 2


def test_a_third_has_options_and_all_occur(cases: Mapping[str, list[Any]]) -> None:
    for family, here in cases.items():
        with_some = [x for x in here if x.options]
        assert CASES / 4 < len(with_some) < CASES / 2.4, family
        counted = Counter(option for x in here for option in x.options)
        assert counted.keys() == set(lot.shapes.OPTIONS[family]), family
        assert not any({"wide rows", "tall rows"} <= set(x.options) for x in here)
        for x in here:
            assert x.k % lot.shapes.step_of(family) == 0 < x.k, x
            if "k off 64" in x.options:
                assert x.k % 64, x


def test_slices_divide_models(cases: Mapping[str, list[Any]]) -> None:
    layers = {x.layer for x in cases["linear"]}
    assert {name.partition("/")[2][:1] for name in layers} >= {"", "2", "4", "8"}
    assert len({name.rpartition(" ")[0].partition("/")[0] for name in layers}) > 25
    model = next(x for x in lot.models.MODELS if x.name == "Qwen2.5 7B")
    assert [(x.n, x.k) for x in lot.models.weights_of(model, 4)] == [
        (9 * 128, 3584), (3584, 7 * 128), (9472, 3584), (3584, 4736), (38016, 3584),
    ]  # fmt: skip
    assert lot.models.heads_of(model, 8) is None  # 28 heads
    odd = [x.name for x in lot.models.weights_of(model._replace(intermediate=1001), 2)]
    assert odd == ["Qwen2.5 7B/2 qkv", "Qwen2.5 7B/2 o", "Qwen2.5 7B/2 vocab"]
    assert lot.models.heads_of(model._replace(num_heads=32), 8) == (4, 1)  # 4 of keys, twice each
    for x in cases["qkv_linear"]:
        heads, kv_heads, head_dim = x.heads
        assert (heads + 2 * kv_heads) * head_dim == x.n and head_dim % 32 == 0


@pytest.mark.parametrize("family", [
    "linear", "linear_fp8_fast", "linear_fp8", "linear_fp8_blocks", "qkv_linear", "swiglu_linear",
    "epilogues", "grouped_linear", "batched_matmul",
])  # fmt: skip
def test_cases_run_and_are_right(cases: Mapping[str, list[Any]], family: str) -> None:
    source, beside = lot.contenders.Source("cpu"), set()
    for case in cases[family][:30]:
        found = lot.run.run(smaller(case), source, Eager(), lot.product_peers.PEERS)
        assert not found.wrong, f"{case.name}: {found.wrong}"
        assert "kernel_hub" in found.train
        assert found.peers.keys() | {"kernel_hub"} == found.train.keys()
        for name, reason in found.reasons.items():  # what this torch has no kernel for
            lacking = ("NotImplemented", "cuBLASLt", "No module named", "Invalid scaling")
            assert any(word in reason for word in lacking), f"{name}: {reason}"
        beside |= found.peers.keys()
    assert beside or family == "linear_fp8_blocks"


@pytest.mark.parametrize("family", ["linear", "linear_fp8", "qkv_linear", "swiglu_linear",
                                    "epilogues", "batched_matmul"])  # fmt: skip
def test_cases_of_their_own_size_are_legal(
    cases: Mapping[str, list[Any]], family: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Each op's own checks, on tensors without memory."""
    source = lot.contenders.Source("meta")
    monkeypatch.setattr(source, "num_sets", lambda _: 1)
    for case in cases[family]:
        made = lot.run.FAMILIES[family](case, source)
        made.ours.launches[0]()
        rows = source.rows(case.m, case.k, dtype=torch.bfloat16, options=case.options)
        assert rows.stride(0) % lot.shapes.step_of(family) == 0


def test_a_wrong_output_is_seen(
    cases: Mapping[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = smaller(next(x for x in cases["linear"] if not x.options and x.dtype == "bf16"))
    plain = dataclasses.replace(plain, m=7)
    products, source = lot.run.products, lot.contenders.Source("cpu")
    ours = products.linear

    def spoilt(amount: float, a: Any, b: Any, *rest: Any, out: Any, **options: Any) -> Any:
        ours(a, b, *rest, out=out, **options)[-1, -1] += amount
        return out

    for amount, words in ((1.0, "largest error"), (float("nan"), "not written, or nan")):
        monkeypatch.setattr(products, "linear", functools.partial(spoilt, amount))
        found = lot.run.run(plain, source, Eager(), lot.product_peers.PEERS)
        assert words in found.wrong and not found.train
    calls: list[int] = []

    def unsteady(a: Any, b: Any, *rest: Any, out: Any, **options: Any) -> Any:
        calls.append(1)
        ours(a, b, *rest, out=out, **options)[0, 0] *= 1 + (len(calls) > 2) * 2**-7
        return out

    monkeypatch.setattr(products, "linear", unsteady)
    found = lot.run.run(plain, source, Eager(), lot.product_peers.PEERS)
    assert found.wrong == "after timing: other bits than before it was timed"
    monkeypatch.setattr(products, "linear", ours)
    found = lot.run.run(plain, source, Eager("cuBLAS"), lot.product_peers.PEERS)
    assert found.reasons["cuBLAS"] == "after timing: no graph" and list(found.train) == [
        "kernel_hub"
    ]
    found = lot.run.run(plain, source, Eager("kernel_hub"), lot.product_peers.PEERS)
    assert found.wrong == "after timing: no graph"
    found = lot.run.run(plain, source, Eager(), ["cuBLASLt"])
    assert "cuBLAS" not in found.train and found.refused == {"cuBLASLt": ("cuBLASLt",)}


@pytest.mark.parametrize("name", ["kernel_hub", "cuBLAS"])
def test_sums_of_tensor_cores_are_no_wrong_outputs(name: str) -> None:
    truth = torch.ones(3, 5, dtype=torch.float64)
    for relative, is_wrong in ((0.0, False), (3e-6, False), (5e-5, True)):
        out = torch.empty(3, 5)
        launch = functools.partial(out.fill_, 1 + relative)
        written = lot.contenders.Written([out], lambda out=out: [out])
        expected = [lot.contenders.Expected(truth, truth.float())]
        found = lot.contenders.Contender([launch], written, expected).wrong(name)
        assert ("largest error" in found) is is_wrong, (relative, found)


def deep_gemm() -> Any:
    """DeepGEMM's functions by torch, with what they ask of their operands."""

    def product(a: Any, b: Any) -> Any:
        return a.float() @ b.float().T

    def fp8(a: Any, b: Any, out: Any) -> None:
        assert a[1].stride(0) == 1 and not a[1].stride(1) % 4
        wide = importlib.import_module("lot.fp8").wide
        out.copy_(
            product(wide(*a, "block", 1, torch.float32), wide(*b, "block", 128, torch.float32))
        )

    def contiguous(a: Any, b: Any, out: Any, experts: Any, compiled_dims: str) -> None:
        assert len(a) % 16 == 0 and len(experts) == len(a) and experts.dtype == torch.int32
        for first in range(0, len(a), 16):  # a tile is of one expert
            rows = slice(first, first + 16)
            assert len({int(x) for x in experts[rows] if x >= 0}) == 1
            out[rows] = product(a[rows], b[experts[first]]).to(out.dtype)

    def masked(a: Any, b: Any, out: Any, counts: Any, expected: int, compiled_dims: str) -> None:
        assert expected > 0
        for i, count in enumerate(counts.tolist()):
            out[i, :count] = product(a[i, :count], b[i]).to(out.dtype)

    return SimpleNamespace(
        bf16_gemm_nt=lambda a, b, out: out.copy_(product(a, b)), fp8_gemm_nt=fp8,
        m_grouped_bf16_gemm_nt_contiguous=contiguous, m_grouped_bf16_gemm_nt_masked=masked,
        get_mk_alignment_for_contiguous_layout=lambda: 16,
    )  # fmt: skip


def test_deep_gemm_gets_what_it_asks_for(
    cases: Mapping[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", deep_gemm())
    ran: set[str] = set()
    for family in ("linear", "linear_fp8_blocks", "grouped_linear"):
        for case in cases[family][:40]:
            small = smaller(case)
            found = lot.run.run(small, lot.contenders.Source("cpu"), Eager(), ["DeepGEMM"])
            assert not found.wrong and not found.reasons, f"{small.name}: {found.reasons}"
            ran |= {f"{family} {name}" for name in found.peers}
    assert ran >= {
        "linear DeepGEMM", "linear_fp8_blocks DeepGEMM", "linear_fp8_blocks DeepGEMM + bias",
        "grouped_linear DeepGEMM contiguous", "grouped_linear DeepGEMM masked",
        "grouped_linear DeepGEMM masked + bias",
    }  # fmt: skip


def test_the_time_is_kept(
    cases: Mapping[str, list[Any]], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    source, few = lot.contenders.Source("cpu"), [smaller(x) for x in cases["linear"][:4]]
    by_lot = lot.by_lot
    assert not [*by_lot.measured(few, source, Eager(), ["cuBLAS"], -1.0)]
    found = [*by_lot.measured(few[:3], source, Eager(), ["cuBLAS"], 100.0)]
    options = SimpleNamespace(sweep=False, emptied=True, seed=7, family=["products"],
                              about={"gpu": "NVIDIA H200"})  # fmt: skip
    assert by_lot.finish(options, found, 4) == 0
    assert "the time was up after 3 of 4 cases" in capsys.readouterr().out
    wrong = [(few[0], dataclasses.replace(found[0][1], wrong="bad"))]
    assert by_lot.finish(options, wrong, 1) == 1 and "bad" in capsys.readouterr().err
    assert by_lot.file_name(options) == "h200_by_lot_products_emptied_s7.json"
    monkeypatch.setattr(results, "environment", lambda: {"gpu": "NVIDIA H200"})
    by_lot.save(tmp_path / "x.json", options, found)
    rows = results.read(tmp_path / "x.json")
    assert {row["family"].removesuffix(", not counted") for row in rows} == {
        "by lot linear, emptied"
    }
