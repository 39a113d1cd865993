"""What is written may meet nothing else in memory, nor itself: every op, places drawn by lot.

The judge is a list of the bytes of each tensor.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from call_cases import NAMES, Case, draw
from plan_only import plan_only

from kernel_hub.errors import TensorError
from kernel_hub.ops import (
    append_kv,
    decode_attention,
    flash_attention,
    linear,
    merge_states,
    rms_norm,
    rope,
)
from kernel_hub.ops.core import overlap

STEP = 16  # bytes: what the kernels want rows to begin at
SEEDS = range(5)
each_op = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(params=["cpu", "planned", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The reference on the CPU; what a CUDA tensor goes through, without a launch; a GPU."""
    if request.param == "planned":
        plan_only(monkeypatch)
    yield "cuda" if request.param == "gpu" else "cpu"


def drawn(name: str, device: str) -> Iterator[tuple[Case, random.Random]]:
    if "fp8" in name and device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("e4m3 needs a GPU of compute capability 9.0")
    for seed in SEEDS:
        yield draw(name, seed, device), random.Random(f"overlap {name} {seed}")


def strides_of(shape: tuple[int, ...], padding: int) -> tuple[int, ...]:
    """Those of rows that lie `padding` elements apart."""
    strides = [1]
    for size in (*shape[1:-1], shape[-1] + padding)[::-1] if len(shape) > 1 else ():
        strides.insert(0, strides[0] * size)
    return tuple(strides)


def elements(shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The index in memory of each element, from the first."""
    found = np.zeros((), dtype=np.int64)
    for size, stride in zip(shape, strides, strict=True):
        found = found[..., None] + np.arange(size) * stride
    return found.reshape(-1)


def bytes_of(tensor: torch.Tensor) -> set[int]:
    at = tensor.data_ptr() + elements(tensor.shape, tensor.stride()) * tensor.itemsize
    return {int(byte) for first in at for byte in range(first, first + tensor.itemsize)}


def placed(
    memory: torch.Tensor, at: int, like: torch.Tensor, strides: tuple[int, ...]
) -> torch.Tensor:
    """A tensor like another, `at` bytes into `memory`, with its values."""
    made = memory[at:].view(torch.uint8)
    made = made[: made.numel() // like.itemsize * like.itemsize].view(like.dtype)
    made = made.as_strided(like.shape, strides, made.storage_offset())
    made.copy_(like)
    return made


def padding(lot: random.Random, key: str, tensor: torch.Tensor) -> int:
    """Elements between rows, where they may be apart."""
    if tensor.dim() < 2 or key in ("cos", "sin") or "scale" in key or tensor.shape[-1] < 8:
        return 0
    return STEP // tensor.itemsize * lot.choice([0, 0, 1, 2, 4])


@each_op
def test_what_is_written_meets_nothing_else(name: str, device: str) -> None:
    verdicts: set[str] = set()
    for case, lot in drawn(name, device):
        pairs = [(w, x) for w in case.written for x in case.tensors if x != w]
        for written, other in pairs:
            one, two = case.tensors[written], case.tensors[other]
            pads = [padding(lot, written, one), padding(lot, other, two)]
            if lot.random() < 0.3 and one.shape == two.shape:
                pads[1] = pads[0]
            layouts = [
                strides_of(tuple(t.shape), pad) for t, pad in zip((one, two), pads, strict=True)
            ]
            reaches = [
                -(-(int(elements(tuple(t.shape), s).max()) + 1) * t.itemsize // STEP)
                for t, s in zip((one, two), layouts, strict=True)
            ]
            memory = torch.zeros(
                STEP * (4 + sum(reaches) + 2 * max(reaches)), dtype=torch.uint8, device=device
            )
            memory = memory[-memory.data_ptr() % STEP :]
            for _ in range(6):
                distance = lot.choice(
                    [0, reaches[0], -reaches[1], lot.randint(-reaches[1], reaches[0])]
                )
                first = reaches[1] + 1
                changes = {
                    written: placed(memory, STEP * first, one, layouts[0]),
                    other: placed(memory, STEP * (first + distance), two, layouts[1]),
                }
                meets = not bytes_of(changes[written]).isdisjoint(bytes_of(changes[other]))
                is_in_place = (
                    (written, other) in case.in_place
                    and distance == 0
                    and (layouts[0] == layouts[1] or one.numel() == one.shape[-1])
                    and one.dtype == two.dtype
                )
                said = (case, written, other, distance * STEP, layouts)
                if meets and not is_in_place:
                    verdicts.add("refused")
                    # Of two that are written, either may be named.
                    with pytest.raises(TensorError, match=r"expected memory of its own"):
                        case.call(**changes)
                        pytest.fail(f"was taken: {said}")
                else:
                    verdicts.add("in place" if meets else "apart")
                    case.call(**changes)
    assert verdicts >= {"refused", "apart"}


@each_op
def test_pieces_between_each_other_pass(name: str, device: str) -> None:
    """All tensors of one shape but for the last dimension are columns of one buffer."""
    for case, _ in drawn(name, device):
        rows: dict[tuple[Any, ...], list[str]] = {}
        for key, tensor in case.tensors.items():
            if tensor.dim() > 1 and tensor.shape[-1] % 8 == 0 and key not in ("cos", "sin"):
                rows.setdefault((tensor.shape[:-1], tensor.dtype), []).append(key)
        for (shape, dtype), keys in rows.items():
            widths = [case.tensors[key].shape[-1] for key in keys]
            unit = STEP // dtype.itemsize
            buffer = torch.empty((*shape, sum(-(-w // unit) * unit for w in widths)), device=device)
            buffer, at, changes = buffer.to(dtype), 0, {}
            for key, width in zip(keys, widths, strict=True):
                changes[key] = buffer[..., at : at + width]
                changes[key].copy_(case.tensors[key])
                at += -(-width // unit) * unit
            case.call(**changes)


@each_op
def test_an_output_that_meets_itself(name: str, device: str) -> None:
    verdicts: set[bool] = set()
    have_rows = False  # neighbours alone never meet
    for case, lot in drawn(name, device):
        for written in case.written:
            like = case.tensors[written]
            have_rows |= like.dim() > 1
            unit = STEP // like.itemsize
            sizes = [n for n in like.shape[:-1] if n > 1]
            for _ in range(12):
                strides = [
                    *(unit * lot.choice([0, 1, 2, 3, 4, lot.randint(0, 4 * (1 + len(sizes)))])
                      for _ in like.shape[:-1]), 1,
                ]  # fmt: skip
                at = elements(tuple(like.shape), tuple(strides))
                memory = torch.zeros(int(at.max()) + unit, dtype=torch.float32, device=device)
                out = memory.to(like.dtype).as_strided(like.shape, strides)
                meets = len(set(at.tolist())) < len(at)
                verdicts.add(meets)
                if meets:
                    with pytest.raises(TensorError, match="elements do not overlap"):
                        case.call(**{written: out})
                        pytest.fail(f"was taken: {case}, {written}, {strides}")
                else:
                    try:
                        case.call(**{written: out})
                    except TensorError as refusal:  # of strides no kernel has
                        assert "overlap" not in str(refusal), (case, written, strides)
    assert True in verdicts or not have_rows


@each_op
def test_a_call_before_is_no_excuse(name: str, device: str) -> None:
    """The plan, and the addresses found apart, are those of calls that were fine."""
    for case, _ in drawn(name, device):
        for _ in range(2):
            case.call()
        for written in case.written:
            for other in case.inputs:
                one, two = case.tensors[written], case.tensors[other]
                if other == written or one.shape != two.shape or one.dtype != two.dtype:
                    continue
                if (written, other) in case.in_place:
                    case.call(**{written: two})
                    continue
                with pytest.raises(TensorError, match="memory of its own"):
                    case.call(**{written: two})


def test_the_cases_of_the_attack(device: str) -> None:
    x, weight = torch.randn(8, 16, device=device), torch.ones(16, device=device)
    with pytest.raises(TensorError, match=r"out: expected memory of its own, found that of x"):
        rms_norm(x[:-1], weight, out=x[1:])
    with pytest.raises(TensorError, match="do not overlap"):
        rms_norm(x[:4], weight, out=x.view(-1).as_strided((4, 16), (8, 1)))
    a = torch.randn(16, 16, device=device).half()
    with pytest.raises(TensorError, match="out: expected memory of its own, found that of a"):
        linear(a, torch.randn(16, 16, device=device).half(), out=a)


def test_pieces_of_one_projection_in_place(device: str) -> None:
    """q, k and v of one tensor, rotated where they are; norms of heads where they are."""
    qkv = torch.randn(2, 5, 8, 16, device=device).half()
    cos, sin = torch.randn(5, 8, device=device), torch.randn(5, 8, device=device)
    q, k, v = qkv.split((4, 2, 2), 2)
    wanted = rope(q.clone(), k.clone(), cos, sin)
    got = rope(q, k, cos, sin, out_q=q, out_k=k)
    assert got[0] is q
    normed = rms_norm(q.clone(), torch.ones(16, device=device).half())
    rms_norm(q, torch.ones(16, device=device).half(), out=q)
    cache = torch.zeros(2, 9, 2, 16, device=device).half()
    append_kv(k, v, cache, cache.clone(), q=q, cos=cos, sin=sin, out_q=q, out_k=k)
    attended = flash_attention(k, k, v, out=q[:, :, :2])
    merge_states(
        attended, torch.zeros(2, 2, 5, device=device), v, torch.zeros(2, 2, 5, device=device),
        out=attended,
    )  # fmt: skip
    assert wanted[0].shape == normed.shape


def test_in_place_is_right_on_the_cpu() -> None:
    for name in NAMES:
        for seed in SEEDS:
            case = draw(name, seed)
            for out, x in sorted(case.in_place):
                if out not in case.tensors or x not in case.tensors:
                    continue
                case.call()
                wanted = case.tensors[out].clone()
                same = case.tensors[x].clone()
                fresh = {key: case.tensors[key].clone() for key in case.caches}
                case.call(**{out: same, x: same}, **fresh)
                assert torch.equal(wanted, same), (case, out, x)


def test_what_is_too_hard_to_prove_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (9, 8, 7, 6, 5)
    layout = (shape, (1001, 999, 997, 991, 983), 2)
    assert overlap._meet(layout, layout, 0)
    monkeypatch.setattr(overlap, "_MAX_WORK", 1)
    assert not overlap._meet(layout, layout, 1_000_002)
    many = ((2,) * 70, tuple(2**place for place in range(70)), 2)  # more than NumPy's dimensions
    assert not overlap._meet(many, many, 2)


def test_addresses_found_apart_are_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_only(monkeypatch)
    monkeypatch.setattr(overlap, "_MAX_APART", 4)
    monkeypatch.setattr(overlap, "_num_apart", 0)
    for spans in list(overlap._spans):
        spans.apart.clear()
    weight, memory = torch.ones(16), torch.zeros(64, 16)
    for _ in range(2):
        for row in range(0, 60, 2):
            rms_norm(memory[row : row + 2], weight, out=memory[row + 2 : row + 4])
            assert sum(len(spans.apart) for spans in overlap._spans) <= 4
            with pytest.raises(TensorError, match="memory of its own"):
                rms_norm(memory[row : row + 2], weight, out=memory[row + 1 : row + 3])


@pytest.mark.parametrize("op", ["flash_attention", "decode_attention", "append_kv"])
def test_a_table_that_moved_into_an_output(op: str, device: str) -> None:
    """All other addresses are those of a call that was fine."""
    memory = torch.zeros(1 << 16, dtype=torch.float16, device=device)
    cache = torch.zeros(4, 16, 2, 64, dtype=torch.float16, device=device)
    values = cache.clone()
    q, new = memory[: 2 * 128].view(2, 1, 2, 64), memory[1024 : 1024 + 256].view(2, 1, 2, 64)
    out = memory[4096 : 4096 + 256].view(2, 1, 2, 64)
    lengths = torch.ones(2, dtype=torch.int32, device=device)
    table = torch.tensor([[0], [1]], dtype=torch.int32, device=device)
    inside = out.flatten()[:4].view(torch.int32).view(2, 1)

    def call(table: torch.Tensor) -> None:
        if op == "append_kv":
            append_kv(new, new, cache, values, cache_seqlens=lengths, block_table=table,
                      out_k=out)  # fmt: skip
        else:
            run = decode_attention if op == "decode_attention" else flash_attention
            run(q, cache, cache, cache_seqlens=lengths, block_table=table, out=out)

    for _ in range(2):
        call(table)
        with pytest.raises(TensorError, match="memory of its own, found that of block_table"):
            call(inside)
