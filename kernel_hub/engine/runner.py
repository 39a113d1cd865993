"""A planned pass on the device: arrays to tensors, the model, a CUDA graph where it fits, sampling.

Every rank runs it alike on what rank 0 planned; knows no queue and no text.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import ops
from .model import MOST_WIDE, Model, Ragged
from .requests import TokenLogprob
from .scheduler import KNOBS, Sequence

_MOST_TOP = 32  # tokens that `sample` tells the log-probabilities of
_FEW_ROWS = 128  # that a pass over the weights takes no longer for than for one
_GRAPH_SIZES = (1, 2, 4, 8, *range(16, 257, 16), *range(288, 513, 32))
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_TORCH = {np.dtype("i8"): torch.int64, np.dtype("f4"): torch.float32}  # what is not int32
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
        and rows <= min(_GRAPH_SIZES[-1], max(_FEW_ROWS, 2 * sum(chunks)))
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


def _padded(arrays: Arrays, rows: int, fill: int = 0) -> Arrays:
    """With rows of nothing behind their own."""
    return {
        name: a if len(a) == rows
        else np.concatenate((a, np.full((rows - len(a), *a.shape[1:]), fill, a.dtype)))
        for name, a in arrays.items()
    }  # fmt: skip


@dataclass
class Draws:
    """What a pass draws, on its way to the host."""

    ids: torch.Tensor
    scores: torch.Tensor | None  # of the drawn token, of the likeliest, and which these are
    wait: Callable[[], None]  # until they are there

    def read(self) -> tuple[list[int], list[TokenLogprob]]:
        """The token of each row, and their log-probabilities where any row asks."""
        self.wait()
        tokens = self.ids.tolist()
        if self.scores is None:
            return tokens, []
        count = self.scores.shape[1] // 2
        return tokens, [
            TokenLogprob(token, own, tuple(zip(map(int, rest[count:]), rest[:count], strict=True)))
            for token, (own, *rest) in zip(tokens, self.scores.tolist(), strict=True)
        ]


class _Graph(NamedTuple):
    graph: Any
    flat: torch.Tensor  # all of its inputs but the block table
    block_table: torch.Tensor
    logits: torch.Tensor
    ids: torch.Tensor


class Runner:
    """A model, its cache, and the graphs of its decode passes."""

    def __init__(
        self, model: Model, num_pages: int, page_size: int, max_pages: int, max_tokens: int
    ) -> None:
        """num_pages: the cache has one more. max_pages: of a sequence. max_tokens: of a pass."""
        self.model, self.max_pages = model, max_pages
        self.cache = model.new_cache(num_pages + 1, page_size)
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._pool: Any = None
        if model.group.world > 1:  # NCCL does not end while graphs hold it
            atexit.register(self._graphs.clear)
        self._is_cuda = self.has_graphs = model.device.type == "cuda"
        # What ids stand for: tokens for themselves, those behind them for rows of the last pass.
        vocab_size, most = model.config.vocab_size, max(max_tokens, _GRAPH_SIZES[-1])
        self._tokens = torch.arange(vocab_size + most, device=model.device)
        self._last = self._tokens[vocab_size:]

    def run(self, batch: Batch) -> Draws:
        """Give the device a pass. Its ids may name rows of the pass before: vocab_size + row."""
        num_rows, num_sequences = sum(batch.samples), len(batch.samples)
        most = _GRAPH_SIZES[-1] // batch.width
        size = next((n for n in _GRAPH_SIZES if num_sequences <= n <= most), None)
        if self.has_graphs and size and batch.num_decodes == num_sequences <= num_rows:
            logits, ids = self._replayed(batch, size)
        else:
            rows = num_rows + -num_rows % self.model.group.world
            sampling = _padded({**batch.sampling, **batch.more}, rows)
            _, given = self._staged({**batch.inputs, **sampling, **batch.sparse})
            inputs = {name: given.pop(name) for name in batch.inputs}
            longest = int((batch.inputs["after"] - batch.inputs["before"]).max())
            logits = self._logits(Ragged(
                **inputs, num_decodes=batch.num_decodes, max_chunk=longest, width=batch.width
            ))  # fmt: skip
            ids = logits.new_empty(0, dtype=torch.long)
            if num_rows:
                ids = self._draw(logits, self._dense(given, rows))
        self._last[:num_rows] = ids[:num_rows]
        scores = None
        if num_rows and batch.logprobs is not None:
            scores = self._to_host(self._scores(logits, ids, batch.logprobs)[:num_rows])
        return Draws(self._to_host(ids[:num_rows]), scores, self._mark())

    def close(self) -> None:
        """Let the graphs go."""
        self._graphs.clear()

    def _staged(self, arrays: Arrays) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Arrays on the device, by one copy that nothing waits for; and all of them as words."""
        words = [np.ascontiguousarray(a).reshape(-1).view(np.int32) for a in arrays.values()]
        # Each begins at 16 bytes, as kernels load them.
        starts = [*accumulate((-(-len(each) // 4) * 4 for each in words), initial=0)]
        host = torch.empty(starts[-1], dtype=torch.int32, pin_memory=self._is_cuda)
        memory = host.numpy()
        for each, start in zip(words, starts, strict=False):
            memory[start : start + len(each)] = each
        flat, found = host.to(self.model.device, non_blocking=True), {}
        for (name, a), each, start in zip(arrays.items(), words, starts, strict=False):
            part = flat[start : start + len(each)]
            part = part if a.dtype == np.int32 else part.view(_TORCH[a.dtype])
            found[name] = part if a.ndim == 1 else part.view(a.shape)
        return flat, found

    def _to_host(self, x: torch.Tensor) -> torch.Tensor:
        """A copy that nothing waits for; `Draws.wait` says when it is there."""
        found = torch.empty(x.shape, dtype=x.dtype, pin_memory=self._is_cuda)
        return found.copy_(x, non_blocking=True)

    def _mark(self) -> Callable[[], None]:
        """What waits until all is over that the device has been given."""
        if not self._is_cuda:
            return lambda: None
        event = torch.cuda.Event()
        event.record()
        return partial(self.model.group.wait, event)

    def _logits(self, inputs: Ragged) -> torch.Tensor:
        """Of this rank's share of the rows, over the whole vocabulary."""
        group, ids = self.model.group, self._tokens.index_select(0, inputs.ids)
        logits = self.model.forward(inputs._replace(ids=ids), self.cache)
        spare = -len(logits) % group.world
        if spare:
            logits = torch.cat((logits, logits[:1].expand(spare, -1)))
        return group.rows(logits) if len(logits) else logits

    def _draw(self, logits: torch.Tensor, sampling: dict[str, torch.Tensor]) -> torch.Tensor:
        """The token of every row: each rank draws those of its share."""
        group = self.model.group
        given = {name: all_.chunk(group.world)[group.rank] for name, all_ in sampling.items()}
        ids = ops.sample(logits, softcap=self.model.config.final_softcap, **given)
        return group.columns(ids[None])[0]

    def _dense(self, sampling: dict[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
        """What `sample` is given: rows of the vocabulary for what is told of them by places."""
        found, vocab_size = dict(sampling), self.model.config.vocab_size
        for name in ("output_counts", "prompt_bitmask", "bias"):
            if name in found:
                size = -(-vocab_size // 32) if name == "prompt_bitmask" else vocab_size
                values = found[name]
                whole = values.new_zeros(rows * size).index_add_(0, found.pop(f"{name} at"), values)
                found[name] = whole.view(rows, size)
        return found

    def _scores(self, logits: torch.Tensor, ids: torch.Tensor, top: int) -> torch.Tensor:
        """Log-probabilities for the few who ask: of the model's own distribution."""
        softcap, group = self.model.config.final_softcap, self.model.group
        own = ids.chunk(group.world)[group.rank][:, None]
        if top > _MOST_TOP:
            capped = softcap * torch.tanh(logits / softcap) if softcap else logits
            scores = torch.log_softmax(capped, -1)
            values, which = scores.topk(top)
            chosen = scores.gather(1, own)
        else:
            shape = len(own), max(1, top)
            values, which = logits.new_empty(shape), own.new_empty(shape)
            some = {"out_top_ids": which, "out_top_logprobs": values}
            ops.sample(logits, softcap=softcap, seed=torch.zeros_like(own[:, 0]), **some)
            pair = logits.gather(1, torch.cat((own, which[:, :1]), 1))
            pair = softcap * torch.tanh(pair / softcap) if softcap else pair
            chosen = values[:, :1] + pair[:, :1] - pair[:, 1:]
        # Ids are exact in fp32: no vocabulary has 2**24 tokens.
        found = torch.cat((chosen, values[:, :top], which[:, :top].float()), 1)
        return group.columns(found.flatten()[None]).view(-1, found.shape[1])

    def _replayed(self, batch: Batch, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A decode pass by the graph of `size` sequences, of which the last may be padding."""
        width, num_tokens = batch.width, size * batch.width
        rows = num_tokens + -num_tokens % self.model.group.world
        lengths = {name: batch.inputs[name] for name in ("before", "after")}
        ids = _padded({"ids": batch.inputs["ids"]}, num_tokens)
        plain = _padded(batch.sampling, rows) | ids | _padded(lengths, size, -1)
        if (size, width) not in self._graphs:
            self._graphs[size, width] = self._captured(size, width, plain)
        graph, table = self._graphs[size, width], batch.inputs["block_table"]
        more = {**_padded(batch.more, rows), **batch.sparse}
        flat, given = self._staged({**plain, "block_table": table, **more})
        graph.flat.copy_(flat[: len(graph.flat)])
        graph.block_table[: table.shape[0], : table.shape[1]].copy_(given["block_table"])
        graph.graph.replay()
        if not more:
            return graph.logits, graph.ids
        # What few ask for is no part of the graph: their rows are drawn again.
        sampling = self._dense({name: given[name] for name in (*batch.sampling, *more)}, rows)
        return graph.logits, self._draw(graph.logits, sampling)

    def _captured(self, size: int, width: int, arrays: Arrays) -> _Graph:
        """The graph of `size` sequences with `width` tokens each, for arrays of these shapes."""
        # Rows of padding alone: the first pass through them makes plans and loads kernels.
        flat, given = self._staged({name: np.full_like(a, -1) for name, a in arrays.items()})
        new: dict[str, Any] = {"dtype": torch.int32, "device": self.model.device}
        given["ids"].zero_()
        inputs = Ragged(
            given.pop("ids"), torch.arange(size + 1, **new) * width, given.pop("before"),
            given.pop("after"), torch.zeros((size, self.max_pages + MOST_WIDE), **new),
            torch.zeros(1, **new), num_decodes=size, max_chunk=width, width=width,
        )  # fmt: skip
        self._draw(self._logits(inputs), given)
        self._mark()()
        graph = torch.cuda.CUDAGraph()
        # Other threads, NCCL's and the server's, may ask the device things meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._logits(inputs)
            ids = self._draw(logits, given)
        self._pool = graph.pool()
        return _Graph(graph, flat, inputs.block_table, logits, ids)
