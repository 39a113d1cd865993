"""Steps of decode_attention that are a cluster an item: which, and whether they are right, for
every number of blocks. On the CPU the kernels' source runs in the emulator."""

from __future__ import annotations

import importlib
import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bits import same_bits
from decode_step import E4M3, Step, check_nan_stays, check_replays
from drawn_sinks import KINDS, draw_sinks
from emulated_attention import SM90
from ways import Way

from kernel_hub.ops.core.device import PlannedGpu
from kernel_hub.ops.core.device import pretend as plan_for
from kernel_hub.ops.core.launch import Launch, forget_all
from kernel_hub.ops.kv_cache import decode_short
from kernel_hub.ops.kv_cache.decode_plan import DecodeGiven

DEVICE: Any = importlib.import_module("kernel_hub.ops.core.device")


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """The launches of these kernels, which take all that they can."""
    found: list[Launch] = []
    plan = decode_short.plan

    def kept(*given: Any) -> Launch:
        found.append(plan(*given))
        return found[-1]

    monkeypatch.setattr(decode_short, "plan", kept)
    monkeypatch.setattr(decode_short, "choice", True)
    return found


def in_shape(patch: pytest.MonkeyPatch, warps: int, blocks: int) -> None:
    """Every step in clusters of so many."""
    patch.setattr(
        decode_short, "shape_for",
        lambda given: (warps, blocks) if decode_short.can_take(given) else (0, 0),
    )  # fmt: skip
    forget_all()


def drawn(lot: random.Random, way: Way) -> Step:
    """A small step of any kind that they take."""
    heads = lot.choice(((4, 2), (8, 1), (3, 3), (16, 1), (10, 2), (24, 1), (14, 2)))
    seqlen_q = lot.choice((1, 1, 2, 5, 16))
    room = lot.choice((64, 320, 700, 2500 if way.is_gpu else 1300))
    lengths = [lot.choice((0, 1, seqlen_q, 63, 64, room, lot.randrange(room), lot.randrange(room)))
               for _ in range(lot.choice((1, 2, 5)))]  # fmt: skip
    lengths = [min(length, room) for length in lengths]
    head_dim = lot.choice((16, 64, 80, 128, 192, 256))
    return Step(
        way, lengths, lot.choice((torch.float16, torch.bfloat16)), heads=heads, seqlen_q=seqlen_q,
        head_dim=head_dim, page_size=lot.choice((0, 16, 48, 64, 256)), max_seqlen=room,
        seed=lot.randrange(1 << 20),
    )  # fmt: skip


@pytest.mark.parametrize("number", range(24))
def test_by_lot(
    hopper_way: Way, monkeypatch: pytest.MonkeyPatch, planned: list[Launch], number: int
) -> None:
    lot = random.Random(f"decode short {number}")
    in_shape(monkeypatch, lot.choice((4, 8)), lot.choice((1, 2, 4, 8)))
    step = drawn(lot, hopper_way)
    if step.head_dim > 128:
        in_shape(monkeypatch, 4, lot.choice((1, 2, 4, 8)))
    options = {}
    if lot.random() < 0.4:
        kind = lot.choice(list(KINDS))
        options["sinks"] = draw_sinks(kind, step.heads[0], number, hopper_way.device)
    step.check(**options)
    first, first_lse = step.run(**options)
    out, lse = step.run(**options)
    same_bits(out, first)
    same_bits(lse, first_lse)
    assert len(planned) == 1


@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seqlen_q", [1, 9], ids=["rows4", "rows36"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_kernel_in_clusters(
    hopper_way: Way, monkeypatch: pytest.MonkeyPatch, planned: list[Launch], dtype: torch.dtype,
    seqlen_q: int, head_dim: int, blocks: int, warps: int,
) -> None:  # fmt: skip
    in_shape(monkeypatch, warps, blocks)
    Step(
        hopper_way, [300, 0, 5, 129], dtype, heads=(8, 2), seqlen_q=seqlen_q, head_dim=head_dim
    ).check()
    assert [launch.options["cluster"] for launch in planned] == [(blocks, 1, 1)]


@pytest.mark.parametrize(
    ("head_dim", "width"), [(72, 80), (80, 80), (88, 96), (96, 96), (104, 128)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_widths_of_their_own(
    hopper_way: Way, monkeypatch: pytest.MonkeyPatch, planned: list[Launch], dtype: torch.dtype,
    head_dim: int, width: int,
) -> None:  # fmt: skip
    """Heads whose rows are no power of two of chunks are read without the columns they lack."""
    for warps, blocks, page_size in ((4, 2, 0), (8, 1, 48)):
        in_shape(monkeypatch, warps, blocks)
        Step(
            hopper_way, [300, 0, 5, 129], dtype, heads=(8, 2), head_dim=head_dim,
            page_size=page_size,
        ).check()  # fmt: skip
    assert all(launch.function.name.endswith(f"hdim{width}") for launch in planned)
    assert len(planned) == 2


H100, H200 = (PlannedGpu((9, 0), 132, peak_bytes_a_us=x) for x in (3.35e6, 4.9e6))


def shape_of(
    batch_size: int, seqlen_q: int, tokens: int, heads: tuple[int, int], head_dim: int = 128,
    mean: int = 0, gpu: PlannedGpu = H100,
) -> tuple[int, int]:  # fmt: skip
    """Of a step on 132 multiprocessors; mean: of lengths, where pages say it."""
    num_heads, num_kv_heads = heads
    half: Any = {"device": "meta", "dtype": torch.bfloat16}
    rooms, table = (batch_size, tokens), None
    if mean:
        rooms = (batch_size * -(-mean // 16), 16)
        table = torch.empty(batch_size, -(-tokens // 16), dtype=torch.int32, device="meta")
    q = torch.empty(batch_size, seqlen_q, num_heads, head_dim, **half)
    cache = torch.empty(*rooms, num_kv_heads, head_dim, **half)
    lengths = torch.empty(batch_size, dtype=torch.int32, device="meta")
    given = DecodeGiven(
        q, cache, cache, lengths, *[None] * 2, table, *[None] * 8, False, 0, head_dim**-0.5, -1,
        0.0, 0, q,
    )  # fmt: skip
    with plan_for(gpu):
        return decode_short.shape_for(given)


@pytest.mark.parametrize("gpu", [H100, H200])
def test_few_items_ask_for_no_costs(monkeypatch: pytest.MonkeyPatch, gpu: PlannedGpu) -> None:
    """A first call of the smallest steps does without."""
    monkeypatch.setattr(decode_short, "best_shape", lambda *_: pytest.fail("they were worked out"))
    assert shape_of(1, 1, 1024, (32, 8), gpu=gpu) == (8, 8)


def test_which_where_memory_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """As measured on an H200: more blocks of few items, one round of long ones, any bytes."""
    monkeypatch.setattr(SM90, "applies", SM90.fits)

    def of(*step: Any, mean: int = 0) -> tuple[int, int]:
        return shape_of(*step, mean=mean, gpu=H200)

    assert of(1, 1, 4096, (32, 8)) == (8, 8) and of(2, 1, 1024, (32, 8)) == (4, 8)
    assert of(8, 1, 2048, (32, 8)) == of(11, 1, 3008, (20, 5)) == (8, 2)
    assert of(20, 1, 3500, (4, 1)) == (4, 8) and of(24, 1, 2432, (2, 1)) == (4, 4)
    assert of(24, 1, 2432, (2, 1), mean=700) == (4, 8)
    assert of(24, 9, 128, (1, 1), 80) == (4, 2) and of(64, 1, 4926, (5, 1)) != (4, 2)
    assert of(13, 1, 5287, (40, 10)) == of(64, 1, 7285, (4, 2)) == (8, 2)
    assert of(128, 1, 7328, (4, 4), 96, mean=2000) != (8, 2)
    assert of(126, 1, 320, (32, 32)) == (4, 1) and of(64, 1, 4096, (32, 8)) != (0, 0)
    # More long items than clusters of eight find places: parts, of caches that may be full.
    assert of(46, 1, 6272, (4, 1)) == of(15, 1, 6400, (12, 4)) == of(64, 1, 6272, (4, 1), 64)
    assert (
        of(64, 1, 6272, (4, 1))
        == (0, 0)
        not in (of(45, 1, 6272, (4, 1)), of(50, 1, 6272, (4, 1), 64))
    )
    assert (0, 0) not in (of(64, 1, 5296, (4, 1), mean=1700), of(8, 1, 5808, (32, 8), mean=28_000))
    # A block for each of an engine's items that are as many as multiprocessors, where none is long.
    assert of(16, 1, 1536, (32, 8), mean=28_000) == (8, 1) != of(16, 1, 2048, (32, 8), mean=28_000)
    assert (8, 1) not in (of(16, 1, 1536, (32, 8), mean=700), of(17, 1, 1536, (32, 8), mean=28_000))
    # Tiles of few bytes take less than they are said to; parts have no short items of d 192.
    assert of(7, 13, 959, (24, 1)) == (0, 0) != shape_of(7, 13, 959, (24, 1))
    assert of(5, 10, 257, (16, 16), 192) == (4, 1) and of(5, 10, 857, (16, 16), 192) == (0, 0)
    # Of several tokens of the most columns, no more rounds than parts or tiles take.
    assert of(20, 14, 256, (4, 4), 224, mean=73) == (4, 1) != of(20, 1, 256, (4, 4), 224, mean=73)
    assert of(64, 5, 2816, (2, 1), 256) == of(13, 11, 1088, (4, 4), 192) == (4, 2)
    assert of(4, 8, 1792, (4, 4), 224) == of(5, 5, 2048, (4, 4), 224) == (4, 4)
    assert of(7, 14, 2624, (4, 1), 256, mean=750) == of(3, 4, 14_144, (2, 1), 256) == (0, 0)
    # Of caches that may be full, lengths are alike mostly.
    assert of(105, 1, 768, (10, 2)) == of(64, 1, 1600, (16, 2)) == (8, 1)
    assert (8, 1) not in (of(105, 1, 768, (10, 2), mean=300), of(64, 1, 1600, (16, 2), mean=1650))
    # One token: so many that clusters of four all find places; long plain caches.
    assert of(11, 1, 4032, (16, 8)) == (4, 4) and of(11, 1, 4736, (16, 8)) == (4, 8)
    assert of(11, 2, 4032, (16, 8)) == of(13, 1, 4032, (16, 8)) == (8, 2)
    assert of(23, 1, 5120, (32, 8)) == of(60, 1, 12_288, (32, 8)) == (4, 8)
    assert of(23, 1, 12_288, (32, 8)) == of(11, 1, 16_000, (8, 8), 80) == (0, 0)
    assert of(12, 1, 16_000, (8, 8), 80) == of(9, 1, 38_848, (32, 32), 96) == (8, 4)
    assert of(20, 1, 16_704, (32, 32), 80) == (4, 8)
    # Short items of the most columns, where parts have half the rounds.
    assert of(256, 1, 192, (4, 2), 256) == (0, 0) and of(256, 1, 320, (4, 2), 256) == (4, 1)
    assert of(164, 1, 192, (4, 2), 256) == of(256, 2, 192, (4, 2), 256) == (4, 1)
    # Many items of the most columns, whatever bytes there are; of two parts where they have fewer.
    assert of(20, 7, 2112, (16, 16), 224) == of(64, 1, 4032, (16, 8), 256) == (4, 2)
    assert of(20, 7, 1024, (128, 128), 224) == of(64, 1, 3200, (16, 8), 256, mean=900) == (0, 0)
    assert shape_of(20, 7, 2112, (16, 16), 224) == (0, 0)


@pytest.mark.parametrize(("num_blocks", "places"), [(198, 3), (199, 2), (264, 2), (265, 3)])
def test_blocks_lie_two_by_two(num_blocks: int, places: int) -> None:
    """No more than two of as many blocks as two a multiprocessor lie on one."""
    half: Any = {"device": "meta", "dtype": torch.bfloat16}
    q, cache = torch.empty(1, 1, 8, 128, **half), torch.empty(1, 640, 2, 128, **half)
    given = DecodeGiven(q, cache, cache, *[None] * 12, False, 0, 1.0, -1, 0.0, 0, q)
    with plan_for(H200):
        sizes = decode_short.sizes_of(given)
        own = decode_short.shared_bytes(sizes, 640, 4, (4, 1))
        block_bytes = 1024 + max(own, decode_short.pairs_bytes(given, (4, 2), num_blocks))
        assert H200.sm_shared_bytes // block_bytes == places
        assert not any(decode_short.pairs_bytes(given, x, num_blocks) for x in ((8, 1), (4, 8)))
    with plan_for(H100):
        assert decode_short.pairs_bytes(given, (4, 2), num_blocks) == 0


def test_which(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was fastest, or hardly slower; nothing where another kernel is."""
    monkeypatch.setattr(SM90, "applies", SM90.fits)  # attention's kernels, of tensors on no GPU
    # Few items, on an H200.
    assert shape_of(1, 1, 1024, (32, 8)) == shape_of(1, 1, 4096, (32, 8)) == (8, 8)
    assert shape_of(1, 1, 512, (32, 8)) == shape_of(2, 1, 1024, (32, 8)) == (4, 8)
    assert shape_of(8, 1, 1024, (32, 8)) == (4, 2)
    assert shape_of(8, 1, 2048, (32, 8)) == (8, 2)
    # More, more rows or columns, on an H100.
    assert shape_of(169, 1, 192, (16, 2), 64) == shape_of(64, 1, 128, (32, 8)) == (4, 1)
    assert shape_of(3, 8, 684, (10, 2)) == shape_of(2, 13, 349, (7, 1), 64) == (4, 8)
    assert shape_of(59, 1, 199, (24, 1)) == (8, 2)
    assert shape_of(1, 1, 459, (2, 1), 256) == (4, 8)
    assert shape_of(5, 3, 1188, (8, 8), 192) == (4, 4)
    # Long items of few; more bytes than parts may have, in a cluster each.
    assert shape_of(1, 1, 6592, (32, 8)) == (8, 8)
    assert shape_of(16, 1, 2048, (32, 8)) == (4, 4)
    # Longer items, more bytes, rows that attention's tiles read once, columns of parts.
    assert shape_of(1, 1, 8256, (32, 8)) == shape_of(64, 1, 4096, (32, 8)) == (0, 0)
    assert shape_of(137, 14, 369, (24, 8)) == shape_of(25, 1, 1133, (4, 4), 192) == (0, 0)
    assert shape_of(64, 10, 448, (16, 2), 64) == shape_of(7, 5, 7232, (20, 5)) == (0, 0)
    # Many bytes in pages, a part of the room each mostly.
    assert shape_of(16, 1, 8192, (32, 8), mean=28_000) == (4, 8)
    assert shape_of(48, 1, 8192, (32, 8), mean=9_300) == (4, 4)
    assert shape_of(64, 1, 8192, (32, 8), mean=7_000) == (4, 4)
    assert shape_of(208, 1, 2048, (32, 8), mean=2_200) == (4, 2)
    assert shape_of(128, 1, 8192, (32, 8), mean=8_200) == (0, 0)
    # Longer ones in pages; neither others, nor more, nor so few that parts read sooner.
    assert shape_of(1, 1, 12_288, (32, 8), mean=70_000) == (8, 8)
    assert shape_of(2, 1, 8200, (32, 8), mean=70_000) == (8, 8)
    assert shape_of(4, 1, 12_288, (32, 8), mean=70_000) == (8, 4)
    assert shape_of(16, 1, 12_288, (32, 8), mean=28_000) == (4, 8)
    assert shape_of(32, 1, 12_288, (32, 8), mean=14_000) == (4, 8)
    assert shape_of(64, 1, 8200, (32, 8), mean=7_000) == (4, 4)
    assert shape_of(112, 1, 8200, (32, 8), mean=7_000) == (0, 0)
    assert shape_of(1, 1, 12_304, (32, 8), mean=70_000) == (0, 0)
    assert shape_of(1, 1, 12_288, (28, 4), mean=70_000) == shape_of(4, 1, 8200, (32, 8)) == (0, 0)
    # Of few bytes tiles take longer than they are said to.
    assert shape_of(5, 9, 2240, (8, 2)) == (8, 4)
    assert shape_of(64, 5, 601, (12, 1)) == (8, 1)
    # Lengths that differ: no longest one of a block's is waited for.
    assert shape_of(16, 1, 2048, (32, 8), mean=700) == (4, 4)
    assert shape_of(20, 1, 1664, (16, 4), mean=600)[1] >= 2


def test_finished_rows_and_wrong_lengths(hopper_way: Way, planned: list[Launch]) -> None:
    step = Step(hopper_way, [300, 40, 7], heads=(8, 2), page_size=64)
    expected, _ = step.run()
    step.options["cache_seqlens"][1] = -1
    out, lse = step.run()
    assert not bool(out[1].any()) and bool((lse[1] == -math.inf).all())
    out[1] = expected[1]
    same_bits(out, expected)
    assert len(planned) == 1


def test_a_nan_in_a_query_stays_in_its_row(hopper_way: Way, planned: list[Launch]) -> None:
    check_nan_stays(Step(hopper_way, [200, 70], heads=(4, 1), seqlen_q=2))
    assert planned


def test_what_they_do_not_take(hopper_way: Way, planned: list[Launch]) -> None:
    lengths = [130, 5]
    Step(hopper_way, lengths, append=True).check()
    Step(hopper_way, lengths, page_size=8).check()
    Step(hopper_way, lengths, cache_dtype=E4M3).check()
    step = Step(hopper_way, lengths)
    step.check(window_size=(30, 0))
    step.check(softcap=5.0)
    step.check(num_splits=2)
    assert not planned


@pytest.mark.gpu
def test_graph_with_growing_lengths(monkeypatch: pytest.MonkeyPatch, planned: list[Launch]) -> None:
    for blocks in (1, 2, 8):
        in_shape(monkeypatch, 8, blocks)
        check_replays(Step(Way("gpu", "cuda"), [1, 5, 250], page_size=16), 40, more=1)
    assert len(planned) == 3


@pytest.mark.parametrize(("gib", "expected"), [(80, H100), (94, H100), (141, H200)])
def test_what_torch_does_not_say_of_memory(gib: int, expected: PlannedGpu) -> None:
    """An old torch has no clock of it: an H100 planned as an H200."""
    found = SimpleNamespace(total_memory=int(gib * 0.99 * 2**30))
    assert DEVICE._peak_bytes_a_us(found) == expected.peak_bytes_a_us
    said = SimpleNamespace(memory_clock_rate=2_619_000, memory_bus_width=5120, total_memory=1 << 33)
    assert DEVICE._peak_bytes_a_us(said) == pytest.approx(3.35e6, rel=0.01)
