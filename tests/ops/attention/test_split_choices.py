"""Which way the plan takes where ways were measured, forced one after the other, on an H200."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from kernel_hub.ops.attention.problem import Problem
from kernel_hub.ops.core.device import PlannedGpu, pretend
from kernel_hub.ops.kv_cache import decode_plan, decode_sm90

SM90: Any = importlib.import_module("kernel_hub.ops.attention.forward_sm90")
SPLIT: Any = importlib.import_module("kernel_hub.ops.attention.forward_split_sm90")
COSTS: Any = importlib.import_module("kernel_hub.ops.attention.split_costs")
SMS = 132


@pytest.fixture(autouse=True)
def h200() -> Iterator[None]:
    with pretend(PlannedGpu((9, 0), SMS)):
        yield


class Choice(NamedTuple):
    """batch_size x seqlen_q over caches with room for `room` keys; page_size: 0 is contiguous,
    where has_lengths says whether caches may be shorter."""

    way: str
    batch_size: int
    seqlen_q: int
    room: int
    heads: tuple[int, int]
    head_dim: int = 128
    page_size: int = 0
    has_lengths: bool = True
    is_causal: bool = True

    @property
    def problem(self) -> Problem:
        num_heads, num_kv_heads = self.heads
        half: Any = {"device": "meta", "dtype": torch.bfloat16}
        shape, table = (self.batch_size, self.room, num_kv_heads, self.head_dim), None
        room = self.room
        if self.page_size:
            pages = -(-room // self.page_size)
            room = pages * self.page_size
            shape = (self.batch_size * pages, self.page_size, num_kv_heads, self.head_dim)
            table = torch.empty(self.batch_size, pages, dtype=torch.int32, device="meta")
        lengths = torch.empty(self.batch_size, dtype=torch.int32, device="meta")
        cache = torch.empty(shape, **half)
        return Problem(
            torch.empty(self.batch_size, self.seqlen_q, num_heads, self.head_dim, **half), cache,
            cache, self.batch_size, self.seqlen_q, room, self.head_dim**-0.5, -1,
            0 if self.is_causal else -1, block_table=table,
            cache_seqlens=lengths if self.has_lengths else None,
        )  # fmt: skip


# us: whole tiles, shares, tiles in turn (docs/notes/flash_attention_split_sm90.md).
MEASURED = [
    Choice("tiles", 64, 64, 29_723, (4, 4), 80, 256),  # 688, 1141, 682
    Choice("tiles", 35, 29, 1603, (16, 4), page_size=64),  # 44.0, 40.1, 36.0
    Choice("tiles", 5, 411, 4608, (20, 5)),  # 83.8, 100, 77.0
    Choice("whole", 7, 743, 10_432, (16, 16)),  # 287, 397, 360
    Choice("tiles", 64, 82, 1840, (32, 8), page_size=64),  # 416, 401, 337
    Choice("tiles", 48, 33, 33_052, (71, 1), 64, 128),  # 7526, 2372, 2435
    Choice("tiles", 64, 192, 1664, (128, 8), 64, 16),  # 990, 996, 823
    Choice("shares", 5, 31, 7106, (32, 16), page_size=16),  # 171, 89.7, 90.6
    Choice("tiles", 31, 145, 1536, (16, 4), 64, has_lengths=False),  # 119, 94.3, 86.1
    Choice("tiles", 8, 591, 4809, (32, 4), 64, has_lengths=False),  # 414, 424, 399
    Choice("shares", 5, 256, 3136, (8, 8), 96, 128),  # 40.6, 27.5, 45.2
    Choice("shares", 13, 27, 1664, (4, 4), 192),  # 33.4, 30.6, 42.1
    Choice("whole", 1, 3072, 3072, (32, 8), page_size=32),  # 124, 232, 158
    Choice("whole", 3, 3844, 3844, (2, 2), 192, 128),  # 70.4, 145, 150
    Choice("whole", 2, 1085, 1152, (32, 32), 80, 128),  # 52.5, 85.1, 74.9
]
# Caches that differ: their lengths are on the device.
RAGGED = [
    Choice("tiles", 31, 64, 14_784, (32, 8), is_causal=False),  # 450, 384, 271
    Choice("tiles", 19, 48, 13_120, (64, 4), 64),  # 342, 177, 129
    Choice("tiles", 23, 77, 4032, (8, 8), 192),  # 78.6, 76.5, 64.2
    Choice("tiles", 53, 283, 21_760, (8, 1), page_size=256),  # 697, 682, 567
    Choice("tiles", 51, 64, 19_664, (16, 8), page_size=16),  # 423, 341, 340
    Choice("shares", 12, 192, 14_912, (2, 1)),  # 162, 38.5 (parts 33.8), 83.3
    Choice("shares", 25, 185, 13_184, (1, 1), 256),  # 251, 77.9 (parts 60.7), 256
]
# On an H100, whose memory is slower: parts of tiles that fewer rows of keys are read again for.
ALIGNED = [
    Choice("shares", 61, 65, 46_458, (4, 1), has_lengths=False),  # 1011, 1198 (parts 823), 1030
    Choice("shares", 13, 141, 33_856, (4, 4), 96, has_lengths=False),  # 422, 338 (252), 333
    Choice("shares", 18, 53, 42_561, (4, 4), 80, has_lengths=False),  # 530, 553 (384), 412
    Choice("tiles", 57, 96, 14_484, (2, 1), 256, 32),  # 320, 614, 323
    Choice("shares", 4, 45, 30_013, (40, 10), has_lengths=False),  # 640, 307 (254), 316
]
# What was measured was the other way alone, 1.3 to 1.7 times as long as FlashAttention-3.
EXPECTED = [
    Choice("shares", 1, 2695, 3234, (2, 1), 256, 16),
    Choice("shares", 1, 3339, 3339, (2, 1), 256, 32),
    Choice("shares", 1, 887, 887, (1, 1), 256, 256),
    Choice("shares", 1, 2770, 2770, (2, 2), 192, 32),
]
# us: whole tiles, tiles in turn, shares, parts that blocks draw.
PARTS = [
    Choice("shares", 1, 5989, 5989, (1, 1), 256, 256),  # 117, 121, 59.3, 46.2
    Choice("shares", 1, 2912, 3035, (4, 1), 256, 64),  # 65.0, 68.1, 69.0, 50.1
    Choice("shares", 3, 2624, 2624, (1, 1), 256, 32),  # 56.3, 60.4, 43.6, 35.1
    Choice("shares", 2, 1255, 1255, (4, 4), 80, 32),  # 25.0, 22.8, 21.9, 18.3
    Choice("shares", 53, 192, 9011, (4, 2), has_lengths=False),  # 423, 328, 368, 303
    Choice("shares", 64, 561, 17_408, (1, 1), 256, has_lengths=False),  # 1116, 1124, 1318, 1003
]
# us: decode_attention's own, shares, tiles in turn.
STEPS = [
    Choice("tiles", 132, 16, 5952, (64, 4), 64),  # 1042, 595, 468
    Choice("tiles", 49, 8, 1285, (20, 4), page_size=64),  # 45.9, 37.0, 33.5
    Choice("tiles", 244, 16, 576, (16, 4)),  # 96.2, 73.1, 57.9
    Choice("tiles", 64, 16, 140, (16, 4), page_size=128),  # 28.1, 26.2, 24.7
    Choice("tiles", 45, 12, 192, (32, 8)),  # 32.4, 25.9, 23.9
    Choice("tiles", 211, 10, 256, (32, 2), 64),  # 65.0, 33.2, 34.6
    Choice("tiles", 256, 6, 20_224, (48, 1)),  # 1194, 536, 440
    Choice("tiles", 23, 13, 256, (64, 8), page_size=64),  # 35.6, 19.8, 19.5
]


class Prompts(NamedTuple):
    """Prompts of `mean` tokens on average; longest: 0 where all are of one length, side by side."""

    way: str
    batch_size: int
    mean: int
    longest: int
    heads: tuple[int, int]
    head_dim: int = 128
    is_causal: bool = True
    window_left: int = -1

    @property
    def problem(self) -> Problem:
        num_heads, num_kv_heads = self.heads
        half: Any = {"device": "meta", "dtype": torch.bfloat16}
        batch_size, longest = self.batch_size, self.longest or self.mean
        tokens = (batch_size * self.mean,) if self.longest else (batch_size, self.mean)
        bounds = torch.empty(batch_size + 1, dtype=torch.int32, device="meta")
        k = torch.empty(*tokens, num_kv_heads, self.head_dim, **half)
        tables = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds} if self.longest else {}
        return Problem(
            torch.empty(*tokens, num_heads, self.head_dim, **half), k, k, batch_size, longest,
            longest, self.head_dim**-0.5, self.window_left, 0 if self.is_causal else -1, **tables,
        )  # fmt: skip


# us: whole tiles, tiles in turn; of packed heads, or of 192 rows.
PROMPTS = [
    Prompts("tiles", 128, 31, 112, (24, 1)),  # 84.1, 40.5
    Prompts("tiles", 128, 54, 194, (20, 4)),  # 79.4, 52.9
    Prompts("tiles", 128, 110, 473, (64, 4), 64),  # 275, 193
    Prompts("tiles", 128, 32, 107, (64, 4), 64),  # 166, 55.1
    Prompts("whole", 99, 337, 1190, (6, 1)),  # 94.7, 115
    Prompts("whole", 85, 168, 640, (2, 1), 256),  # 28.7, 36.1
    Prompts("whole", 20, 341, 963, (20, 5)),  # 62.1, 79.0
    Prompts("whole", 128, 130, 551, (16, 16), 80),  # 108, 114
    Prompts("whole", 11, 832, 0, (2, 2), 88, False),  # 26.8, 20.5; whole has 192 rows since
    Prompts("whole", 1, 21_456, 0, (2, 2), 72, False),  # 661, 560; the same
    Prompts("whole", 72, 178, 0, (8, 8), 72, False),  # as those below, since it has 192 rows
    Prompts("whole", 58, 129, 0, (4, 4), 72, False),  # 15.7, 23.3
    Prompts("whole", 222, 152, 0, (8, 8), 88, False),  # 95.1, 123
    Prompts("tiles", 79, 231, 0, (8, 8), 72, False),  # 60.8, 57.0
    Prompts("tiles", 91, 246, 0, (2, 2), 88, False),  # 25.7, 24.0
    Prompts("whole", 7, 1883, 0, (2, 2), 72, False),  # 47.2, 58.8
    Prompts("tiles", 71, 42, 0, (32, 8), 128, False),  # 63.0, 31.9
    Prompts("tiles", 40, 137, 0, (24, 8)),  # 67.1, 45.1
    Prompts("tiles", 12, 260, 0, (40, 8)),  # 57.0, 43.7
    Prompts("tiles", 30, 140, 0, (32, 8), 64),  # 44.7, 31.8
    Prompts("tiles", 14, 1173, 0, (32, 8)),  # 337, 315
    Prompts("whole", 30, 100, 0, (32, 8)),  # 30.2, 30.8
    Prompts("whole", 17, 78, 0, (8, 4), 256, False),  # 12.8, 16.3
    Prompts("tiles", 11, 130, 0, (20, 4), window_left=64),  # 22.6, 15.9
    Prompts("tiles", 83, 141, 0, (28, 4), window_left=64),  # 145, 95.0
    Prompts("tiles", 53, 138, 0, (32, 4), 64, window_left=127),  # 70.8, 50.6
    Prompts("whole", 6, 818, 0, (28, 4), window_left=127),  # 48.6, 55.9
    Prompts("whole", 10, 1307, 0, (20, 4), window_left=127),  # 85.9, 108
    Prompts("whole", 19, 968, 0, (16, 8), 256, window_left=127),  # 181, 200
    # An H100; in brackets shares, where they are not tiles for all.
    Prompts("whole", 6, 567, 2112, (6, 6), 32, False),  # 29.7, 36.7 (48.4)
    Prompts("whole", 3, 597, 1399, (4, 4), 160, False),  # 28.2, 33.4 (35.7)
    Prompts("whole", 1, 4224, 4224, (8, 8), 96),  # 65.9, 83.3
    Prompts("whole", 1, 5418, 5418, (8, 8), 96),  # 84.5, 129
    Prompts("whole", 16, 683, 2537, (8, 8), 96),
    Prompts("whole", 1, 2376, 2376, (8, 8), 72, False),
    Prompts("tiles", 1, 657, 0, (6, 6), 32, False, 127),  # 12.8, 9.8
    Prompts("shares", 2, 459, 0, (3, 1)),  # 10.8, 9.6 of 64 rows (9.8)
    Prompts("tiles", 1, 641, 0, (12, 1)),  # 13.5, 11.3 of 64 rows (13.4)
    Prompts("tiles", 6, 651, 0, (8, 1)),  # 21.3, 18.8
    Prompts("tiles", 12, 190, 0, (16, 4)),  # 20.2, 15.7 of 64 rows
    Prompts("tiles", 128, 95, 328, (32, 32)),  # 179, 144 of 64 rows, as these
    Prompts("tiles", 128, 38, 128, (24, 8)),  # 85, 47.8
    Prompts("tiles", 52, 84, 365, (16, 4)),  # 37.3, 27.9
    Prompts("whole", 61, 301, 1439, (2, 2)),  # 26.7, 29.6
    Prompts("tiles", 9, 148, 0, (16, 16), 104),  # 19.9, 15.2
    Prompts("tiles", 4, 169, 0, (40, 40)),  # 19.7, 15.5
    Prompts("tiles", 1, 819, 0, (7, 1)),  # 14.9, 12.9
    Prompts("whole", 5, 721, 0, (3, 1)),  # 14.1, 15.7, dealt
    Prompts("shares", 3, 3113, 0, (3, 3), 64, False),  # 75.5, 66.7 (58.5)
    Prompts("shares", 3, 6656, 0, (1, 1), 160, False),  # 198, 204 (150)
    Prompts("whole", 25, 543, 0, (32, 32), 96),  # 147, 178: of 192 rows few are empty
    Prompts("whole", 37, 561, 0, (8, 8), 80),  # 62.0, 70.2
    Prompts("whole", 31, 225, 0, (25, 25), 64, False),  # of 128 rows 44.5, 53.5
    Prompts("tiles", 198, 128, 0, (4, 4), 88, False),  # 34.1, 32.4
    Prompts("whole", 5, 896, 0, (16, 2)),  # 37.4, 40.6
    Prompts("whole", 37, 1177, 0, (2, 1), 256),  # 103, 105
    Prompts("shares", 1, 2240, 0, (12, 12), 32, False),  # 54.7, 56.6 (43.2)
    Prompts("shares", 3, 8570, 0, (1, 1), 40, False),  # 193, 203 (117)
    Prompts("whole", 9, 807, 0, (3, 3), 32, False),  # 24.9, 27.9 (27.3)
    Prompts("tiles", 3, 301, 0, (2, 2), 80, False),  # 9.6, 8.2 of 64 rows
    Prompts("whole", 38, 482, 0, (2, 2), 80, False),  # 24.7, 27.8
    Prompts("whole", 5, 715, 0, (2, 2), 104, False),  # 15.3, 16.7 (18.0)
    Prompts("whole", 3, 605, 0, (3, 3), 32, False),  # 11.9, 11.7 (13.8)
    Prompts("shares", 1, 2465, 0, (3, 3), 64, False),  # 32.3, 29.0 (20.3)
    Prompts("shares", 1, 5568, 5568, (2, 2), 88, False),  # 67.5, 76.9 (56.4)
    Prompts("whole", 5, 9268, 0, (4, 1), window_left=4095),  # 434, 507
    Prompts("tiles", 74, 604, 0, (4, 4), 96),  # 99.1, 76.9
    Prompts("tiles", 64, 511, 0, (8, 8), 96),  # 109, 92.6
    Prompts("tiles", 83, 311, 0, (4, 4), 96),  # 47.2, 44.0
    Prompts("whole", 64, 129, 0, (16, 16), 96),  # 44.4, 59.1
]


def way_of(problem: Problem, whole_rows: int = 0) -> str:
    return "shares" if SPLIT.best_way(problem, whole_rows).is_cut else "tiles"


@pytest.mark.parametrize("choice", MEASURED + RAGGED + EXPECTED + PROMPTS, ids=str)
def test_attention_takes(choice: Choice | Prompts) -> None:
    problem = choice.problem
    body = SM90._choose(problem)
    applies = SPLIT.applies(problem, body.stated, body.mean_width)
    assert (way_of(problem, body.stated.sizes["block_m"]) if applies else "whole") == choice.way


@pytest.mark.parametrize("choice", ALIGNED, ids=str)
def test_caches_take_parts_where_shares_read_again(choice: Choice) -> None:
    with pretend(PlannedGpu((9, 0), SMS, peak_bytes_a_us=3.35e6)):
        test_attention_takes(choice)


@pytest.mark.parametrize("choice", PARTS, ids=str)
def test_tiles_are_cut_into_parts_that_blocks_draw(choice: Choice) -> None:
    test_attention_takes(choice)
    assert SPLIT.best_way(choice.problem).parts > 1


@pytest.mark.parametrize("choice", STEPS, ids=str)
def test_steps_take(choice: Choice) -> None:
    problem = choice.problem
    rows = choice.seqlen_q * choice.heads[0] // choice.heads[1]
    variant = decode_plan.choose_variant(choice.head_dim, 2, rows, False, is_sm90=True)
    assert SPLIT.best_way(problem).us < decode_sm90.decode_us(problem, variant.rows)
    assert way_of(problem) == choice.way


# Rows of the tiles of steps over longer caches; of one token they stay as they were.
LONGER = [
    (Choice("", 18, 4, 12_352, (32, 4)), 64),  # us, 64 and 128 rows: 53.5, 59.0
    (Choice("", 1, 12, 14_592, (8, 4), page_size=128), 64),  # 16.8, 19.2
    (Choice("", 1, 9, 94_720, (10, 2), page_size=256), 128),  # 40.3, 37.6
    (Choice("", 1, 1, 12_352, (48, 1)), 128),
]


@pytest.mark.parametrize(("choice", "rows"), LONGER, ids=str)
def test_steps_over_longer_caches_take(choice: Choice, rows: int) -> None:
    assert SPLIT.best_way(choice.problem).tile.block_m == rows


# us of tiles in turn that are whole, and cut; where others are as late as the longest they are cut.
@pytest.mark.parametrize(
    ("choice", "is_whole"),
    [
        (Choice("", 113, 12, 896, (12, 2)), True),  # 36.4, 40.0
        (Choice("", 203, 14, 768, (2, 1), 256), True),  # 51.9, 57.1
        (Choice("", 35, 10, 3264, (32, 2), 64, 64), False),  # 38.5, 23.5
    ],
    ids=str,
)
def test_tiles_of_steps_stay_whole(choice: Choice, is_whole: bool) -> None:
    problem = choice.problem
    if choice.page_size:  # a pool of lengths that differ
        problem = problem._replace(k=problem.k[: problem.k.shape[0] // 4])
    lse = torch.empty(1, device="meta").expand(choice.batch_size, choice.heads[0], choice.seqlen_q)
    planned = SPLIT.plan(problem, problem.q, lse)
    assert not SPLIT.best_way(problem).is_cut and (planned.maps.merge is None) == is_whole


def test_pages_of_no_keys_are_planned() -> None:
    problem = Choice("whole", 1, 633, 16, (4, 2), 32, 16, is_causal=False).problem
    assert way_of(problem._replace(max_seqlen_k=0)) in ("shares", "tiles")


# (head_dim, us of whole tiles, of shares): caches of equal lengths, rows of them narrow.
NARROW = [
    (COSTS.Sizes(64, 4, 4, 64, 29_723, -1, 0, 29_723, 80, True), 660, 1114),
    (COSTS.Sizes(11, 8, 8, 104, 58_021, -1, 0, 58_021, 96, True), 625, 790),
]


@pytest.mark.parametrize(("sizes", "whole", "shares"), NARROW)
def test_narrow_rows_are_read_slowly_in_shares(sizes: Any, whole: float, shares: float) -> None:
    estimates = (
        COSTS.whole_us(sizes, 96, 128, 128, SMS),
        COSTS.split_us(sizes, COSTS.PackedTile(128, 128, 128), SMS),
    )
    assert estimates == pytest.approx((whole, shares), rel=0.15)
