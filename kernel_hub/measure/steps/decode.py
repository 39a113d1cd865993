"""A decode step of an engine, op by op: how often, how long, how near to the card's limits.

The calls of one real step are recorded and each kind is timed alone, over all layers in turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from ... import ops
from ...engine.engine import Engine
from ...engine.model import Model
from ...engine.requests import Request, SamplingParams
from ...errors import RequestError
from ..demo import roofs
from ..rates import Roofs
from ..timing import GraphTimer

_OPS = (
    "append_kv", "decode_attention", "embedding", "flash_attention", "gated_linear", "gelu_and_mul",
    "grouped_linear", "linear", "moe_combine", "moe_permute", "moe_route", "qkv_linear", "rms_norm",
    "sample", "silu_and_mul",
)  # fmt: skip
_STEPS = 12  # real ones, timed as they are
_PARAMS = SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True)
# Of whose memory a call reads or writes a part: places of arguments, and names of others.
_IN_PART = {
    "append_kv": (2, 3),
    "decode_attention": (1, 2),
    "embedding": (1,),
    "grouped_linear": (1,),
}
_NAMED_IN_PART = {"k_cache", "v_cache", "cos", "sin"}


@dataclass(frozen=True)
class OpCall:
    """One launch of an op, to be run again."""

    op: str
    shape: str
    run: Callable[[], Any]
    num_bytes: float  # read and written at least
    num_flops: float  # of products

    @property
    def kind(self) -> tuple[str, str]:
        return self.op, self.shape


@dataclass(frozen=True)
class OpKind:
    """The calls of a step that are alike, a layer each mostly."""

    op: str
    shape: str
    count: int
    num_bytes: float  # of one
    num_flops: float
    time_us: float  # of one, median
    limit_us: float | None  # what the card takes at least, as it was measured; None on the CPU

    @property
    def share(self) -> float | None:
        """Of its limit: 1 is as fast as the card copies or multiplies."""
        return self.limit_us and self.limit_us / self.time_us


@dataclass(frozen=True)
class DecodeStep:
    """A decode step: its kinds, those that take longest first, and which follow each other."""

    num_sequences: int
    wall_us: float  # from step to step of the engine
    kinds: list[OpKind]
    order: list[int]  # places in `kinds`
    roofs: Roofs | None
    dtype: str

    @property
    def ops_us(self) -> float:
        """Of all ops, each timed alone."""
        return sum(kind.count * kind.time_us for kind in self.kinds)


def decode_step(engine: Engine, prompts: Sequence[Sequence[int]], rounds: int = 9) -> DecodeStep:
    """The step that follows these prompts, all of them answering.

    Raises RequestError where they leave no room for some more tokens, the engine guesses drafts,
    or there are several processes, whose products wait for each other.
    """
    if engine.group.world > 1:
        raise RequestError("a step is reported of one process, not of several")
    if engine._scheduler.drafts:
        raise RequestError("a step of single tokens is reported, not one that verifies drafts")
    names = [f"report-{i}" for i in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.submit(Request(name, tuple(prompt), _PARAMS))
    try:
        _answering(engine, len(prompts))
        began = [time.perf_counter()]
        for _ in range(_STEPS):
            _answering(engine, len(prompts))
            began.append(time.perf_counter())
        with _recorded() as calls:
            engine.runner.has_graphs, before = False, engine.runner.has_graphs
            try:
                _answering(engine, len(prompts))
            finally:
                engine.runner.has_graphs = before
        walls = [1e6 * (b - a) for a, b in pairwise(began)]
        return _timed(calls, statistics.median(walls), len(prompts), engine.runner.model, rounds)
    finally:
        for name in names:
            engine.abort(name)
        while engine.has_work:
            engine.step()


def _answering(engine: Engine, count: int) -> None:
    """DecodeStep until a step has a token of every request."""
    while True:
        deltas = engine.step()
        for delta in deltas:
            if delta.finish_reason is not None:
                raise RequestError(delta.error or "no room for a report behind the prompts")
        if len(deltas) == count:
            return


@contextmanager
def _recorded() -> Iterator[list[OpCall]]:
    """The calls of ops that models and draws make meanwhile."""
    calls: list[OpCall] = []
    real = {name: getattr(ops, name) for name in _OPS}

    def recorded(name: str, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out = op(*args, **kwargs)
        calls.append(_call(name, partial(op, *args, **kwargs), args, kwargs, out))
        return out

    for name, op in real.items():
        setattr(ops, name, partial(recorded, name, op))
    try:
        yield calls
    finally:
        for name, op in real.items():
            setattr(ops, name, op)


def _call(
    op: str, run: Callable[[], Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
) -> OpCall:
    """With the bytes and operations that it needs at least."""
    outs = out if isinstance(out, tuple) else (out,)
    in_part = _IN_PART.get(op, ())
    whole = [x for place, x in enumerate(args) if place not in in_part] + [*outs]
    whole += [x for name, x in kwargs.items() if name not in _NAMED_IN_PART]
    tensors = {(x.data_ptr(), x.shape): x for x in whole if isinstance(x, torch.Tensor)}
    num_bytes, num_flops, first = float(sum(x.nbytes for x in tensors.values())), 0.0, args[0]
    shape = " x ".join(map(str, outs[0].shape))
    if op in ("linear", "gated_linear", "qkv_linear"):
        num_flops = 2.0 * first.shape[0] * args[1].numel()
        shape = f"{first.shape[0]} x {first.shape[-1]} by {args[1].shape[0]}"
    if op in ("qkv_linear", "append_kv"):
        cache = kwargs["k_cache"] if op == "qkv_linear" else args[2]
        num_bytes += 2 * first.shape[0] * cache[0, 0].nbytes
    elif op == "embedding":
        num_bytes += outs[0].nbytes
    elif op == "grouped_linear":
        experts, rows = args[1], first.shape[0]
        num_bytes += experts[0].nbytes * int((args[2].diff() > 0).sum())
        num_flops = 2.0 * rows * experts[0].numel()
        shape = f"{rows} x {first.shape[1]} by {experts.shape[1]} of {len(experts)}"
    elif op == "decode_attention":
        lengths, window = kwargs["cache_seqlens"], kwargs["window_size"][0]
        seen = int((lengths if window < 0 else lengths.clamp(max=window + 1)).sum())
        num_bytes += 2 * seen * args[1][0, 0].nbytes
        num_flops = 4.0 * seen * first.shape[-2] * first.shape[-1]
        shape = f"{len(lengths)} x {first.shape[-2]} heads, {seen} keys"
    return OpCall(op, shape, run, num_bytes, num_flops)


def _timed(
    calls: list[OpCall], wall_us: float, num_sequences: int, own: Model, rounds: int
) -> DecodeStep:
    """Each kind of call alone: by graphs over all of its layers, on the CPU one after the other."""
    groups: dict[tuple[str, str], list[OpCall]] = {}
    for call in calls:
        groups.setdefault(call.kind, []).append(call)
    dtype = "fp16" if own.dtype == torch.float16 else "bf16"
    timer = GraphTimer(rounds, placements=1) if own.device.type == "cuda" else None
    card = None if timer is None else roofs(timer)
    kinds = []
    for (op, shape), alike in groups.items():
        one = alike[0]
        launches = [call.run for call in alike]
        if timer is None:
            samples = _on_cpu(launches)
        else:
            samples = timer.measure({op: launches}, int(one.num_bytes))[op]
        limit = None
        if card is not None:
            limit = max(one.num_bytes / card.copy, one.num_flops / card.matrix[dtype]) / 1e6
        median = statistics.median(samples)
        kinds.append(OpKind(op, shape, len(alike), one.num_bytes, one.num_flops, median, limit))
    kinds.sort(key=lambda kind: -kind.count * kind.time_us)
    places = {(kind.op, kind.shape): place for place, kind in enumerate(kinds)}
    return DecodeStep(
        num_sequences, wall_us, kinds, [places[call.kind] for call in calls], card, dtype
    )


def _on_cpu(launches: Sequence[Callable[[], Any]]) -> list[float]:
    samples = []
    for launch in launches:
        start = time.perf_counter()
        launch()
        samples.append((time.perf_counter() - start) * 1e6)
    return samples
