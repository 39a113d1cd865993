"""How many warps and blocks of a cluster an item of a decode step has on Hopper, where counts alone
say it, as measured (docs/notes/decode_attention.md). `decode_short.py` chooses among these and by
time.
"""

from __future__ import annotations

WIDTHS = 64, 128, 256  # of the kernels; up to the second of the fewer rows
OWN_WIDTHS = 80, 96  # of the fewer rows, in the plans those of 128
MOST_BLOCKS = 8  # a cluster of 16 waits for a place
LONGEST = 8192  # tokens that parts, whose number is any, are no better for
FEW_LONGEST = 4096  # where `few_shape` was measured

# Where memory is fast few items are best cut for so many places, by multiprocessors; from so many
# on of clusters of eight, where lengths may be alike, for fewer.
_PLACES, _ALIKE_EIGHTS = 1.64, 1.36
# Items of which blocks have eight warps, by width, from so many tokens on, fewer or more; and
# clusters of two.
_EIGHT, _EIGHT_TOKENS, _TWO_TOKENS = {64: 20, 128: 12}, (512, 2048), (1472, 3072)
# Items of a multiprocessor that have clusters of four; of longer ones, of eight.
_FOURS, _EIGHTS = 5, 3
# Of one token in plain caches of over 4,096 tokens: from how many items on, by multiprocessors,
# clusters of eight are faster, and where they are longer than `LONGEST`. Then of how many of
# `OWN_WIDTHS`, which parts take as 128, clusters of four of eight warps are.
_EIGHTS_FROM, _LONG_EIGHTS_FROM, _OWN_FOURS = 1.06, 2.0, (0.7, 2.2)


def few_shape(items: int, tokens: int, num_sms: int) -> tuple[int, int]:
    """That of steps whose items all find room in clusters, of two in the smallest kernels and of
    eight in those of more rows, as measured (docs/notes/decode_attention.md): no round but the
    first."""
    is_few = 16 * items <= num_sms
    if (is_few and tokens > 512) or (tokens > 1024 and num_sms < 4 * items):
        return 8, 8 if is_few else 2
    blocks = 1
    while blocks < MOST_BLOCKS and 2 * blocks * items <= num_sms and 64 * blocks < tokens:
        blocks *= 2
    return 4, blocks


def few_fast_shape(
    items: int, tokens: int, width: int, num_sms: int, is_alike: bool
) -> tuple[int, int]:
    """The same where memory is fast: more blocks than multiprocessors, though some wait for a place
    of a cluster. is_alike: lengths are not known to differ."""
    places = _PLACES * num_sms
    blocks = 1
    step = 64 if tokens <= 1024 else 32
    while blocks < MOST_BLOCKS and 2 * blocks * items <= places and step * blocks < tokens:
        blocks *= 2
    if is_alike and blocks * items > _ALIKE_EIGHTS * num_sms:
        blocks = min(blocks, MOST_BLOCKS // 2)
    is_eight = False
    if blocks == MOST_BLOCKS:
        least = _EIGHT_TOKENS[0 if 16 * items <= num_sms else 1]
        is_eight = items <= _EIGHT[width] and tokens > least
    elif blocks == 2:
        is_eight = _TWO_TOKENS[0] < tokens <= _TWO_TOKENS[1]
    return 8 if is_eight else 4, blocks


def many_shape(items: int, num_sms: int) -> tuple[int, int]:
    """That of many bytes, as measured (docs/notes/decode_attention.md): the fewer the items, the
    more blocks share the longest."""
    return 4, 8 if items <= num_sms else 4 if items <= _FOURS * num_sms else 2


def long_shape(items: int, num_sms: int) -> tuple[int, int]:
    """That of longer ones, of lengths that differ by a factor of three: more blocks, or warps."""
    if 2 * items <= num_sms:
        return 8, 8 if 8 * items <= num_sms else 4
    return 4, 8 if items <= _EIGHTS * num_sms else 4


def long_plain_shape(items: float, room: int, head_dim: int) -> tuple[int, int]:
    """That of long plain caches of one token; items: by multiprocessors; (0, 0): as others."""
    if room <= LONGEST:
        is_theirs = room > FEW_LONGEST and head_dim > OWN_WIDTHS[-1] and items > _EIGHTS_FROM
        return (4, 8) if is_theirs else (0, 0)
    is_own = WIDTHS[0] < head_dim <= OWN_WIDTHS[-1]
    if is_own and _OWN_FOURS[0] <= items <= _OWN_FOURS[1]:
        return 8, 4
    return (4, 8) if items >= _LONG_EIGHTS_FROM else (0, 0)
