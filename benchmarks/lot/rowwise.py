"""Draws cases of the ops of rows: the kinds that their benchmarks have, at sizes by lot.

Of published models' hidden sizes, slices and heads; token counts log-uniform, odd ones more than
half of the time. They are checked, and timed in graphs, as harness.run_case does it.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from harness import DTYPES, run_case

from kernel_hub.measure.timing import GraphTimer

from .models import MIXTURES, MODELS, WAYS, Model, heads_of
from .outcome import OURS, Outcome
from .shapes import tokens

MOST_TOKENS, MOST_ELEMENTS = 16384, 1 << 27
PEERS = ("torch", "torch.compile", "liger", "flashinfer", "triton")
# What a kind of case takes besides the dtype and the number of tokens.
_Kind = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass(frozen=True)
class RowLot:
    """One case: kind(dtype, num_tokens, *more), which makes a harness.Case."""

    family: str
    number: int
    layer: str
    kind: Callable[..., Any]
    dtype: str
    num_tokens: int
    more: tuple[Any, ...]

    @property
    def name(self) -> str:
        """Of the row; the number is the one that draws it again."""
        sizes = " x ".join(str(x) for x in (self.num_tokens, *self.more))
        return f"{self.number}: {self.layer}{sizes} {self.dtype}"


def _of(name: str) -> Any:
    return importlib.import_module(f"bench_{name}")


def _sliced(lots: random.Random, size: int) -> int:
    return size // lots.choice([ways for ways in WAYS if size % (ways * 8) == 0] or [1])


def _norm(lots: random.Random, model: Model) -> _Kind:
    module = _of("rms_norm")
    return lots.choice((module.norm, module.norm_residual)), (model.hidden,)


def _joined(lots: random.Random, model: Model) -> _Kind:
    module = _of("rms_norm")
    return partial(module.joined, lots.choice(module.JOINED)), (model.hidden,)


def _layer_norm(lots: random.Random, model: Model) -> _Kind:
    kind = lots.choice(("plain", "residual", "e4m3"))
    return partial(_of("layer_norm").norm, kind), (model.hidden,)


def _heads(lots: random.Random, model: Model) -> tuple[int, int]:
    found = [heads for ways in WAYS if (heads := heads_of(model, ways)) is not None]
    return lots.choice(found)


def _rope(lots: random.Random, model: Model) -> _Kind:
    return _of("rope").rotary, (*_heads(lots, model), lots.random() < 0.5)


def _append(lots: random.Random, model: Model) -> _Kind:
    kind = lots.choice(("paged", "slots", "contiguous", "normed"))
    cache = lots.choice(("own", "e4m3")) if kind in ("paged", "normed") else "own"
    return _of("append_kv").append, (*_heads(lots, model), kind, cache)


def _merge(lots: random.Random, model: Model) -> _Kind:
    return _of("merge_states").merge, (_heads(lots, model)[0],)


def _silu(lots: random.Random, model: Model) -> _Kind:
    module = _of("silu_and_mul")
    return lots.choice((module.gated, module.into_e4m3)), (_sliced(lots, model.intermediate),)


def _gate(name: str, *ways: tuple[Any, ...]) -> Callable[[random.Random, Model], _Kind]:
    def make(lots: random.Random, model: Model) -> _Kind:
        return _of(name)._kind(*lots.choice(ways)), (_sliced(lots, model.intermediate),)

    return make


def _quantise(lots: random.Random, model: Model) -> _Kind:
    per = lots.choice(("row", "1x128", "128x128", "tensor", "given"))
    size = lots.choice((model.hidden, model.intermediate))
    return partial(_of("quantize_e4m3").quantise, per), (-(-size // 128) * 128,)


def _softmax(lots: random.Random, model: Model) -> _Kind:
    module = _of("softmax")
    kind = lots.choice(("rows", "masked", "gradient"))
    if kind == "masked":
        return module.masked, (tokens(lots, 4096),)
    size = model.vocab if model.vocab and lots.random() < 0.5 else tokens(lots, 8192)
    return partial(getattr(module, kind), lots.random() < 0.5), (size,)


def _embedding(lots: random.Random, model: Model) -> _Kind:
    module = _of("embedding")
    return partial(module.looking_up, lots.choice(module.KINDS)), (model.hidden,)


def _experts(name: str, kind: str) -> Callable[[random.Random, Model], _Kind]:
    def make(lots: random.Random, model: Model) -> _Kind:
        del model
        module, mixture = _of(name), lots.choice(MIXTURES)
        slots = f"{mixture.num_experts} experts, {mixture.num_chosen} a token"
        _of("moe_route").MODELS[slots] = (mixture.num_experts, mixture.num_chosen)
        more = () if kind == "route" else (mixture.hidden,)

        def case(dtype: torch.dtype, num_tokens: int, *rest: Any) -> Any:
            return getattr(module, kind)(dtype, slots, num_tokens, *rest)

        return case, more

    return make


def _sample(lots: random.Random, model: Model) -> _Kind:
    module = _of("sample")
    kind = lots.choice((*module.KINDS, "mixed"))
    return partial(module.sampling, kind), (model.vocab or 32000,)


def _plain(name: str, kind: str, *sizes: int) -> Callable[[random.Random, Model], _Kind]:
    def make(lots: random.Random, model: Model) -> _Kind:
        return getattr(_of(name), kind), (lots.choice(sizes or (model.hidden,)),)

    return make


def _pads(lots: random.Random, model: Model) -> _Kind:
    return partial(_of("pad_input").rows, pads=lots.random() < 0.5), (model.hidden,)


def _verify(name: str) -> Callable[[random.Random, Model], _Kind]:
    def make(lots: random.Random, model: Model) -> _Kind:
        module = _of(name)
        return partial(module.verifying, lots.choice(list(module.KINDS))), (model.vocab or 32000,)

    return make


_MAKERS: dict[str, Callable[[random.Random, Model], _Kind]] = {
    "rms_norm": _norm,
    "layer_norm": _layer_norm,
    "rope": _rope,
    "append_kv": _append,
    "merge_states": _merge,
    "silu_and_mul": _silu,
    "gelu_and_mul": _gate("gelu_and_mul", ("tanh", False), ("none", False), ("tanh", True)),
    "swigluoai_and_mul": _gate("swigluoai_and_mul", (True, False), (False, False), (True, True)),
    "gelu": _gate("gelu", ("tanh", False), ("none", False), ("none", True)),
    "relu_squared": _gate("relu_squared", (False,), (True,)),
    "quantize_e4m3": _quantise,
    "softmax": _softmax,
    "embedding": _embedding,
    "moe_route": _experts("moe_route", "route"),
    "moe_permute": _experts("moe_permute", "permute"),
    "moe_combine": _experts("moe_combine", "combine"),
    "sample": _sample,
    "verify_draft": _verify("verify_draft"),
    "verify_tree": _verify("verify_tree"),
    "copy_blocks": _plain("copy_blocks", "copying", 1, 16, 64, 256),
    "cu_seqlens": _plain("cu_seqlens", "placing", 1, 17, 300, 1000),
    "pad_input": _pads,
    "rms_norm_joined": _joined,
}
FAMILIES = tuple(_MAKERS)
_OF_FP32 = ("sample", "verify_draft", "verify_tree")
# Tokens, rows of logits, pages, sequences.
_MOST = {
    "sample": 256, "verify_draft": 64, "verify_tree": 32, "copy_blocks": 128, "cu_seqlens": 1024,
    "pad_input": 128,
}  # fmt: skip


def draw(family: str, seed: int, number: int) -> RowLot:
    """The case `number` of a family under a seed."""
    lots = random.Random(f"{seed} {family} {number}")
    model = lots.choice(MODELS)
    kind, more = _MAKERS[family](lots, model)
    size = 1
    for each in more:
        size *= each if isinstance(each, int) and not isinstance(each, bool) else 1
    dtype = "fp32" if family in _OF_FP32 else lots.choice(("bf16", "bf16", "fp16"))
    num_tokens = tokens(lots, min(_MOST.get(family, MOST_TOKENS), max(1, MOST_ELEMENTS // size)))
    if family == "append_kv":  # sequences of one length
        num_tokens -= num_tokens % -(-num_tokens // _of(family).MAX_NEW)
    layer = "" if family.startswith("moe") else f"{model.name} "
    return RowLot(family, number, layer, kind, dtype, num_tokens, more)


def run(lot: RowLot, timer: GraphTimer, peers: Sequence[str]) -> Outcome:
    """What became of a case beside those of `peers` that it has."""
    case = lot.kind(DTYPES[lot.dtype], lot.num_tokens, *lot.more)
    name = f"{lot.name}: {case.name}"
    try:
        samples = run_case(case, timer, peers)
    except AssertionError as error:
        return Outcome(lot.family, name, wrong=str(error))
    ran = {peer: (peer.partition(" ")[0],) for peer in samples if peer != OURS}
    return Outcome(lot.family, name, f"{case.num_bytes / 1e6:.1f} MB", samples, peers=ran)
