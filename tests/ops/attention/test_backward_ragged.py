"""What attention's backward plans for sequences of which only the longest and the sum are known."""

from __future__ import annotations

import random

from kernel_hub.ops.attention.backward.ragged import bound, drawn, parting, parts_in_turns, together
from kernel_hub.ops.attention.backward.works import Pairs


def parts(longest: int, total: int, batch_size: int, *, group: int = 1) -> int:
    return parting(
        (longest, longest), total, batch_size, (-1, 0), (64, 64), group, Pairs(batch_size, 1), 132,
        goes_on=False,
    )  # fmt: skip


def test_lengths_have_the_longest_and_the_sum() -> None:
    lots = random.Random("ragged")
    for _ in range(200):
        batch_size, longest = lots.randrange(1, 40), lots.randrange(1, 5000)
        total = lots.randrange(longest, batch_size * longest + 1)
        classes = drawn(longest, total, batch_size)
        lengths = [length for _, length in classes]
        assert abs(sum(count for count, _ in classes) - batch_size) < 1e-6
        assert lengths[0] == longest
        assert lengths == sorted(lengths, reverse=True)
        if total >= batch_size / len(classes) * longest:
            found = sum(count * length for count, length in classes)
            assert abs(found - total) <= 0.02 * total + batch_size


def test_a_bound_may_be_the_sum() -> None:
    assert bound(1 << 20, 1 << 20, 64) == 1 << 16
    assert bound(700, 64 * 400, 64) == 700
    assert bound(8, 0, 3) == 1


def test_few_long_works_are_shared() -> None:
    assert parts(5000, 5400, 3, group=2) > 1
    assert parts(300, 128 * 150, 128) == 1


def test_whole_sequences_go_together_or_heads_of_one() -> None:
    # As many each time: 12 of 24, 5 heads of 10.
    assert together(35 * 2, 2, 24) == 48
    assert together(26, 2, 24) == 24
    assert together(7, 10, 24) == 5
    # More than are put in order.
    assert together(40, 2, 300) == 2


def test_parts_without_turns_become_those_there_are_with_them() -> None:
    found = [parts_in_turns(*each) for each in ((6, 5), (4, 7), (3, 2), (12, 2), (16, 1), (1, 3))]
    assert found == [5, 4, 2, 12, 16, 1]
