"""Steps of decode_attention that attention's kernels of equal shares take: which, and whether they
are right. On the CPU the kernels' source runs in the emulator of Hopper, with few multiprocessors.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from decode_cases import DecodeCase, random_decode_case, run_decode
from decode_in_shares import SPLIT, in_shares
from decode_step import E4M3, Step, check_replays
from emulated_attention import hopper_attention
from ways import Way

from kernel_hub.ops import decode_attention
from kernel_hub.ops.attention import forward_split_sm90 as split
from kernel_hub.ops.core import tensor_maps
from kernel_hub.ops.core.device import PlannedGpu, pretend
from kernel_hub.ops.kv_cache import decode_plan, decode_sm90
from kernel_hub.ops.kv_cache.decode_plan import DecodeGiven
from kernel_hub.testing.compare import check

LOTS, LARGE = 20, 6  # cases of a lot on a GPU; one in the emulator
H200 = PlannedGpu((9, 0), 132)


@pytest.fixture
def shares(hopper_way: Way, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Way, list[str]]]:
    """The way, and the functions of the launches that these kernels took."""
    with in_shares(monkeypatch, hopper_way) as taken:
        yield hopper_way, taken


def drawn_case(index: int, is_small: bool) -> DecodeCase:
    """Any step that these kernels can take."""
    generator = random.Random(f"shares {index}")
    case = random_decode_case(generator)
    group = generator.choice((1, 2, 3, 5, 8, 16, 48))
    lengths = tuple(min(length, 700) for length in case.lengths[:3]) if is_small else case.lengths
    lengths = (lengths[0] + 1, *lengths[1:])  # else there may be no room
    return dataclasses.replace(
        case, dtype=case.dtype.replace("fp32", "bf16"), is_e4m3=False, has_scales=False,
        alibi="", appends=False, rotary_dim=0,
        has_bias=False, num_splits=0, lengths=lengths, num_kv_heads=min(case.num_kv_heads, 3),
        num_heads=min(case.num_kv_heads, 3) * group, seqlen_q=generator.randint(1, 16),
        page_size=generator.choice((8, 16, 64, 128, 256)),
    )  # fmt: skip


@pytest.mark.parametrize("lot", range(LOTS))
def test_drawn(shares: tuple[Way, list[str]], lot: int) -> None:
    way, taken = shares
    indices = range(lot * LARGE, (lot + 1) * LARGE) if way.is_gpu else (lot,)
    cases = [drawn_case(index, not way.is_gpu) for index in indices]
    for case in cases:
        run_decode(case, way.device)
    assert len(taken) == len(cases)


@pytest.mark.parametrize("head_dim", [64, 128, 256, 80, 192])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_kernel(shares: tuple[Way, list[str]], dtype: torch.dtype, head_dim: int) -> None:
    way, taken = shares
    step = Step(way, [300, 0, 5, 129], dtype, heads=(16, 2), head_dim=head_dim, seqlen_q=7)
    step.check()
    step.check(window_size=(70, 0), softcap=20.0)
    widths = [
        min(
            body.head_dim
            for body in SPLIT.BODIES
            if body.mask == mask and body.head_dim >= head_dim
        )
        for mask in ("causal", "window")
    ]
    named = [name.rpartition("hdim")[2].removesuffix("_rows192") for name in taken]
    few_rows = "128_causal_rows64" if head_dim <= 128 else ""
    assert named[0] in (f"{widths[0]}_causal", few_rows) and named[1:] == [f"{widths[1]}_window"]


def test_a_plan_made_without_lse_writes_it(shares: tuple[Way, list[str]]) -> None:
    way, taken = shares
    step = Step(way, [300, 40], heads=(8, 1), seqlen_q=5)
    caches = [cache.tensor for cache in step.caches]
    decode_attention(step.q, *caches, **step.options)
    lse = decode_attention(step.q, *caches, **step.options, return_lse=True)[1]
    check(lse, step.truth(torch.float64)[1], step.truth(step.dtype)[1], atol=1e-4)
    assert len(taken) == 2


def test_large_scores_and_minus_inf(shares: tuple[Way, list[str]]) -> None:
    way, taken = shares
    step = Step(way, [300, 40], heads=(4, 2), seqlen_q=3)
    step.q.mul_(1000)
    step.caches[0].tensor[0, 7, 0, 3] = -torch.inf
    step.q[0, :, :2, 3] = step.q[0, :, :2, 3].abs()
    step.check()
    assert taken


LEFT: dict[str, dict[str, Any]] = {
    "append": {"append": True}, "rope": {"rope": 64}, "bias": {"bias": True},
    "e4m3": {"cache_dtype": E4M3},
    "pages of 20": {"page_size": 20, "max_seqlen": 320},
    "num_splits": {"num_splits": 2}, "alibi": {"alibi_slopes": True},
    "a scale below 0": {"softmax_scale": -0.2},
}  # fmt: skip


@pytest.mark.parametrize("what", LEFT)
def test_what_they_do_not_take(shares: tuple[Way, list[str]], what: str) -> None:
    way, taken = shares
    given = dict(LEFT[what])
    fields = {field.name for field in dataclasses.fields(Step)}
    made = {name: given.pop(name) for name in list(given) if name in fields}
    step = Step(way, [100, 33, 0], heads=(8, 1), seqlen_q=5, **made)
    if given.pop("alibi_slopes", False):
        given["alibi_slopes"] = 0.3 / torch.arange(1, 9, device=way.device)
    step.check(**given)
    assert not taken


@pytest.mark.parametrize("which", ["q", "out"])
def test_rows_that_are_not_aligned(shares: tuple[Way, list[str]], which: str) -> None:
    way, taken = shares
    step = Step(way, [100, 33, 0], heads=(8, 1), seqlen_q=5)
    truth, own = (step.truth(dtype)[0] for dtype in (torch.float64, step.dtype))
    for shift in (0, 1):  # layouts, and so plans, are the same
        q, out = (
            torch.empty(step.q.numel() + 1, dtype=step.dtype, device=way.device)[first:][
                : step.q.numel()
            ].view(step.q.shape)
            for first in ((shift, 0) if which == "q" else (0, shift))
        )
        q.copy_(step.q)
        decode_attention(q, *(x.tensor for x in step.caches), **step.options, out=out)
        check(out, truth, own)
        assert len(taken) == 1


@pytest.mark.gpu
def test_graph_with_growing_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these kernels need a GPU of compute capability 9.0")
    way = Way("gpu", "cuda")
    with in_shares(monkeypatch, way) as taken:
        grow(way)
    assert taken


def grow(way: Way) -> None:
    step = Step(way, [4, 5, 250], heads=(16, 2), seqlen_q=4, page_size=16)
    for cache in step.caches:
        cache.tensor.nan_to_num_(0.5)
    check_replays(step, 20, more=3)


def is_chosen(
    batch: int, seqlen_q: int, tokens: int, heads: tuple[int, int], head_dim: int = 128,
    window_left: int = -1, page_size: int = 0,
) -> bool:  # fmt: skip
    """Whether a step of these sizes is theirs, on an H200."""
    num_heads, num_kv_heads = heads
    shape = (batch, tokens, num_kv_heads, head_dim)
    if page_size:
        shape = (batch * (tokens // page_size), page_size, num_kv_heads, head_dim)
    half = {"device": "meta", "dtype": torch.bfloat16}
    q, cache = torch.empty(batch, seqlen_q, num_heads, head_dim, **half), torch.empty(shape, **half)
    table = torch.empty(batch, tokens // page_size, device="meta") if page_size else None
    given = DecodeGiven(
        q, cache, cache, torch.empty(batch, device="meta"), None, None, table, None, None, None,
        *[None] * 5, False, 0, head_dim**-0.5, window_left, 0.0, 0, torch.empty_like(q),
    )  # fmt: skip
    rows = seqlen_q * (num_heads // num_kv_heads)
    variant = decode_plan.choose_variant(head_dim, 2, rows, window_left >= 0, is_sm90=True)
    return decode_sm90.applies(given, variant)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Planned for one, wherever tensors are."""
    with hopper_attention(monkeypatch, 132), pretend(H200):
        yield


# Of long caches that several blocks of rows would read.
THEIRS: list[dict[str, Any]] = [
    {"batch": 15, "seqlen_q": 13, "tokens": 9856, "heads": (64, 8), "page_size": 128},
    {"batch": 24, "seqlen_q": 10, "tokens": 70_912, "heads": (16, 2), "page_size": 256},
    {"batch": 64, "seqlen_q": 12, "tokens": 4544, "heads": (24, 1)},
    {"batch": 5, "seqlen_q": 10, "tokens": 3840, "heads": (48, 1), "page_size": 256},
    {"batch": 64, "seqlen_q": 16, "tokens": 4096, "heads": (64, 8), "window_left": 2000},
    # One block of 32 rows.
    {"batch": 4, "seqlen_q": 4, "tokens": 8192, "heads": (64, 8)},
    {"batch": 71, "seqlen_q": 14, "tokens": 5120, "heads": (8, 4), "page_size": 256},
]  # fmt: skip
# One block of rows; caches that are short; a window that is.
OURS: list[dict[str, Any]] = [
    {"batch": 16, "seqlen_q": 1, "tokens": 8192, "heads": (32, 8)},
    {"batch": 4, "seqlen_q": 2, "tokens": 131_072, "heads": (64, 8)},
    {"batch": 2, "seqlen_q": 13, "tokens": 131_072, "heads": (12, 2), "window_left": 100},
    {"batch": 300, "seqlen_q": 13, "tokens": 9856, "heads": (64, 8)},  # their line holds 256
]  # fmt: skip


@pytest.mark.parametrize("sizes", THEIRS, ids=str)
def test_long_caches_of_many_rows_are_theirs(h200: None, sizes: dict[str, Any]) -> None:
    assert is_chosen(**sizes)


def test_rows_that_begin_within_what_memory_reads_are_theirs(h200: None) -> None:
    with pretend(PlannedGpu((9, 0), 132, peak_bytes_a_us=3.35e6)):
        sizes = {"batch": 145, "seqlen_q": 1, "heads": (8, 8)}
        assert is_chosen(tokens=8704, head_dim=80, **sizes)
        assert not is_chosen(tokens=8704, head_dim=96, **sizes)
        assert not is_chosen(tokens=1024, head_dim=80, **sizes)


@pytest.mark.parametrize("sizes", OURS, ids=str)
def test_the_others_are_not(h200: None, sizes: dict[str, Any]) -> None:
    assert not is_chosen(**sizes)


@pytest.mark.parametrize("lot", range(150))
def test_what_is_chosen_of_drawn_sizes(h200: None, lot: int) -> None:
    generator = random.Random(f"chosen {lot}")
    group, num_kv_heads = generator.choice((1, 4, 5, 8, 12, 48)), generator.choice((1, 2, 8))
    seqlen_q, head_dim = generator.randint(1, 16), generator.choice((64, 80, 128, 192, 256))
    sizes = {
        "batch": generator.choice((1, 2, 7, 30, 120, 256)), "seqlen_q": seqlen_q,
        "heads": (group * num_kv_heads, num_kv_heads), "head_dim": head_dim,
    }  # fmt: skip
    tokens = 256 * generator.choice((1, 3, 8, 20, 50, 200))
    is_theirs = is_chosen(tokens=tokens, **sizes)
    # A launch serves all lengths: what is on the device is asked by nobody (it is on none here).
    assert is_chosen(tokens=tokens, page_size=generator.choice((16, 64, 256)), **sizes) == is_theirs
    block_rows = decode_plan.choose_variant(head_dim, 2, group * seqlen_q, False, is_sm90=True).rows
    if group * seqlen_q <= block_rows:  # of many columns, more rows than 16, or long caches
        is_wide = seqlen_q > 1 and head_dim > 128
        is_long = min(seqlen_q, sizes["batch"]) > 1 and 8192 < tokens <= 16_384
        has_rows = group * seqlen_q > 16 or is_long
        assert not is_theirs or is_wide or (has_rows and 64 < head_dim <= 128)
    elif is_theirs:  # the more there is to read again, the more so
        assert is_chosen(tokens=4 * tokens, **sizes)


def test_keys_and_values_are_read_by_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by pairs of them, which an H200's memory gives less of (docs/notes)."""
    made: list[Any] = []
    monkeypatch.setattr(tensor_maps, "known", {})
    monkeypatch.setattr(tensor_maps, "make", lambda _key, _of, boxes: made.append(boxes) or b"map")
    q, k = (torch.empty(2, tokens, 2, 128, dtype=torch.bfloat16) for tokens in (3, 256))
    split.maps(split.Packed(2, 3, 64, 0, 0, None), q, k, k.clone())
    assert [boxes.promotion for boxes in made] == ["128B", "128B", None]
