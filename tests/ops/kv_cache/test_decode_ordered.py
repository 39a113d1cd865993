"""Decode steps by clusters that keep attention's order: the bits of whole tiles, which are those of
a prompt's rows (csrc/kv_cache/decode_ordered_sm90.cu)."""

from __future__ import annotations

import math
import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from bits import same_bits
from emulated_attention import hopper_attention
from ways import Way

from kernel_hub.ops import decode_attention
from kernel_hub.ops.core.device import PlannedGpu, pretend
from kernel_hub.ops.kv_cache import decode_ordered as ordered

DRAWN = 60


def given_of(
    way: Way, lengths: tuple[int, ...], heads: tuple[int, int], head_dim: int, page_size: int,
    dtype: torch.dtype = torch.bfloat16, scale: float = 3.0,
) -> dict[str, Any]:  # fmt: skip
    """A step's arguments; without pages where page_size is 0."""
    batch_size, most, table = len(lengths), max(*lengths, 1), None
    shape = (batch_size, most + 3)
    if page_size:
        num_pages = -(-most // page_size)
        places = torch.randperm(batch_size * num_pages, generator=torch.Generator().manual_seed(0))
        table = places.int().view(batch_size, num_pages).to(way.device)
        shape = (batch_size * num_pages, page_size)
    k, v = (way.randn(*shape, heads[1], head_dim, dtype=dtype, seed=i) for i in (1, 2))
    q = (way.randn(batch_size, 1, heads[0], head_dim, seed=3) * scale).to(dtype)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=way.device)
    return {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": seqlens, "block_table": table}


def found_by(
    way: Way, patch: pytest.MonkeyPatch, given: dict[str, Any], choice: bool,
    cluster: int | None = None, **more: Any,
) -> Any:  # fmt: skip
    """(out, lse) by these kernels or by whole tiles."""
    planned: list[Any] = []
    plan = ordered.plan
    with patch.context() as inner, nullcontext() if way.is_gpu else hopper_attention(inner, 3):
        if not way.is_gpu:
            inner.setattr(ordered, "applies", ordered.fits)
        inner.setattr(ordered, "choice", choice)
        inner.setattr(ordered, "cluster", cluster)
        inner.setattr(ordered, "plan", lambda step: planned.append(step) or plan(step))
        inner.setattr(ordered, "_plans", type(ordered._plans)())
        found = decode_attention(**given, return_lse=True, deterministic="batch", **more)
    assert bool(planned) == choice
    return found


def check(way: Way, patch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    whole = found_by(way, patch, given, False)
    for cluster in (4, 8):
        out = torch.full_like(given["q"], float("nan"))
        found = found_by(way, patch, given, True, cluster, out=out)
        assert found[0] is out
        for name, a, b in zip(("out", "lse"), found, whole, strict=True):
            same_bits(a, b, name=f"{name} by clusters of {cluster}")


def test_what_asks_for_more_is_for_whole_tiles_whatever_was_planned(
    hopper_way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = given_of(hopper_way, (130, 50), (4, 2), 128, 16)
    sinks = hopper_way.randn(4, dtype=torch.bfloat16, seed=5)
    ways: list[dict[str, Any]] = [{"window_size": (15, 0)}, {"softcap": 5.0}, {"sinks": sinks}]
    with (
        monkeypatch.context() as inner,
        nullcontext() if hopper_way.is_gpu else hopper_attention(inner, 3),
    ):
        if not hopper_way.is_gpu:
            inner.setattr(ordered, "applies", ordered.fits)

        def found(choice: bool, more: dict[str, Any]) -> Any:
            inner.setattr(ordered, "choice", choice)
            return decode_attention(**given, **more, deterministic="batch")

        plain = found(True, {})
        for more in ways:
            same_bits(found(True, more), found(False, more), name=str(*more))
            assert not torch.equal(found(True, more), plain)
            same_bits(found(True, {}), plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("lengths", "heads", "head_dim", "page_size"),
    [
        ((130,), (4, 1), 128, 16), ((1, 129, 0, -1, 700), (8, 2), 128, 64),
        ((300, 128), (7, 1), 128, 0), ((1500,), (2, 2), 128, 32), ((9100,), (3, 1), 128, 16),
        ((700, 1500, 0), (4, 1), 128, 16), ((40, 2500, 1025), (2, 1), 128, 16),
    ],
)  # fmt: skip
def test_bits(
    hopper_way: Way, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype,
    lengths: tuple[int, ...], heads: tuple[int, int], head_dim: int, page_size: int,
) -> None:  # fmt: skip
    """A cluster scores 2,048 keys at once, in two places in turn: 9,100 come back to each twice. Of
    few keys, as its length says and not the room, two warps share each 128."""
    given = given_of(hopper_way, lengths, heads, head_dim, page_size, dtype)
    check(hopper_way, monkeypatch, given)


def spoil(given: dict[str, Any], lengths: tuple[int, ...]) -> None:
    """What no sequence has is nan."""
    k, v, table = given["k_cache"], given["v_cache"], given["block_table"]
    seen = torch.zeros(k.shape[:2], dtype=torch.bool, device=k.device)
    for row, length in enumerate(lengths):
        at = torch.arange(max(length, 0), device=k.device)
        pages, places = torch.full_like(at, row), at
        if table is not None:
            pages, places = table[row].long()[at // k.shape[1]], at % k.shape[1]
        is_there = (pages >= 0) & (pages < len(k))
        seen[pages[is_there], places[is_there]] = True
    k[~seen] = v[~seen] = math.nan


@pytest.mark.parametrize("index", range(DRAWN))
def test_drawn(hopper_way: Way, monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    lot, is_gpu = random.Random(f"decode ordered {index}"), hopper_way.is_gpu
    kv_heads = lot.choice((1, 2, 8) if is_gpu else (1, 2))
    most = lot.choice((40, 300, 2000, 9000, 20_000) if is_gpu else (40, 300, 1025, 2100, 4300))
    batch_size = lot.choice((1, 1, 2, 5, 20) if is_gpu else (1, 1, 2))
    lengths = tuple(lot.randrange(-1, most) for _ in range(batch_size))
    heads = (kv_heads * lot.choice((1, 2, 4, 5, 7, 8)), kv_heads)
    given = given_of(
        hopper_way, lengths, heads, 128, lot.choice((0, 16, 48, 64)),
        lot.choice((torch.bfloat16, torch.float16)), lot.choice((0.5, 3.0)),
    )  # fmt: skip
    table = given["block_table"]
    if table is not None and lot.random() < 0.3:  # a page that is not there
        row, column = lot.randrange(table.shape[0]), lot.randrange(table.shape[1])
        table[row, column] = lot.choice((-1, 1 << 20))
    spoil(given, lengths)
    check(hopper_way, monkeypatch, given)


def test_pages_that_are_not_there(hopper_way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are zeros, and nothing outside the caches is read."""
    given = given_of(hopper_way, (300, 200), (4, 2), 128, 16)
    given["block_table"][0, 3], given["block_table"][1, 1] = -1, 1 << 20
    check(hopper_way, monkeypatch, given)


@pytest.mark.parametrize(
    "odd", ["softcap", "window", "group", "pages", "head_dim", "alignment", "tokens"]
)
def test_steps_for_whole_tiles(hopper_way: Way, monkeypatch: pytest.MonkeyPatch, odd: str) -> None:
    heads = (18, 2) if odd == "group" else (4, 2)
    given = given_of(
        hopper_way, (40, 20), heads, 64 if odd == "head_dim" else 128, 8 if odd == "pages" else 16
    )
    more: dict[str, Any] = {"softcap": 5.0} if odd == "softcap" else {}
    if odd == "window":
        more = {"window_size": (3, 0)}
    if odd == "tokens":
        given["q"] = given["q"].repeat(1, 2, 1, 1)
    if odd == "alignment":
        given["q"] = torch.cat([given["q"][..., :4], given["q"]], -1)[..., 4:]
    filled = [given.get(name) for name in ("q", "k_cache", "v_cache", "cache_seqlens")]
    step = ordered.DecodeGiven(
        *filled, None, None, given["block_table"], *[None] * 8, False, 0, 0.1,
        more.get("window_size", (-1, 0))[0], more.get("softcap", 0.0), 0, None,
    )  # fmt: skip
    assert not (ordered.fits(step) and step.q.data_ptr() % 16 == 0)


def test_which_clusters() -> None:
    """Of eight blocks where all find a place, of long caches; none where too many wait."""

    def found(batch_size: int, tokens: int, bytes_a_us: float = 4.9e6) -> tuple[bool, bool]:
        cache = torch.empty(batch_size, tokens, 8, 128, dtype=torch.bfloat16, device="meta")
        q = torch.empty(batch_size, 1, 32, 128, dtype=torch.bfloat16, device="meta")
        step = ordered.DecodeGiven(q, cache, cache, *[None] * 12, False, 0, 0.1, -1, 0.0, 0, None)
        with pretend(PlannedGpu((9, 0), 132, peak_bytes_a_us=bytes_a_us)):
            return ordered.is_faster(step), ordered.is_wide_faster(step)

    assert found(1, 8192) == found(1, 2048) == (True, True)
    assert found(1, 1024) == found(2, 8192) == found(6, 1024) == (True, False)
    assert found(8, 1024) == found(6, 256) == (False, False)
    # Where memory is fast: two full rounds, three of long caches.
    h100 = 3.35e6
    assert found(7, 1024) == found(10, 8192) == (True, False)
    assert found(7, 1024, h100) == found(10, 8192, h100) == found(11, 8192) == (False, False)
