"""A planned pass on the device: arrays to tensors, the model, a CUDA graph where it fits, sampling.

Every rank runs it alike on what rank 0 planned; knows no queue and no text.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from ..ops import sample
from .model import Model, Ragged
from .requests import TokenLogprob
from .scheduler import Sequence

_GRAPH_SIZES = (1, 2, 4, 8, *range(16, 257, 16), *range(288, 513, 32))
_NEUTRAL = (("top_k", np.int32, 0), ("top_p", np.float32, 1), ("min_p", np.float32, 0))
_PENALTIES = (("repetition_penalty", 1), ("presence_penalty", 0), ("frequency_penalty", 0))


@dataclass
class Batch:
    """A pass, as arrays; the fields are those of `Ragged`, and what `sample` is given a row."""

    inputs: dict[str, Any]
    sampling: dict[str, np.ndarray]
    num_rows: int
    logprobs: int | None  # the most likely tokens that any row asks for


def batch_of(planned: List[Sequence], vocab_size: int) -> Batch:
    """The arrays of a pass. Raises whatever a request's own grammar does."""
    ids: list[int] = []
    rows: list[int] = []
    for s in planned:
        ids += (s.tokens + s.drafts)[s.computed : s.computed + s.chunk]
        rows += range(len(ids) - s.samples, len(ids))
    chunks = [s.chunk for s in planned]
    num_decodes = sum(chunk == 1 for chunk in chunks)
    before = np.array([s.computed for s in planned], np.int32)
    table = np.zeros((len(planned), max(len(s.pages) for s in planned)), np.int32)
    for row, s in zip(table, planned, strict=True):
        row[: len(s.pages)] = s.pages
    inputs = {
        "ids": np.array(ids, np.int32), "cu_seqlens": _starts(chunks), "before": before,
        "after": before + np.array(chunks, np.int32), "block_table": table,
        "cu_chunks": _starts(chunks[num_decodes:]), "num_decodes": num_decodes,
        "rows": None if len(rows) == len(ids) else np.array(rows, np.int32),
        "max_chunk": max(chunks),
    }  # fmt: skip
    asked = [s.request.params.logprobs for s in planned if s.samples]
    logprobs = max((n for n in asked if n is not None), default=None)
    return Batch(inputs, _sampling(planned, vocab_size), len(rows), logprobs)


def _starts(sizes: list[int]) -> np.ndarray:
    return np.array([*accumulate(sizes, initial=0)], np.int32)


def _sampling(planned: List[Sequence], vocab_size: int) -> dict[str, np.ndarray]:
    """What `sample` is given for each row of logits; only what any of them asks for."""
    rows = [(s, i) for s in planned for i in range(s.samples)]
    params = [s.request.params for s, _ in rows]
    found: dict[str, Any] = {"temperature": np.array([p.temperature for p in params], np.float32)}
    if found["temperature"].any():
        found["seed"] = np.array([s.seed for s, _ in rows], np.int64)
        # The place of the token: its draw does not depend on passes, batches or drafts.
        found["offset"] = np.array([len(s.tokens) + i for s, i in rows], np.int64)
        for name, dtype, neutral in _NEUTRAL:
            values = np.array([getattr(p, name) for p in params], dtype)
            if (values != neutral).any():
                found[name] = values
    penalties = {
        name: np.array([getattr(p, name) for p in params], np.float32) for name, _ in _PENALTIES
    }
    if any((penalties[name] != neutral).any() for name, neutral in _PENALTIES):
        found.update(penalties)
        found["output_counts"] = np.zeros((len(rows), vocab_size), np.int32)
        has = np.zeros((len(rows), -(-vocab_size // 32) * 32), np.uint8)
        for (s, i), counts, bits in zip(rows, found["output_counts"], has, strict=True):
            prompt = len(s.request.prompt)
            np.add.at(counts, s.tokens[prompt:] + s.drafts[:i], 1)
            bits[s.tokens[:prompt]] = 1
        found["prompt_bitmask"] = np.packbits(has, -1, "little").view(np.int32)
    if any(p.logit_bias for p in params):
        found["bias"] = np.zeros((len(rows), vocab_size), np.float32)
        for p, bias in zip(params, found["bias"], strict=True):
            bias[list(p.logit_bias)] = list(p.logit_bias.values())
    if any(p.grammar is not None for p in params):
        found["token_bitmask"] = np.full((len(rows), -(-vocab_size // 32)), -1, np.int32)
        for p, mask in zip(params, found["token_bitmask"], strict=True):
            if p.grammar is not None:
                p.grammar.bitmask(mask)
    return found


class Runner:
    """A model, its cache, and the graphs of its decode passes."""

    def __init__(self, model: Model, num_pages: int, page_size: int, max_pages: int) -> None:
        """max_pages: of a sequence."""
        self.model, self.max_pages = model, max_pages
        self.cache = model.new_cache(num_pages, page_size)
        self._graphs: dict[int, tuple[Ragged, Any, torch.Tensor]] = {}
        self._pool: Any = None

    def run(self, batch: Batch) -> tuple[list[int], list[TokenLogprob]]:
        """The token of each row, and their log-probabilities where any row asks."""
        size = next((n for n in _GRAPH_SIZES if n >= len(batch.inputs["ids"])), None)
        is_decode = batch.inputs["num_decodes"] == batch.num_rows == len(batch.inputs["ids"])
        if is_decode and size and self.model.device.type == "cuda":
            logits = self._replayed(batch, size)[: batch.num_rows]
        else:
            inputs = {name: self._on_device(value) for name, value in batch.inputs.items()}
            logits = self.model.forward(Ragged(**inputs), self.cache)
        return self._sampled(logits, batch) if batch.num_rows else ([], [])

    def _on_device(self, value: Any) -> Any:
        """An array as a tensor on the device, of which nothing waits; anything else as it is."""
        if not isinstance(value, np.ndarray):
            return value
        tensor = torch.from_numpy(value)
        if self.model.device.type == "cuda":
            return tensor.pin_memory().to(self.model.device, non_blocking=True)
        return tensor

    def _sampled(self, logits: torch.Tensor, batch: Batch) -> tuple[list[int], list[TokenLogprob]]:
        """Each rank draws its share of the rows, over the whole vocabulary."""
        group, softcap = self.model.group, self.model.config.final_softcap
        spare = -len(logits) % group.world
        first, last = group.share(len(logits) + spare)
        if spare:
            logits = torch.cat((logits, logits[:1].expand(spare, -1)))
        logits = group.rows(logits)
        given = {}
        for name, value in batch.sampling.items():
            padded = np.concatenate((value, value[:1].repeat(spare, 0))) if spare else value
            given[name] = self._on_device(padded[first:last])
        ids = sample(logits, softcap=softcap, **given)
        tokens = group.columns(ids[None])[0, : batch.num_rows].tolist()
        if batch.logprobs is None:
            return tokens, []
        # By torch, for the few who ask: of the model's own distribution, as OpenAI's are.
        capped = softcap * torch.tanh(logits / softcap) if softcap else logits
        scores = torch.log_softmax(capped, -1)
        best = scores.topk(min(batch.logprobs, scores.shape[1]))
        # Ids are exact in fp32: no vocabulary has 2**24 tokens.
        found = torch.cat((scores.gather(1, ids[:, None]), best.values, best.indices.float()), 1)
        every = group.columns(found.flatten()[None]).view(-1, found.shape[1]).tolist()
        count = best.values.shape[1]
        return tokens, [
            TokenLogprob(token, row[0], tuple(zip(map(int, row[1 + count :]), row[1 : 1 + count])))  # noqa: B905
            for token, row in zip(tokens, every, strict=False)
        ]

    def _replayed(self, batch: Batch, size: int) -> torch.Tensor:
        """Logits of a decode pass by the graph of `size` rows, of which the last may be padding."""
        if size not in self._graphs:
            self._graphs[size] = self._captured(size)
        static, graph, logits = self._graphs[size]
        for name in ("ids", "before", "after", "block_table"):
            value, target = self._on_device(batch.inputs[name]), getattr(static, name)
            if name in ("before", "after"):
                target.fill_(-1)
            target[tuple(slice(n) for n in value.shape)].copy_(value, non_blocking=True)
        graph.replay()
        return logits

    def _captured(self, size: int) -> tuple[Ragged, Any, torch.Tensor]:
        """A graph of `size` sequences with a token each, its inputs and its logits."""

        def ints(*shape: int, value: int = 0) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=self.model.device)

        starts = torch.arange(size + 1, dtype=torch.int32, device=self.model.device)
        static = Ragged(
            ints(size), starts, ints(size, value=-1), ints(size, value=-1),
            ints(size, self.max_pages), ints(1), None, size, 1,
        )  # fmt: skip
        self.model.forward(static, self.cache)  # plans are made, kernels loaded
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self.model.forward(static, self.cache)
        self._pool = graph.pool()
        return static, graph, logits
