"""The sizes of passes that graphs have, and how much of prompts goes beside answers.

Numbers alone: knows no requests, no arrays and no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

# Passes that only decode, and what decodes in one with chunks of prompts; rows of such a one, whose
# products take as long for one row after a tile's border as for all up to the next.
_ALONE = (1, 2, 4, 8, *range(16, 257, 16), *range(288, 513, 32))
_DECODES = (0, 8, 16, 32, 48, 64, 96, 128, 192, 256)
_ROWS = (128, 192, 256, 320, 384, 512)
_CHUNKS = 8
MOST_ROWS = _ALONE[-1]  # of a graph that only decodes
# Pages of the tables of passes that only decode; longer texts have one for the longest there may
# be. They are all that a plan of attention knows of lengths, and it has one launch for short ones,
# an item a cluster (docs/notes/decode_attention.md): one that is much longer would be waited for,
# and few longer ones leave multiprocessors. Short tables are for lengths that differ too; 24 pages
# are of 16 alone, which with 8 kv heads are an item for each multiprocessor.
_TABLES, _MANY, _ALONE_EACH, _SHORT = (24, 32, 128, 192), 8, 16, 32
# Rows of a pass with answers. 256 are two tiles of 128, and multiplied in less than twice the time
# in which the weights are read, whatever the model; twice the rows take twice a pass at most.
_BESIDE, _HALF = 256, 128
_BACKLOG_PASSES = 16  # in which a backlog is worked off, as far as that asks for more rows


class GraphShape(NamedTuple):
    """What one graph is of; a pass may have less of each."""

    decodes: int
    width: int  # tokens of each of those
    chunks: int = 0
    prompt: int = 0  # tokens of the chunks together
    pages: int = 0  # of each, at most; 0: as many as any may have


def _up(sizes: Sequence[int], wanted: int) -> int | None:
    """The least that has room."""
    return next((size for size in sizes if wanted <= size), None)


def _tables(decodes: int) -> Sequence[int]:
    """Pages of those that so many may have."""
    return _TABLES[decodes != _ALONE_EACH :] if decodes >= _MANY else _TABLES[1::2]


def room(
    decodes: int, width: int, chunks: int, prompt: int, pages: int, is_even: bool = True
) -> GraphShape | None:  # fmt: skip
    """The graph for a pass of that size, if there is one.

    pages: of the longest; is_even: the others are not much shorter.
    """
    if not chunks:
        size = _up(_ALONE, decodes)
        if size is None or size * width > MOST_ROWS:
            return None
        table = _up(_tables(size), pages) or 0
        has_table = width == 1 and (is_even or table <= _SHORT)
        return GraphShape(size, width, pages=table if has_table else 0)
    size = _up(_DECODES, decodes)
    if size is None or chunks > _CHUNKS:
        return None
    rows = _up(_ROWS, size + prompt)
    return GraphShape(size, 1, _CHUNKS, rows - size) if rows else None


def all_of(max_batch: int, max_tokens: int, max_pages: int) -> Iterator[GraphShape]:
    """Those of passes without drafts, the largest first: what they work in serves the others.

    max_pages: of a sequence.
    """
    for less, size in reversed([*pairwise((-1, *_DECODES))]):
        most = max_tokens + size - less - 1  # rows of such a pass, padding included
        for fewer, rows in reversed([*pairwise((0, *_ROWS))]):
            if less < max_batch and max(fewer, size) < min(rows, most):
                yield GraphShape(size, 1, _CHUNKS, rows - size)
    for less, size in reversed([*pairwise((0, *_ALONE))]):
        if less < max_batch:
            if max_pages > _SHORT:
                yield GraphShape(size, 1)
            for fewer, pages in pairwise((0, *_tables(size))):
                if fewer < max_pages:
                    yield GraphShape(size, 1, pages=pages)


def beside(decodes: int, backlog: int) -> int:
    """Tokens of prompts that may go beside so many that decode.

    As many as fill the rows of a graph; more where a backlog asks for it.
    """
    rows = _BESIDE if decodes <= _HALF else 2 * max(_BESIDE, decodes)
    rows = max(rows, backlog // _BACKLOG_PASSES // _ROWS[-1] * _ROWS[-1])
    size = _up(_DECODES, decodes) if rows <= _ROWS[-1] else decodes
    return rows - (size or decodes)
