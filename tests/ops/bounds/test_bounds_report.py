"""KERNEL_HUB_DEBUG=1 names the op and the table that led a launch outside."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated import ROOT
from led_outside import forget
from ways import Way

from kernel_hub import ops
from kernel_hub.collection.manifest import open_collection
from kernel_hub.errors import TensorError
from kernel_hub.ops.core import bounds

FAR = 2**31 - 1
INDICES = {
    "block_mapping", "block_table", "cache_seqlens", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k",
    "draft_ids", "experts", "ids", "offsets", "parents", "positions", "row_id_map", "slot_mapping",
}  # fmt: skip


def _int32(way: Way, *values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=way.device)


def _rope(way: Way, position: int) -> Any:
    x, table = way.randn(1, 2, 64), way.randn(5, 32)
    return ops.rope(x, x, table, table, _int32(way, position))


def _new(way: Way) -> tuple[torch.Tensor, ...]:
    """k, v of one token each of two sequences; k_cache, v_cache of four pages."""
    k, cache = way.randn(2, 1, 1, 64), way.randn(4, 8, 1, 64)
    return k, k.clone(), cache, cache.clone()


def _append(way: Way, **tables: torch.Tensor) -> Any:
    k, v, *caches = _new(way)
    if "slot_mapping" in tables:
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    if "cache_seqlens" in tables:
        caches = [cache[:2] for cache in caches]
    return ops.append_kv(k, v, *caches, **tables)


def _append_ragged(way: Way) -> Any:
    k, v, *caches = _new(way)
    return ops.append_kv(
        k.flatten(0, 1), v.flatten(0, 1), *caches, cu_seqlens=_int32(way, -1, 1, 2),
        cache_seqlens=_int32(way, 0, 0), block_table=_int32(way, [0], [1]),
    )  # fmt: skip


def _qkv(way: Way) -> Any:
    x, w = way.randn(2, 64, dtype=torch.float16), way.randn(3 * 64, 64, dtype=torch.float16)
    cache = way.randn(4, 8, 1, 64, dtype=torch.float16)
    return ops.qkv_linear(
        x, w, num_heads=1, num_kv_heads=1, k_cache=cache, v_cache=cache.clone(),
        slot_mapping=_int32(way, 1, 32),
    )  # fmt: skip


def _decode(way: Way, length: int, page: int) -> Any:
    q = way.randn(1, 1, 2, 64, dtype=torch.float16)
    cache = way.randn(4, 8, 1, 64, dtype=torch.float16)
    return ops.decode_attention(
        q, cache, cache.clone(), cache_seqlens=_int32(way, length), block_table=_int32(way, [page])
    )


def _mla(way: Way, length: int, page: int) -> Any:
    q, cache = way.randn(1, 1, 2, 576).half(), way.randn(4, 8, 576).half()
    lengths, table = _int32(way, length), _int32(way, [page])
    return ops.mla_decode(q, cache, cache_seqlens=lengths, block_table=table, softmax_scale=0.1)


def _attention(way: Way, name: str, *values: int) -> Any:
    q = way.randn(10, 2, 64, dtype=torch.float16)
    tables = {f"cu_seqlens_{x}": _int32(way, 0, 5, 10) for x in "qk"}
    tables[name] = _int32(way, *values)
    return ops.flash_attention(q, q, q, **tables, max_seqlen_q=9, max_seqlen_k=9)


def _grouped(way: Way) -> Any:
    a, b = way.randn(5, 16, dtype=torch.float16), way.randn(2, 8, 16, dtype=torch.float16)
    return ops.grouped_linear(a, b, _int32(way, 0, 6, 5))


def _permute(way: Way) -> Any:
    return ops.moe_permute(way.randn(2, 8), _int32(way, [0, -1], [2, 1]), 2)


def _combine(way: Way) -> Any:
    return ops.moe_combine(way.randn(2, 8), _int32(way, [0, -1], [2, 1]), way.randn(2, 2))


def _embed(way: Way, id_: int, position: int) -> Any:
    weight, positions = way.randn(5, 8), _int32(way, position)
    return ops.embedding(_int32(way, id_), weight, position_weight=weight, positions=positions)


# What is said, and a call that it is said of.
CALLS: dict[str, Callable[[Way], Any]] = {
    "rope: positions": lambda way: _rope(way, 5),
    "append_kv: cache_seqlens": lambda way: _append(way, cache_seqlens=_int32(way, 0, FAR)),
    "append_kv: block_table": lambda way: _append(way, block_table=_int32(way, [1], [4])),
    "append_kv: slot_mapping": lambda way: _append(way, slot_mapping=_int32(way, -2, 3)),
    "append_kv: cu_seqlens": _append_ragged,
    "qkv_linear: slot_mapping": _qkv,
    "decode_attention: block_table": lambda way: _decode(way, 5, -1),
    "decode_attention: cache_seqlens": lambda way: _decode(way, 9, 1),
    "mla_decode: block_table": lambda way: _mla(way, 5, 4),
    "mla_decode: cache_seqlens": lambda way: _mla(way, 9, 1),
    "flash_attention: cu_seqlens_q": lambda way: _attention(way, "cu_seqlens_q", 0, 7, 11),
    "flash_attention: cu_seqlens_k": lambda way: _attention(way, "cu_seqlens_k", 0, 7, 3),
    "grouped_linear: offsets": _grouped,
    "moe_permute: experts": _permute,
    "moe_combine: row_id_map": _combine,
    "copy_blocks: block_mapping": lambda way: ops.copy_blocks(
        way.randn(3, 8), way.randn(3, 8), _int32(way, [0, 1], [-1, 9], [2, 3])
    ),
    "cu_seqlens: cache_seqlens": lambda way: ops.cu_seqlens(
        _int32(way, 1, 2),
        cache_seqlens=_int32(way, 0, 7),
        block_table=_int32(way, [0], [1]),
        page_size=8,
        out_slots=torch.empty(3, dtype=torch.int64, device=way.device),
    ),
    "verify_draft: draft_ids": lambda way: ops.verify_draft(
        torch.tensor([[1, 5]], device=way.device), way.randn(1, 3, 5)
    ),
    "verify_tree: parents": lambda way: ops.verify_tree(
        torch.tensor([[1, 3]], device=way.device), _int32(way, [-1, 1]), way.randn(1, 3, 5)
    ),
    "pad_input: cu_seqlens": lambda way: ops.pad_input(way.randn(3, 4), _int32(way, 0, 4), 2),
    "unpad_input: cu_seqlens": lambda way: ops.unpad_input(
        way.randn(2, 1, 4), _int32(way, 0, 2, 1), 3
    ),
    "embedding: ids": lambda way: _embed(way, 5, 4),
    "embedding: positions": lambda way: _embed(way, 4, -1),
}


@pytest.fixture
def no_checks_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a call that is captured, which cannot look at what is on the device."""
    for module, name in (
        ("attention.checks", "check_values"), ("kv_cache.decode_checks", "check_values"),
        ("kv_cache.append_checks", "check_routing"),
    ):  # fmt: skip
        found = importlib.import_module(f"kernel_hub.ops.{module}")
        monkeypatch.setattr(found, name, lambda *given, **options: None)


@pytest.mark.usefixtures("no_checks_before")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_names_its_table(way: Way, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forget(way.randn(1))
    monkeypatch.setenv("KERNEL_HUB_DEBUG", "1")
    with pytest.raises(TensorError, match=f"^{name}: expected ") as raised:
        CALLS[name](way)
    assert ";" not in str(raised.value)
    _rope(way, 4)  # it is said once


@pytest.mark.parametrize("name", CALLS)
def test_the_next_call_that_waits_names_it(
    way: Way, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget(way.randn(1))
    CALLS[name](way)
    _rope(way, 4)
    monkeypatch.setenv("KERNEL_HUB_DEBUG", "1")
    with pytest.raises(TensorError, match=f"^{name}: expected "):
        _rope(way, 4)
    _rope(way, 4)


def test_every_op_is_told_of_together(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    forget(way.randn(1))
    for call in CALLS.values():
        call(way)
    monkeypatch.setenv("KERNEL_HUB_DEBUG", "1")
    with pytest.raises(TensorError) as raised:
        _rope(way, 4)
    for name in CALLS:
        assert f"{name}: expected" in str(raised.value)


def test_inference_mode_makes_no_flag_that_cannot_be_cleared(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_words", "_flags"):
        monkeypatch.setattr(bounds, name, {})
    monkeypatch.setattr(bounds, "_ops", [])
    with torch.inference_mode():
        _rope(way, FAR)
    assert bounds.take(way.randn(1)) == {"rope": ("positions",)}
    assert bounds.take(way.randn(1)) == {}


def test_names_are_those_of_the_kernels_bits() -> None:
    headers = [path.read_text(encoding="utf-8") for path in (ROOT / "csrc").rglob("*.cu*")]
    bits = re.findall(r"k\w+Outside = 1 << (\d+), +// (\w+)", "".join(headers))
    found = sorted((int(bit), name) for bit, name in bits)
    assert [(i, name) for i, (name, _) in enumerate(bounds.TABLES)] == found


# These read lengths after kernels that have told of them, lengths or experts before one that will,
# or rows that one ahead of them has written.
FOLLOW = re.compile(
    r"flash_attention_backward\w*_convert|flash_attention_backward_sm90\w*_delta|decode_attention\w*_merge\w*|moe_permute_(count|rows_vec)"
)


def test_every_kernel_that_reads_indices_has_a_flag() -> None:
    seen = set()
    for name, archs in open_collection().manifest.cubins.items():
        for arch, entry in archs.items():
            for function, facts in entry.functions.items():
                params = {param.name for param in facts.params}
                if params & INDICES and not FOLLOW.fullmatch(function):
                    assert "flag" in params, f"{name} {arch} {function}"
                    seen |= params & INDICES
    assert seen == INDICES


def test_every_index_of_an_op_has_a_name() -> None:
    assert {name for name, _ in bounds.TABLES} == INDICES


def test_flags_that_were_begun_are_those_that_launches_get(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def begun(count: int, device: object, before: Any = None) -> Callable[[], torch.Tensor]:
        made.append(count)
        assert before is None or before() is None
        return lambda: torch.zeros(count, dtype=torch.int32)

    class Like:
        is_cuda, device = True, "cuda:5"

        def get_device(self) -> int:
            return 5

    like: Any = Like()
    for name in ("_words", "_flags", "_begun"):
        monkeypatch.setattr(bounds, name, {})
    monkeypatch.setattr(bounds, "zeros_begun", begun)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    bounds.begin(like)
    assert not made, "torch has not begun with CUDA, or captures: what is made now is the graph's"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    bounds.begin(like)
    bounds.begin(like)
    flags = [bounds.flag(op, like) for op in ("rope", "sample", "rope")]
    bounds.begin(like)
    assert len(made) == 1 and flags[0] is flags[2] is not None
    assert flags[1] is not None and flags[0].data_ptr() != flags[1].data_ptr()
