"""Which works of attention's backward several blocks share: what is counted, and what is chosen."""

from __future__ import annotations

import random

from kernel_hub.ops.attention.backward.works import Parting, parting, rounds


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
    length: int, pairs: int, *, group: int = 1, causal: bool = False, has_turns: bool = False
) -> Parting:
    return parting(
        (length, length), (-1, 0 if causal else -1), (64, 64), group, (pairs, 1), 132,
        goes_on=False, has_turns=has_turns,
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


def test_with_turns_parts_are_whole_heads() -> None:
    assert parted(469, 20, has_turns=True) == Parting(160, 1)
    assert parted(640, 2, group=8, has_turns=True) == Parting(0, 8)
    assert parted(640, 20, group=6, has_turns=True) == Parting(0, 3)
    assert parted(640, 200, group=6, has_turns=True) == Parting(2000, 1)
