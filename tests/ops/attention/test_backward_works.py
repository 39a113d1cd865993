"""Which works of attention's backward several blocks share: what is counted, and what is chosen."""

from __future__ import annotations

import importlib
import random
from typing import Any

import pytest

from kernel_hub.ops.attention.backward.portable import parts_of_group
from kernel_hub.ops.attention.backward.turns import Traffic, Turns, turns
from kernel_hub.ops.attention.backward.works import Pairs, Parting, parting, rounds

ORDER: Any = importlib.import_module("kernel_hub.ops.attention.backward.turns")
WORKS: Any = importlib.import_module("kernel_hub.ops.attention.backward.works")


def rounds_one_by_one(
    lengths: tuple[int, int], window: tuple[int, int], tile: tuple[int, int], group: int
) -> list[int]:
    """By every query and key."""
    (seqlen_q, seqlen_k), (block_m, block_n), (left, right) = lengths, tile, window
    seen: list[set[int]] = [set() for _ in range(-(-seqlen_k // block_n))]
    for query in range(seqlen_q):
        home = query + seqlen_k - seqlen_q
        for key in range(seqlen_k):
            if (left < 0 or key >= home - left) and (right < 0 or key <= home + right):
                seen[key // block_n].add(query // block_m)
    return [group * len(blocks) for blocks in seen]


def test_rounds_are_the_blocks_of_queries_that_see_keys() -> None:
    lots = random.Random("rounds")
    for _ in range(60):
        lengths = lots.randrange(1, 120), lots.randrange(1, 120)
        window = lots.choice((-1, 0, 5, 40)), lots.choice((-1, 0, 7, 200))
        tile = lots.choice(((8, 16), (16, 16), (16, 8)))
        group = lots.randrange(1, 4)
        expected = rounds_one_by_one(lengths, window, tile, group)
        assert rounds(lengths, window, tile, group) == expected, (lengths, window, tile)


def parted(
    length: int, pairs: int, *, group: int = 1, causal: bool = False, drifting_bytes: int = 0
) -> Parting:
    return parting(
        (length, length), (-1, 0 if causal else -1), (64, 64), group,
        Pairs(pairs, 1, drifting_bytes), 132, goes_on=False,
    )  # fmt: skip


def test_the_last_wave_is_shared() -> None:
    # 160 works of 8 rounds, 132 multiprocessors: the 28 of the second wave by four blocks each.
    assert parted(469, 20) == Parting(132, 4)
    # Few works of many rounds: all of them.
    assert parted(4096, 1) == Parting(0, 2)
    assert parted(2048, 2, group=8, causal=True).first == 0


def test_even_waves_and_many_works_are_left_whole() -> None:
    assert parted(64 * 132, 1) == Parting(132, 1)
    assert parted(64, 40) == Parting(40, 1)  # one round each
    assert parted(4096, 64) == Parting(4096, 1)


def test_works_that_drift_apart_go_by_few_heads() -> None:
    # The 24 heads of each of 8 pairs that run at a time are 200 MB; by 8 heads each, 70 MB.
    assert parted(1024, 64, group=24, causal=True, drifting_bytes=25 << 20) == Parting(0, 3)
    # So many works that their end is of no account.
    assert parted(1024, 640, group=24, causal=True, drifting_bytes=25 << 20) == Parting(0, 3)


def test_with_turns_parts_are_whole_heads() -> None:
    found = [parts_of_group(*each, 132) for each in ((160, 1), (20, 8), (200, 6), (2000, 6))]
    assert found == [1, 8, 3, 1]


def in_turns(
    length: int, pairs: int, *, group: int = 1, causal: bool = False, head_dim: int = 128,
    num_sms: int = 132,
) -> Turns:  # fmt: skip
    pair_bytes = 8 * group * length * head_dim
    read = Traffic(pair_bytes, 12 * 64 * head_dim, pairs * pair_bytes // 2, head_dim > 128)
    return turns(
        (length, length), (-1, 0 if causal else -1), (64, 64), group, Pairs(pairs, 1), read,
        num_sms, goes_on=False,
    )  # fmt: skip


def test_three_blocks_of_few_keys_go_without_turns() -> None:
    # Two sums, of which each has two parts at most.
    assert in_turns(190, 8).sums == -2


def test_in_turns_pairs_run_a_few_blocks_of_keys_at_a_time() -> None:
    # 64 blocks of keys that began at the same time would wait for 64 others' sums.
    # As many pairs as the L2 gives again to the next block of keys.
    assert in_turns(4096, 64) == Turns(1, 6, Parting(4096, 1))
    assert in_turns(1433, 180, head_dim=256).together == 11


def test_causal_halves_go_in_turn() -> None:
    # Of many works always; of few ones where that is the quicker.
    assert in_turns(2569, 240, causal=True, head_dim=192) == Turns(1, 7, Parting(9840, 1), True)
    assert in_turns(1246, 64, causal=True, head_dim=192).is_staggered
    assert not in_turns(379, 64, group=8, causal=True).is_staggered


def test_in_turns_on_hardly_any_multiprocessors() -> None:
    # Pairs that the L2 holds none of, on as few as run the keys of one at a time.
    assert {in_turns(1433, 1, group=71, num_sms=n).together >= 1 for n in (1, 8, 9)} == {True}


def test_few_works_in_turns_have_more_sums() -> None:
    assert in_turns(4096, 2).sums > 1


def test_in_turns_parts_are_whole_heads_or_the_same_queries() -> None:
    lots = random.Random("in turns")
    for _ in range(60):
        length, pairs, group = (
            lots.randrange(130, 6000),
            lots.randrange(1, 90),
            lots.randrange(1, 9),
        )
        causal = lots.random() < 0.5
        sums, together, (first, count), _ = in_turns(length, pairs, group=group, causal=causal)
        num_blocks = -(-length // 64)
        assert 1 <= together <= pairs
        if sums < 0:
            assert num_blocks <= -2 * sums
        elif count > 1:
            assert count < group or count % group == 0
            assert first % num_blocks == 0


def test_parts_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # And not anew for each number of sums: 8 to 130 ms of a first call.
    counted: list[int] = []
    of_count = ORDER._parts_in_turns

    def noting(*given: Any) -> list[list[int]]:
        counted.append(given[-1])
        return of_count(*given)

    monkeypatch.setattr(ORDER, "_parts_in_turns", noting)
    turns.cache_clear()
    in_turns(4917, 1, causal=True, head_dim=160)
    assert counted
    assert len(counted) == len({*counted})


def test_of_many_blocks_few_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a longest length it is the sum of all, and each block took 5 to 10 us.
    looked_at: list[int] = []
    seen_by = WORKS._seen_by

    def noting(*given: Any) -> list[tuple[int, int]]:
        found = seen_by(*given)
        looked_at.append(len(found))
        return found

    for module in (ORDER, WORKS):
        monkeypatch.setattr(module, "_seen_by", noting)
    for cached in (turns, parting):
        cached.cache_clear()
    assert in_turns(1 << 21, 8, causal=True).sums == 1
    assert parted(1 << 21, 8, causal=True) == Parting(8 << 15, 1)
    assert max(looked_at) <= 2 * WORKS._LOOKED_AT


def test_causal_blocks_of_more_pairs_run_together() -> None:
    def together(read: Traffic, *, is_causal: bool = False) -> list[int]:
        return read.together(300, 132, is_large=True, is_causal=is_causal)

    read = Traffic(1 << 20, 1 << 16, 1 << 25, True)
    assert [together(read), together(read, is_causal=True)] == [[30], [34]]
    # Of wide heads, beyond what the L2 holds.
    wide = Traffic(5 << 20, 1 << 18, 1 << 25, True)
    assert [together(wide), together(wide, is_causal=True)] == [[6], [19]]
