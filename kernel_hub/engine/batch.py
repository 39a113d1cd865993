"""A planned pass as arrays, and with the padding that a graph's shape asks for.

Every rank is told these arrays; knows no tensors, no queue and no text.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Any

import numpy as np

from .model import MOST_WIDE
from .scheduler import KNOBS, Sequence
from .shapes import MOST_ROWS, GraphShape, room

_EVEN = 4  # times as long as the mean: the longest of even texts
_FEW_ROWS = 128  # that a pass over the weights takes no longer for than for one
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
Arrays = dict[str, np.ndarray]


@dataclass
class Batch:
    """A pass, as arrays."""

    inputs: Arrays  # the fields of `Ragged`
    sampling: Arrays  # what `sample` is given a row of logits
    more: Arrays  # and where any row asks for it: penalties, and which tokens grammars take
    sparse: Arrays  # and of rows of the vocabulary, place and value of what is not 0
    samples: list[int]  # rows of logits of each sequence
    num_decodes: int
    width: int  # tokens of each of those
    logprobs: int | None  # the most likely tokens that any row asks for


def batch_of(planned: List[Sequence], vocab_size: int, spare_page: int) -> Batch:
    """The arrays of a pass; `spare_page` is nobody's. Raises what a request's own grammar does."""
    samples, chunks = [s.samples for s in planned], [s.chunk for s in planned]
    width, num_decodes = max(chunks), len(planned)
    rows = width * num_decodes
    is_even = width == 1 or (
        samples == chunks and width <= MOST_WIDE
        and rows <= min(MOST_ROWS, max(_FEW_ROWS, 2 * sum(chunks)))
    )  # fmt: skip
    if not is_even:
        width, num_decodes = 1, chunks.count(1)
    elif width > 1:
        # As many tokens of each. What stands behind its drafts sees more than they do, and they
        # nothing of it; its keys go to places that come later, or to a page that nobody reads.
        samples = chunks = [width] * num_decodes
    ids: list[int] = []
    for s, chunk in zip(planned, chunks, strict=True):
        own = s.tokens[s.computed : s.computed + s.chunk] + s.drafts
        ids += own + [0] * (chunk - len(own))
    before, lengths = np.array([s.computed for s in planned], np.int32), np.array(chunks, np.int32)
    ends = lengths.cumsum(dtype=np.int32)
    columns = max(len(s.pages) for s in planned) + (width if width > 1 else 0)
    spare = np.full(columns, spare_page, np.int32).tobytes()
    table = b"".join([s.pages.tobytes() + spare[4 * len(s.pages) :] for s in planned])
    inputs = {
        "ids": np.array(ids, np.int32), "before": before, "after": before + lengths,
        "cu_seqlens": np.append(np.int32(0), ends),
        "cu_chunks": np.append(np.int32(0), lengths[num_decodes:].cumsum(dtype=np.int32)),
        "block_table": np.frombuffer(table, np.int32).reshape(-1, columns),
    }  # fmt: skip
    # The first row of each sequence's logits, and how far behind it the others are.
    nth = np.arange(sum(samples)) - np.repeat(np.cumsum(samples) - samples, samples)
    if len(nth) < len(ids):
        inputs["rows"] = (np.repeat(ends - samples, samples) + nth).astype(np.int32)
    told = [s.knobs * count for s, count in zip(planned, samples, strict=True)]
    knobs = np.frombuffer(b"".join(told), KNOBS)
    sampling = {name: knobs[name] for name in KNOBS.names or ()}
    # The place of the token: its draw does not depend on passes, batches or drafts.
    sampling["offset"] = np.repeat([len(s.tokens) for s in planned], samples) + nth
    more, sparse = Arrays(), Arrays()
    if any(s.is_guided or s.request.params.logit_bias for s in planned):
        places = [(s, i) for s, count in zip(planned, samples, strict=True) for i in range(count)]
        more, sparse = _asked(places, vocab_size)
    asked = [s.request.params.logprobs for s in planned if s.request.params.logprobs is not None]
    return Batch(
        inputs, sampling, more, sparse, samples, num_decodes, width, max(asked, default=None)
    )


def _asked(rows: list[tuple[Sequence, int]], vocab_size: int) -> tuple[Arrays, Arrays]:
    """Of rows of logits `more` and `sparse` of a batch; each only where any row asks for it."""
    params, more, sparse = [s.request.params for s, _ in rows], Arrays(), Arrays()
    num_words = -(-vocab_size // 32)

    def scatter(name: str, row_size: int, dtype: str, each: List[tuple[Any, Any]]) -> None:
        found = [np.asarray(at, np.int32) + i * row_size for i, (at, _) in enumerate(each)]
        values = [np.asarray(value, dtype) for _, value in each]
        sparse[f"{name} at"], sparse[name] = np.concatenate(found), np.concatenate(values)

    if any([getattr(p, name) for name in _PENALTIES] != [1, 0, 0] for p in params):
        for name in _PENALTIES:
            more[name] = np.array([getattr(p, name) for p in params], np.float32)
        said, words = [], []
        for (s, i), p in zip(rows, params, strict=True):
            # Of others a token may be on its way.
            new = s.tokens[len(s.request.prompt) :] + s.drafts[:i] if s.is_guided else []
            said.append((new, [1] * len(new)))
            words.append(_words(s, num_words) if p.repetition_penalty != 1 else ([], []))
        scatter("output_counts", vocab_size, "i4", said)
        scatter("prompt_bitmask", num_words, "i4", words)
    if any(p.logit_bias for p in params):
        scatter("bias", vocab_size, "f4", [
            (list(p.logit_bias), list(p.logit_bias.values())) for p in params
        ])  # fmt: skip
    if any(p.grammar is not None for p in params):
        more["token_bitmask"] = np.full((len(rows), num_words), -1, np.int32)
        for p, mask in zip(params, more["token_bitmask"], strict=True):
            if p.grammar is not None:
                p.grammar.bitmask(mask)
    return more, sparse


def _words(s: Sequence, num_words: int) -> tuple[np.ndarray, np.ndarray]:
    """Which words of a bitmask of its prompt are not 0, and these."""
    if s.prompt_words is None:
        has = np.zeros(num_words * 32, np.uint8)
        has[list(s.request.prompt)] = 1
        words = np.packbits(has, bitorder="little").view(np.int32)
        s.prompt_words = np.flatnonzero(words), words[words != 0]
    return s.prompt_words


def padded(arrays: Arrays, rows: int) -> Arrays:
    """With rows of nothing behind their own."""
    return {
        name: np.concatenate((a, np.zeros((rows - len(a), *a.shape[1:]), a.dtype)))
        for name, a in arrays.items()
    }


def shape_of(batch: Batch) -> GraphShape | None:
    """Of the graph that has room for a pass; None: it has none, or more rows are asked for."""
    n, num_chunks = batch.num_decodes, len(batch.samples) - batch.num_decodes
    prompt, pages = len(batch.inputs["ids"]) - n * batch.width, batch.inputs["block_table"].shape[1]
    ends = batch.inputs["after"]
    is_even = num_chunks > 0 or bool(n * ends.max(initial=0) <= _EVEN * ends.sum())
    shape = room(n, batch.width, num_chunks, prompt, pages, is_even)
    if shape is None or ("rows" in batch.inputs) != bool(num_chunks):
        return None
    return shape if sum(batch.samples) <= shape.decodes * shape.width + shape.chunks else None


def empty() -> Batch:
    """A pass of nobody: in a graph's shape, of padding alone."""
    none, knobs = np.zeros(0, np.int32), np.zeros(0, KNOBS)
    inputs: Arrays = dict.fromkeys(("ids", "before", "after", "rows"), none)
    inputs |= dict.fromkeys(("cu_seqlens", "cu_chunks"), np.zeros(1, np.int32))
    inputs["block_table"] = none.reshape(0, 1)
    sampling = {name: knobs[name] for name in KNOBS.names or ()}
    sampling["offset"] = np.zeros(0, np.int64)
    return Batch(inputs, sampling, {}, {}, [], 0, 1, None)


def spread(batch: Batch, shape: GraphShape) -> tuple[Arrays, np.ndarray]:
    """The inputs of a pass with padding behind its decodes and behind its chunks; and its table."""
    inputs, n, (decodes, width, chunks, prompt, _) = batch.inputs, batch.num_decodes, shape

    def spread_(name: str, fill: int = 0, each: int = 1, last: int = chunks) -> np.ndarray:
        a, n_ = inputs[name], n * each
        between = np.full((decodes * each - n_, *a.shape[1:]), fill, np.int32)
        behind = np.zeros((last - (len(a) - n_), *a.shape[1:]), np.int32)
        return np.concatenate((a[:n_], between, a[n_:], behind))

    # Behind the chunks: tokens of no sequence, and sequences of no token.
    ends = inputs["cu_chunks"]
    ends = np.append(ends, [ends[-1]] * (chunks + 1 - len(ends))).astype(np.int32)
    found = {
        "ids": spread_("ids", 0, width, prompt), "cu_chunks": ends,
        "before": spread_("before", -1), "after": spread_("after", -1),
        "cu_seqlens": np.concatenate((np.arange(decodes), ends + decodes), dtype=np.int32) * width,
    }  # fmt: skip
    if chunks:
        rows = inputs["rows"] + (inputs["rows"] >= n) * np.int32(decodes - n)
        found = padded({"rows": rows}, decodes + chunks) | found
    return found, spread_("block_table")
