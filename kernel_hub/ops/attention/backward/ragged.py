"""What attention's backward plans for sequences of which the host knows the longest and the sum."""

from __future__ import annotations

import functools

from .turns import _counts_in_turns
from .works import (
    _LOOKED_AT,
    _START,
    _START_GOING_ON,
    Pairs,
    parts_of_all,
    rounds,
)

# The longest one is planned as no more than so many usual ones: a bound may be the sum of all.
_MOST_USUAL = 4
_CLASSES = 8
_STEPS = 30
_MOST_ORDERED = 256  # as RaggedKeys::kMost: others do not go together


def bound(longest: int, total: int, batch_size: int) -> int:
    """The length that is planned for."""
    return max(1, min(longest, _MOST_USUAL * -(-total // batch_size)))


def drawn(longest: int, total: int, batch_size: int) -> list[tuple[float, int]]:
    """(how many sequences, their length), each class as much shorter than the one before it as
    makes the sum."""
    count = min(_CLASSES, batch_size)
    wanted = total / batch_size * count / longest
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        ratio = (low + high) / 2
        low, high = (ratio, high) if sum(ratio**i for i in range(count)) < wanted else (low, ratio)
    return [(batch_size / count, max(1, round(longest * high**i))) for i in range(count)]


@functools.lru_cache(maxsize=256)
def parting(
    lengths: tuple[int, int], total_k: int, batch_size: int, window: tuple[int, int],
    tile: tuple[int, int], group: int, pairs: Pairs, num_sms: int, *, goes_on: bool,
) -> int:  # fmt: skip
    """By how many blocks each work is shared. lengths: the longest; pairs: of all sequences."""
    start = _START_GOING_ON if goes_on else _START
    classes: list[tuple[float, list[int]]] = []
    for count, length in drawn(lengths[1], total_k, batch_size):
        num_blocks = -(-length // tile[1])
        step = max(1, _CLASSES * num_blocks // _LOOKED_AT)
        seqlen_q = max(1, lengths[0] * length // lengths[1])
        found = rounds((seqlen_q, length), window, tile, group, step)
        times = count * pairs.total / batch_size * num_blocks / len(found)
        classes.append((times, found))
    num_blocks = -(-lengths[1] // tile[1])
    return parts_of_all(classes, num_blocks, pairs, num_sms, start, is_ragged=True)


def together(pairs: int, num_heads: int, batch_size: int) -> int:
    """About so many pairs, of whole sequences or of one: as many of them each time."""
    if batch_size > _MOST_ORDERED:
        pairs = min(pairs, num_heads)
    of_heads = pairs < num_heads
    total, wanted = (num_heads, pairs) if of_heads else (batch_size, pairs // num_heads)
    each = -(-total // -(-total // wanted))
    return each if of_heads else each * num_heads


def parts_in_turns(most: int, group: int) -> int:
    """Into how many parts works may go whose sums have an order, no more than so many."""
    return max(n for n in (1, *_counts_in_turns(group)) if n <= most)
