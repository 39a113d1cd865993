"""A pass on the device: arrays to tensors, the model, a CUDA graph where one fits, sampling.

Every rank runs it alike on what rank 0 planned; knows no queue and no text.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import ops
from .batch import Arrays, Batch, empty, padded, shape_of, spread
from .model import MOST_WIDE, Model, Ragged
from .requests import TokenLogprob
from .shapes import MOST_ROWS, GraphShape, all_of

_MOST_TOP = 32  # tokens that `sample` tells the log-probabilities of
_SPARE_BYTES = 512 << 20  # of a GPU, which graphs leave to passes without
_TORCH = {np.dtype("i8"): torch.int64, np.dtype("f4"): torch.float32}  # what is not int32


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
    """A model, its cache, and the graphs of its passes."""

    def __init__(
        self, model: Model, num_pages: int, page_size: int, max_pages: int, max_tokens: int,
        max_batch: int,
    ) -> None:  # fmt: skip
        """num_pages: the cache has one more. max_pages: of a sequence. max_tokens, max_batch: of
        a pass.
        """
        self.model, self.max_pages = model, max_pages
        self._limits = max_batch, max_tokens, max_pages
        self.cache = model.new_cache(num_pages + 1, page_size)
        self._graphs: dict[GraphShape, _Graph] = {}
        self._pool: Any = None
        if model.group.world > 1:  # NCCL does not end while graphs hold it
            atexit.register(self._graphs.clear)
        self._is_cuda = self.has_graphs = model.device.type == "cuda"
        # What ids stand for: tokens for themselves, those behind them for rows of the last pass.
        vocab_size, most = model.config.vocab_size, max(max_tokens, MOST_ROWS)
        self._tokens = torch.arange(vocab_size + most, device=model.device)
        self._last = self._tokens[vocab_size:]

    def run(self, batch: Batch) -> Draws:
        """Give the device a pass. Its ids may name rows of the pass before: vocab_size + row."""
        num_rows = sum(batch.samples)
        shape = shape_of(batch) if self.has_graphs else None
        if shape is not None and (graph := self._graph(shape)) is not None:
            logits, ids = self._replayed(batch, shape, graph)
        else:
            rows = num_rows + -num_rows % self.model.group.world
            sampling = padded({**batch.sampling, **batch.more}, rows)
            _, given = self._staged({**batch.inputs, **sampling, **batch.sparse})
            inputs = {name: given.pop(name) for name in batch.inputs}
            longest = int((batch.inputs["after"] - batch.inputs["before"]).max())
            logits = self._logits(Ragged(
                **inputs, num_decodes=batch.num_decodes, max_chunk=longest, width=batch.width
            ))  # fmt: skip
            ids = self._draw(logits, self._dense(given, rows)) if num_rows else self._last[:0]
        self._last[:num_rows] = ids[:num_rows]
        scores = None
        if num_rows and batch.logprobs is not None:
            scores = self._to_host(self._scores(logits, ids, batch.logprobs)[:num_rows])
        return Draws(self._to_host(ids[:num_rows]), scores, self._mark())

    def warm_up(self) -> None:
        """Capture the graphs of all passes without drafts: none is captured while somebody waits.

        On every rank, before the first pass.
        """
        if not self.has_graphs:
            return
        wanted = list(all_of(*self._limits))
        with self.model.group.progress(len(wanted), "graphs") as advance:
            for shape in wanted:
                advance(f"{shape.decodes} decodes, {shape.prompt} tokens of prompts")
                self._graph(shape)

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

    def _plain(self, batch: Batch, shape: GraphShape) -> tuple[Arrays, np.ndarray, int]:
        """What a graph is given of a pass, with padding; the block table; rows of logits."""
        rows = shape.decodes * shape.width + shape.chunks
        rows += -rows % self.model.group.world
        inputs, table = spread(batch, shape)
        return padded(batch.sampling, rows) | inputs, table, rows

    def _graph(self, shape: GraphShape) -> _Graph | None:
        """Captured now where memory has room; else the one of wide tables, if it is there."""
        if shape not in self._graphs:
            plain, _, rows = self._plain(empty(), shape)
            if not self._has_room(rows):
                return self._graphs.get(shape._replace(pages=0))
            self._graphs[shape] = self._captured(shape, plain)
        return self._graphs[shape]

    def _has_room(self, rows: int) -> bool:
        """For a graph of so many rows of logits. Several processes must say the same, so yes."""
        if not self._is_cuda or self.model.group.world > 1:
            return True
        free, _ = torch.cuda.mem_get_info(self.model.device)
        return free >= _SPARE_BYTES + 8 * rows * self.model.config.vocab_size

    def _replayed(
        self, batch: Batch, shape: GraphShape, graph: _Graph
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A pass by the graph of a shape; where it has less, padding."""
        plain, table, rows = self._plain(batch, shape)
        more = {**padded(batch.more, rows), **batch.sparse}
        flat, given = self._staged({**plain, "block_table": table, **more})
        graph.flat.copy_(flat[: len(graph.flat)])
        graph.block_table[: table.shape[0], : table.shape[1]].copy_(given["block_table"])
        graph.graph.replay()
        if not more:
            return graph.logits, graph.ids
        # What few ask for is no part of the graph: their rows are drawn again.
        sampling = self._dense({name: given[name] for name in (*batch.sampling, *more)}, rows)
        return graph.logits, self._draw(graph.logits, sampling)

    def _captured(self, shape: GraphShape, arrays: Arrays) -> _Graph:
        """The graph of a shape, by a pass of padding alone: arrays are those."""
        flat, given = self._staged(arrays)
        size, width, chunks, prompt, pages = shape
        inputs = Ragged(
            **{name: given.pop(name) for name in Ragged._fields if name in given},
            block_table=flat.new_zeros(size + chunks, pages or self.max_pages + MOST_WIDE),
            num_decodes=size, max_chunk=prompt or width, width=width,
        )  # fmt: skip
        self._draw(self._logits(inputs), given)  # makes plans and loads kernels
        self._mark()()
        graph = torch.cuda.CUDAGraph()
        # Other threads, NCCL's and the server's, may ask the device things meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._logits(inputs)
            ids = self._draw(logits, given)
        self._pool = graph.pool()
        return _Graph(graph, flat, inputs.block_table, logits, ids)
