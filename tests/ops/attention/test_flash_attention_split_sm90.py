"""Equal shares of few queries over many keys: their plan, and whether they are right.

On the CPU the kernels' source runs in the emulator of Hopper, on a GPU of few multiprocessors.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_cases import Case, run
from attention_devices import taken
from attention_split_random import EMULATED, random_split_case
from bits import same_bits
from emulated_attention import hopper_attention
from ways import Way

from kernel_hub.ops import flash_attention
from kernel_hub.ops.attention.problem import Problem
from kernel_hub.ops.core.device import has_wgmma
from kernel_hub.ops.core.launch import forget_all

SM90: Any = importlib.import_module("kernel_hub.ops.attention.forward_sm90")
SPLIT: Any = importlib.import_module("kernel_hub.ops.attention.forward_split_sm90")
COSTS: Any = importlib.import_module("kernel_hub.ops.attention.split_costs")
TILES: Any = importlib.import_module("kernel_hub.ops.attention.tile_costs")
H200_SMS = 132
DRAWN = 150
EMULATED_DRAWN = 24
FEW_ROWS = 64  # of a tile of which two blocks run on a multiprocessor


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The functions of the launches that these kernels took: whatever they can take."""
    if not has_wgmma(torch.cuda.get_device_capability()):
        pytest.skip("not compute capability 9.0")
    found = taken(monkeypatch, SPLIT, lambda planned, *_: str(planned.function.name))
    monkeypatch.setattr(SPLIT, "choice", True)
    monkeypatch.setattr(SM90, "_SHORT", 0)  # short sequences too
    forget_all()
    yield found
    forget_all()


@pytest.fixture
def pieces(hopper_way: Way, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The blocks of the launches that the emulator ran: whatever these kernels can take."""
    if hopper_way.is_gpu:
        pytest.skip("the tests below do that with larger cases")
    monkeypatch.setattr(SPLIT, "choice", True)
    yield taken(monkeypatch, SPLIT, lambda planned, *_: int(planned.grid[0]))


def force_rows(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Tiles of so many rows, where there are such."""
    others = [body for body in SPLIT.BODIES if body.stated.sizes["block_m"] != rows]
    kept = [body for body in SPLIT.BODIES if body not in others]
    there = {(body.mask, body.head_dim) for body in kept}
    if rows == FEW_ROWS:  # heads that are narrower have these too, and here prompts
        monkeypatch.setattr(COSTS, "is_chunk", lambda sizes: True)
        monkeypatch.setattr(TILES, "wants_few_rows", lambda problem, _: problem.widest_head <= 128)
        there |= {(mask, width) for mask in ("causal", "window") for width in (64, 96)}
    kept += [body for body in others if (body.mask, body.head_dim) not in there]
    monkeypatch.setattr(SPLIT, "BODIES", kept)


@pytest.mark.parametrize("index", range(EMULATED_DRAWN))
def test_drawn_emulated(pieces: list[int], monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    generator = random.Random(f"emulated {index}")
    monkeypatch.setattr(COSTS, "LEAST_BLOCKS", generator.choice((1, 2, 3)))
    monkeypatch.setattr(SPLIT, "cuts_tiles", generator.choice((True, True, False)))
    force_rows(monkeypatch, generator.choice((FEW_ROWS, 128, 192)))
    monkeypatch.setattr(SPLIT, "has_parts", generator.choice((True, True, False)))
    monkeypatch.setattr(SPLIT, "prompt_parts", generator.choice((None, None, 2, 3, 7)))
    monkeypatch.setattr(SPLIT, "alone", (None, True, False)[index % 3])
    with hopper_attention(monkeypatch, generator.choice((1, 2, 3, 7, 13, 61))):
        run(random_split_case(generator, EMULATED), "cpu")
    assert pieces


# (seqlen_q, keys in blocks, multiprocessors): chunks narrower than a share, of which one lies
# between two others' in it; last two chunks that share what is left; tiles in one share; more
# shares than blocks of keys.
LINES = [(640, 8, 8), (640, 9, 7), (400, 3, 4), (130, 5, 61), (700, 11, 6), (300, 7, 2)]


@pytest.mark.parametrize(("seqlen_q", "blocks", "num_sms"), LINES)
@pytest.mark.parametrize("causal", [False, True])
def test_lines_emulated(
    pieces: list[int],
    monkeypatch: pytest.MonkeyPatch,
    seqlen_q: int,
    blocks: int,
    num_sms: int,
    causal: bool,
) -> None:
    monkeypatch.setattr(COSTS, "LEAST_BLOCKS", 1)
    monkeypatch.setattr(SPLIT, "cuts_tiles", True)
    case = Case(num_heads=1, causal=causal, lengths_q=(seqlen_q,), lengths_k=(128 * blocks - 3,))
    with hopper_attention(monkeypatch, num_sms):
        run(case, "cpu")
    assert pieces


@pytest.mark.parametrize("head_dim", [72, 96, 136, 192])
@pytest.mark.parametrize("rows", [FEW_ROWS, 128, 192])
@pytest.mark.parametrize("is_cut", [True, False])
def test_widths_between_emulated(
    pieces: list[int], monkeypatch: pytest.MonkeyPatch, head_dim: int, rows: int, is_cut: bool
) -> None:
    monkeypatch.setattr(SPLIT, "cuts_tiles", is_cut)
    force_rows(monkeypatch, rows)
    case = Case(
        num_heads=6, num_kv_heads=2, head_dim=head_dim, causal=True, seed=head_dim, layout="paged",
        page_size=32, lengths_q=(150,) * 3, lengths_k=(900, 150, 431), sinks="fp32", twice=True,
    )  # fmt: skip
    with hopper_attention(monkeypatch, 5):
        run(case, "cpu")
    assert pieces


@pytest.mark.parametrize("group", [1, 3, 5, 7, 16, 71])
@pytest.mark.parametrize("is_cut", [True, False])
def test_groups_emulated(
    pieces: list[int], monkeypatch: pytest.MonkeyPatch, group: int, is_cut: bool
) -> None:
    monkeypatch.setattr(SPLIT, "cuts_tiles", is_cut)
    case = Case(
        num_heads=group, causal=True, seed=group, lengths_q=(37,), lengths_k=(900,), sinks="fp32"
    )
    with hopper_attention(monkeypatch, 7):
        run(case, "cpu")
    assert max(pieces) > 1 or not is_cut


@pytest.mark.parametrize("window", [(-1, -1), (2000, 0)])
@pytest.mark.parametrize("layout", ["cache", "varlen_cache"])
def test_long_tiles_in_turn_are_cut(
    pieces: list[int], monkeypatch: pytest.MonkeyPatch, layout: str, window: tuple[int, int]
) -> None:
    """Into parts of a share at most, which go to memory; windows' are not."""
    monkeypatch.setattr(SPLIT, "cuts_tiles", False)
    monkeypatch.setattr(SPLIT, "alone", False)
    rooms = taken(monkeypatch, SPLIT, lambda planned, *_: int(planned.maps.floats))
    case = Case(
        num_heads=2, num_kv_heads=2, causal=True, layout=layout, twice=True, window_size=window,
        lengths_q=(40,) * 12, lengths_k=(100, 2900, 0, 70, 1500, 130, 64, 5, 300, 129, 80, 700),
    )  # fmt: skip
    with hopper_attention(monkeypatch, 5):
        run(case, "cpu")
    assert all(rooms) if window == (-1, -1) else not any(rooms)


@pytest.mark.parametrize(("seqlen", "num_sms"), [(700, 7), (250, 61)])
@pytest.mark.parametrize("together", [None, 1, 3, 4])
def test_prompts_run_together_in_turn(
    pieces: list[int], monkeypatch: pytest.MonkeyPatch, together: int | None, seqlen: int,
    num_sms: int,
) -> None:  # fmt: skip
    """The last tiles of several kv heads first: drawn, or dealt where rounds are few."""
    monkeypatch.setattr(SPLIT, "cuts_tiles", False)
    numbers = taken(monkeypatch, SPLIT, lambda planned, *_: planned.numbers)
    if together is not None:
        monkeypatch.setattr(TILES, "heads_a_group", lambda *_: 4 * together)
    case = Case(
        num_heads=8, num_kv_heads=2, causal=True, lengths_q=(seqlen,) * 5,
        lengths_k=(seqlen,) * 5, twice=True,
    )  # fmt: skip
    with hopper_attention(monkeypatch, num_sms):
        run(case, "cpu")
    assert pieces
    longest, found = numbers[0][20:22]
    assert (longest > 1 << 29) == (num_sms == 7) and found == (together or 10)


@pytest.mark.parametrize("layout", ["bhsd", "cache", "paged"])
@pytest.mark.parametrize("parts", [2, 3, 5])
def test_prompts_in_parts_that_are_drawn(
    pieces: list[int], monkeypatch: pytest.MonkeyPatch, layout: str, parts: int
) -> None:
    """More of them than places for pieces of shares; those that see no keys are passed over."""
    monkeypatch.setattr(SPLIT, "cuts_tiles", True)
    monkeypatch.setattr(SPLIT, "prompt_parts", parts)
    force_rows(monkeypatch, 128)
    planned = taken(monkeypatch, SPLIT, lambda planned, *_: (planned.numbers, planned.maps.floats))
    lengths = (700, 700, 700) if layout == "bhsd" else (700, 701, 903)
    case = Case(
        num_heads=4, num_kv_heads=2, head_dim=96, causal=True, layout=layout, page_size=64,
        lengths_q=(700,) * 3, lengths_k=lengths, return_lse=True, twice=True, sinks="fp32",
    )  # fmt: skip
    with hopper_attention(monkeypatch, 7):
        run(case, "cpu")
    numbers, floats = planned[0]
    width, tiles = -(-numbers[11] // 128), 3 * 2 * 11
    assert numbers[20:22] == (max(2, -(-width // parts)), 0)
    assert floats == tiles * parts * 128 * 98 > 3 * 7 * 128 * 98 and pieces


@pytest.mark.usefixtures("pieces")
def test_more_keys_than_the_caller_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts by max_seqlen_k had no places for pieces of those that cu_seqlens_k gives."""
    monkeypatch.setattr(SPLIT, "prompt_parts", 2)
    monkeypatch.setattr(SPLIT, "cuts_tiles", True)
    planned = taken(monkeypatch, SPLIT, lambda planned, *_: planned.numbers)
    q, k = (torch.ones(rows, 2, 128, dtype=torch.bfloat16) for rows in (300, 1500))
    bounds = [torch.tensor([0, rows], dtype=torch.int32) for rows in (300, 1500)]
    for most, together in ((1500, 0), (500, 1)):
        with hopper_attention(monkeypatch, 3):
            forget_all()
            out = flash_attention(
                q, k, k, cu_seqlens_q=bounds[0], cu_seqlens_k=bounds[1],
                max_seqlen_q=300, max_seqlen_k=most, causal=True,
            )  # fmt: skip
        assert planned[-1][21] == together and bool((out == 1).all())


@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_merges_that_look_at_many_tiles(
    pieces: list[int], monkeypatch: pytest.MonkeyPatch, is_cut: bool, head_dim: int
) -> None:
    """Of most tiles nothing is left to do; some have pieces, some see no keys."""
    monkeypatch.setattr(SPLIT, "cuts_tiles", is_cut)
    monkeypatch.setattr(SPLIT, "prompt_parts", 0)
    scans = taken(monkeypatch, SPLIT, lambda planned, *_: int(planned.maps.merge.numbers[-6]))
    lengths_k = tuple(0 if i % 7 == 3 else 90 + 40 * i for i in range(19))
    case = Case(
        num_heads=4, num_kv_heads=2, head_dim=head_dim, causal=True, layout="paged", page_size=64,
        lengths_q=(130,) * 19, lengths_k=lengths_k, return_lse=True, twice=True,
    )  # fmt: skip
    with hopper_attention(monkeypatch, 5):
        run(case, "cpu")
    assert (min(scans) >= 8 if is_cut else scans == [0] * len(scans)) and pieces


def test_many_tiles_that_share_keys_are_whole() -> None:
    """Their keys would come from memory again and again: more than the L2 holds."""
    tile = COSTS.PackedTile(128, 128, 128)
    long = COSTS.Sizes(12, 40, 8, 661, 9198, -1, 0, 9198, 128)
    assert COSTS.tiles_us(long, tile, H200_SMS) < 0.9 * COSTS.split_us(long, tile, H200_SMS)
    short = long._replace(batch_size=1, seqlen_q=64, mean=9198)
    assert COSTS.split_us(short, tile, H200_SMS) < 0.5 * COSTS.tiles_us(short, tile, H200_SMS)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256, 72, 192])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("window", [(-1, -1), (300, 20)])
@pytest.mark.parametrize("rows", [128, 192])
def test_every_kernel(
    forced: list[str], monkeypatch: pytest.MonkeyPatch, dtype: str, head_dim: int,
    window: tuple[int, int], rows: int,
) -> None:  # fmt: skip
    force_rows(monkeypatch, rows)
    case = Case(
        dtype=dtype, head_dim=head_dim, num_heads=14, num_kv_heads=2, window_size=window, twice=True
    )
    run(dataclasses.replace(case, lengths_q=(1,), lengths_k=(1,)), "cuda")
    run(dataclasses.replace(case, lengths_q=(64,), lengths_k=(9000,), seed=1), "cuda")
    case = dataclasses.replace(case, causal=window == (-1, -1))
    run(dataclasses.replace(case, lengths_q=(257,) * 2, lengths_k=(2100,) * 2, seed=2), "cuda")
    run(dataclasses.replace(case, lengths_q=(700,), lengths_k=(333,), seed=3), "cuda")
    ragged = dataclasses.replace(
        case, lengths_q=(1, 77, 300, 0, 64, 17), lengths_k=(1, 2000, 129, 513, 0, 5000)
    )
    run(dataclasses.replace(ragged, layout="varlen", seed=4), "cuda")
    ragged = dataclasses.replace(ragged, lengths_q=(40,) * 6, layout="paged", page_size=64)
    run(ragged, "cuda")
    assert len(forced) == 12


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16, 48, 71])
@pytest.mark.parametrize("is_cut", [True, False])
def test_groups(
    forced: list[str], monkeypatch: pytest.MonkeyPatch, group: int, is_cut: bool
) -> None:
    monkeypatch.setattr(SPLIT, "cuts_tiles", is_cut)
    for i, (seqlen_q, seqlen_k) in enumerate([(17, 2048), (128, 3000), (5, 40_000), (300, 1000)]):
        case = Case(num_heads=group, head_dim=128, causal=True, seed=i, twice=True)
        run(dataclasses.replace(case, lengths_q=(seqlen_q,), lengths_k=(seqlen_k,)), "cuda")
    assert forced


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(DRAWN))
def test_drawn(forced: list[str], monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    monkeypatch.setattr(SPLIT, "cuts_tiles", (None, True, False)[index % 3])
    monkeypatch.setattr(SPLIT, "prompt_parts", (None, 2, 5, None)[index % 4])
    monkeypatch.setattr(SPLIT, "alone", (None, True, False)[index // 3 % 3])
    run(random_split_case(random.Random(index)), "cuda")
    assert forced


@pytest.mark.gpu
def test_graphs(forced: list[str]) -> None:
    q = torch.randn(2, 40, 8, 128, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(2, 9000, 1, 128, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([9000, 5], device="cuda", dtype=torch.int32)
    options: dict[str, Any] = {"cache_seqlens": lengths, "causal": True}
    flash_attention(q, k, k, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attention(q, k, k, **options)
    for new in ([9000, 5], [0, 7777], [1, 130]):
        lengths.copy_(torch.tensor(new))
        graph.replay()
        same_bits(out, flash_attention(q, k, k, **options), name="replayed")
    assert forced


# (batch_size, num_heads, num_kv_heads, seqlen_q, seqlen_k)
LONG_CACHES = [(1, 8, 1, 64, 65_536), (1, 28, 4, 128, 32_768), (16, 28, 4, 17, 2048)]
PREFILLS = [(4, 32, 32, 4096, 4096), (1, 64, 8, 32_768, 32_768), (16, 32, 8, 1024, 16_384)]


def costs(sizes: Any) -> tuple[float, float]:
    tile = COSTS.PackedTile(128, 128, 128)
    whole = COSTS.whole_us(sizes, 128, 128, 128, H200_SMS)
    return COSTS.split_us(sizes, tile, H200_SMS), whole


@pytest.mark.parametrize("case", LONG_CACHES, ids=str)
def test_long_caches_are_split(case: tuple[int, ...]) -> None:
    split, whole = costs(COSTS.Sizes(*case, -1, 0, case[-1], 128))
    assert split < 0.7 * whole


@pytest.mark.parametrize("case", PREFILLS, ids=str)
def test_prefill_keeps_its_kernels(case: tuple[int, ...]) -> None:
    split, whole = costs(COSTS.Sizes(*case, -1, 0, case[-1], 128))
    assert split > 0.95 * whole


def test_whole_prompts_are_not_walked_in_turn() -> None:
    q = torch.empty(5, 4544, 8, 64, dtype=torch.bfloat16)
    problem = Problem(q, q, q, 5, 4544, 4544, 0.1, -1, -1)
    assert SPLIT.best_way(problem).tiles_us == math.inf
    longer = torch.empty(5, 9088, 8, 64, dtype=torch.bfloat16)
    chunk = problem._replace(k=longer, v=longer, max_seqlen_k=9088)
    assert SPLIT.best_way(chunk).tiles_us < math.inf


def test_lengths_on_the_device_may_differ() -> None:
    """Whole tiles take as long as the longest then, shares as long as the mean."""
    q, k = (torch.empty(6, each, 16, 80, dtype=torch.bfloat16) for each in (35, 2432))
    lengths = torch.zeros(6, dtype=torch.int32)
    problem = Problem(q, k, k, 6, 35, 2432, 0.1, -1, 0)
    (same,) = COSTS.sizes_of(problem)
    assert same.evenness == 1
    step = problem._replace(q=q[:, :16], max_seqlen_q=16)
    assert len(COSTS.sizes_of(step._replace(cache_seqlens=lengths))) == 2
    alike, (ragged,) = same, COSTS.sizes_of(problem._replace(cache_seqlens=lengths))
    assert ragged.has_lengths and 0.4 < ragged.evenness < 0.6
    tile = COSTS.PackedTile(96, 128, 128)
    gains = [
        COSTS.split_us(each, tile, H200_SMS) / COSTS.whole_us(each, 96, 128, 128, H200_SMS)
        for each in (alike, ragged)
    ]
    assert gains[1] < 1 < gains[0]
    packed = torch.tensor([0, 2432], dtype=torch.int32)
    varlen = problem._replace(k=k[0], v=k[0], cu_seqlens_k=packed)
    assert [each.mean for each in COSTS.sizes_of(varlen)] == [2432 / 6]


def test_pages_bound_what_caches_hold() -> None:
    q = torch.empty(6, 35, 16, 80, dtype=torch.bfloat16)
    table, lengths = torch.zeros(6, 38, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    options: dict[str, Any] = {"block_table": table, "cache_seqlens": lengths}
    for pages, means in ((6 * 38, 2), (6 * 38 // 2, 1), (6, 1)):
        k = torch.empty(pages, 64, 16, 80, dtype=torch.bfloat16)
        found = COSTS.sizes_of(Problem(q, k, k, 6, 35, 38 * 64, 0.1, -1, 0, **options))
        assert len(found) == means
        assert means == 2 or found[0].mean == max(35, pages * 64 / 6)


@pytest.mark.parametrize("group", range(1, 130))
def test_packing_holds_every_row_once(group: int) -> None:
    for seqlen_q, is_alone in itertools.product((1, 17, 64, 128, 1000), (False, True)):
        heads, tokens, tiles = COSTS.PackedTile(128, 128, 128, is_alone).pack(seqlen_q, group)
        assert (is_alone or group % heads == 0) and heads * tokens <= 128
        assert tiles == -(-seqlen_q // tokens) * -(-group // heads)
        # No more tiles than a head a tile would take.
        assert tiles <= group * -(-seqlen_q // 128)
        # The kernel's division: token_of.
        reciprocal = -(-(1 << 16) // heads)
        assert all(row * reciprocal >> 16 == row // heads for row in range(128))
