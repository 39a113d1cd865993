"""Steps of one new token as CUDA graphs: captured once for a static cache, replayed from then on.

The first step of a kind runs as it is, which loads kernels and makes workspaces; the second is
captured. A capture runs nothing on the device, so counters and keys of the cache are, after its
first replay, as after one step. What a graph cannot hold runs as it is, counted with the reason.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain
from types import MethodType
from typing import Any, NamedTuple

import torch

from . import capturing, counts
from .families import CACHES
from .masks import decode, is_encoded
from .sliding import NAME as SLIDING
from .sliding import Sliding, counted_by

STATE = "_kernel_hub_graphs"
MOST = 8  # graphs of a model: the one not used for longest is forgotten
_NAME, _COMPILES, _CACHE = "step graphs", "_valid_auto_compile_criteria", object()
_PLAIN = (bool, int, float, str, type(None))
_DEVICE = "cuda"


class _StepGraph(NamedTuple):
    graph: Any
    inputs: list[torch.Tensor]
    outputs: Any  # as forward gives them, _CACHE instead of the cache
    memory: tuple[Any, ...]  # where weights and cache lay
    cache: weakref.ref[Any]
    seen: torch.Tensor  # tokens before the step, as sliding layers count them


class StepGraphs:
    """The graphs of one model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._names = list(inspect.signature(type(model).forward).parameters)[1:]
        self._graphs: OrderedDict[Any, _StepGraph] = OrderedDict()
        self._seen: OrderedDict[Any, tuple[Any, ...]] = OrderedDict()  # key -> memory
        self._failed: set[Any] = set()  # kinds of steps whose capture did
        self._lock = threading.RLock()  # from inputs to outputs
        self._children: list[dict[str, Any]] = []
        self._weights: tuple[list[Any], list[str]] = ([], [])  # their tables, their names
        self._hooks: list[dict[int, Any]] = []

    def __reduce__(self) -> Any:
        return StepGraphs, (self._model,)  # a copied model has none yet

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model's forward gives for these, by a graph where one can."""
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        cache = _cache_of(given)
        if cache is None or not _is_step(given):
            return self._as_it_is(args, kwargs)
        leaves = list(_leaves(given))
        with self._lock:
            sliding = Sliding(cache)
            kinds = ((path, _kind(x)) for path, x in leaves)
            kind = (torch.is_inference_mode_enabled(), sliding.kind(), *kinds)
            graph = self._graphs.get((id(cache), kind))
            reason = self._refused() or sliding.refused()
            if graph is None and reason is None:
                reason = refused_cache(cache) or _refused_leaves(cache, leaves)
            if reason is None:
                graph = self._current(graph, kind, given, cache, sliding)
                if graph is not None:
                    tensors = (x for _, x in leaves if isinstance(x, torch.Tensor))
                    for kept, x in zip(graph.inputs, tensors, strict=True):
                        kept.copy_(x)
                    sliding.count_into(graph.seen)
                    graph.graph.replay()
                    sliding.advance(1)
                    counts.took(_NAME)
                    return _mapped(lambda x: _given_back(x, cache), graph.outputs)
            else:
                counts.passed(_NAME, reason)
        return self._as_it_is(args, kwargs)

    def forget(self) -> None:
        """Free the graphs."""
        self._graphs.clear()
        self._seen.clear()

    def compiles(self, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
        """Whether `generate` compiles forward: not where graphs do the same, unless told to."""
        ours = not self._failed and refused_cache(_cache_of(model_kwargs)) is None
        if ours and getattr(generation_config, "compile_config", None) is None:
            return False
        return getattr(type(self._model), _COMPILES)(self._model, model_kwargs, generation_config)

    def _as_it_is(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return type(self._model).forward(self._model, *args, **kwargs)

    def _refused(self) -> str | None:
        """Why no step now is for graphs; None: it may be."""
        if torch.is_grad_enabled() or self._model.training:
            return "gradients or training"
        if torch.is_autocast_enabled(_DEVICE):
            return "autocast"
        if any(self._hooks) or torch.nn.modules.module._has_any_global_hook():
            return "hooks of modules"
        return "a stream that is captured" if capturing.is_under_way() else None

    def _watch(self) -> None:
        """Keep the tables by which to see that modules and weights are where they were."""
        modules = list(self._model.modules())
        self._children = [m._modules for m in modules if m._modules]
        tables = [t for m in modules for t in (m._parameters, m._buffers)]
        weights = [(t, name) for t in tables for name, x in t.items() if x is not None]
        self._weights = [t for t, _ in weights], [name for _, name in weights]
        # The model's own run outside of its forward.
        self._hooks = [t for m in modules[1:] for t in (m._forward_hooks, m._forward_pre_hooks)]

    def _memory(self, cache: Any) -> tuple[Any, ...]:
        """What a graph relies on and arguments do not say. Of every step: a host has 0.1 ms."""
        try:
            weights = [*map(torch.Tensor.data_ptr, map(dict.get, *self._weights))]
        except TypeError:  # one is None by now
            return (object(),)
        children = [*map(id, chain.from_iterable(map(dict.values, self._children)))]
        attention = getattr(getattr(self._model, "config", None), "_attn_implementation", None)
        return weights, children, attention, [x.data_ptr() for x in _tensors_of(cache)]

    def _current(
        self, graph: _StepGraph | None, kind: Any, given: Any, cache: Any, sliding: Sliding
    ) -> _StepGraph | None:
        """The graph of such a step, captured now where it is the second; None: there is none."""
        if kind in self._failed:
            return None
        key, memory = (id(cache), kind), self._memory(cache)
        if graph is None or graph.memory != memory:
            self._graphs.pop(key, None)
            if self._seen.pop(key, None) != memory:
                self._watch()
                _keep(self._seen, key, self._memory(cache))
                return None
            graph = self._captured(key, given, cache, memory, sliding)
            if graph is None:
                self._failed.add(kind)
                return None
        _keep(self._graphs, key, graph)
        return graph

    def _captured(
        self, key: Any, given: Any, cache: Any, memory: Any, sliding: Sliding
    ) -> _StepGraph | None:
        ref = weakref.ref(cache, lambda _: self._graphs.pop(key, None))
        inputs: list[torch.Tensor] = []

        def kept(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                inputs.append(torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x))
                return inputs[-1]
            return _CACHE if x is cache else x

        held = _mapped(kept, given)

        def run() -> Any:
            with counted_by(Sliding(ref()).layers, seen):
                found = self._as_it_is((), _mapped(lambda x: _view(x, ref()), held))
            return _mapped(functools.partial(_held_back, ref()), found)

        states = _states(cache)
        pool = next(iter(self._graphs.values())).graph.pool() if self._graphs else None
        (device,) = {x.device for x in inputs}
        seen = torch.zeros((), dtype=torch.int64, device=device)
        sliding.count_into(seen)
        try:
            graph, outputs = capturing.capture(run, device, pool)
            sliding.advance(0)
            if any(map(_differ, states, _states(cache))):
                raise RuntimeError("a step changes what the cache keeps on the host")
            return _StepGraph(graph, inputs, outputs, memory, ref, seen)
        except Exception as error:  # noqa: BLE001 - a module's own: forward will say it again
            counts.passed(_NAME, f"capture failed: {capturing.first_line(error)}")
            for layer, state in zip(getattr(cache, "layers", ()), states, strict=True):
                vars(layer).update(state)
            return None


def install(model: torch.nn.Module) -> str | None:
    """Let graphs run the model's steps; gives why not where they cannot."""
    own = type(model).forward
    if not {*CACHES} & {*inspect.signature(own).parameters}:
        return f"its forward takes no {' or '.join(CACHES[:2])}"
    if "forward" in vars(model):
        return "its forward is somebody's already"
    try:
        for x in chain(model.parameters(), model.buffers()):
            x.data_ptr()
    except RuntimeError:
        return "weights without an address"

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        graphs = vars(self).get(STATE)
        if graphs is None or torch.compiler.is_compiling():
            return own(self, *args, **kwargs)
        return graphs.step(args, kwargs)

    vars(model)[STATE] = StepGraphs(model)
    vars(model)["forward"] = MethodType(forward, model)
    if hasattr(model, _COMPILES):
        vars(model)[_COMPILES] = MethodType(_compiles, model)
    return None


def remove(model: torch.nn.Module) -> None:
    """Undo `install`; graphs are freed. A model without is left as it is."""
    graphs = vars(model).pop(STATE, None)
    if graphs is not None:
        graphs.forget()
        # One that somebody put over ours stays theirs.
        found = getattr(vars(model).get("forward"), "__func__", None)
        if getattr(found, "__wrapped__", None) is type(model).forward:
            del vars(model)["forward"]
        if getattr(vars(model).get(_COMPILES), "__func__", None) is _compiles:
            del vars(model)[_COMPILES]


def _compiles(self: Any, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
    return vars(self)[STATE].compiles(model_kwargs, generation_config)


def refused_cache(cache: Any) -> str | None:
    """Why graphs do not take this cache, in words; None: they do."""
    from transformers import StaticCache

    if type(cache) is not StaticCache:
        return f"a {type(cache).__name__}"
    layers = getattr(cache, "layers", None)  # before 4.54 it has none
    others = {type(layer).__name__ for layer in layers or ()} - {"StaticLayer", SLIDING}
    if others:
        return f"a cache of {', '.join(sorted(others))}: what they count on the host stands still"
    if getattr(cache, "offloading", False):
        return "a cache that is offloaded"
    return Sliding(cache).refused()


def _refused_leaves(cache: Any, leaves: list[tuple[Any, Any]]) -> str | None:
    """Why graphs do not take these arguments; None: they do."""
    devices = {x.device for x in _tensors_of(cache)}
    if not devices:
        return "a cache that is not initialised"
    for path, x in leaves:
        if isinstance(x, torch.Tensor):
            devices.add(x.device)
            if path == ("attention_mask",) and x.dim() == 2:
                return "an attention_mask of two dimensions, longer with each step"
        elif (x is not cache and type(x) not in _PLAIN) or {str} != {*map(type, path)}:
            return f"{path[0]} of {type(x).__name__}"
    if len(devices) > 1 or {device.type for device in devices} != {_DEVICE}:
        return f"tensors on {', '.join(sorted(map(str, devices)))}"
    return None


def _cache_of(given: dict[str, Any]) -> Any:
    """The cache among a forward's arguments, under any of its names; None: there is none."""
    return next((given[name] for name in CACHES if given.get(name) is not None), None)


def _is_step(given: dict[str, Any]) -> bool:
    """Whether it is of one new token a sequence."""
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    return isinstance(tokens, torch.Tensor) and tokens.dim() > 1 and tokens.shape[1] == 1


def _tensors_of(cache: Any) -> list[torch.Tensor]:
    layers = getattr(cache, "layers", None)
    if layers is None:
        return [*cache.key_cache, *cache.value_cache]
    return [x for layer in map(vars, layers) for x in layer.values() if type(x) is torch.Tensor]


def _states(cache: Any) -> list[dict[str, Any]]:
    """What the layers keep."""
    return [dict(vars(layer)) for layer in getattr(cache, "layers", ())]


def _differ(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether anything is another but the values in tensors."""
    same = (a[name] is b[name] or (type(a[name]) in _PLAIN and a[name] == b[name]) for name in a)
    return a.keys() != b.keys() or not all(same)


def _leaves(x: dict[Any, Any], path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any]]:
    for name, value in x.items():
        if type(value) is dict:
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value


def _mapped(change: Callable[[Any], Any], x: Any) -> Any:
    """x with every leaf changed; its dicts may be transformers' outputs."""
    if isinstance(x, dict):
        return type(x)(**{name: _mapped(change, value) for name, value in x.items()})
    if type(x) in (tuple, list):
        return type(x)(_mapped(change, value) for value in x)
    return change(x)


def _kind(x: Any) -> Any:
    """What a graph is captured for: a tensor's values may differ, all else not."""
    if isinstance(x, torch.Tensor):
        return x.shape, x.dtype, x.device
    return type(x), x if type(x) in _PLAIN else None


def _view(x: Any, cache: Any) -> Any:
    """A kept input as a run sees it, with nothing on it from the run before."""
    if not isinstance(x, torch.Tensor):
        return cache if x is _CACHE else x
    view = x.view_as(x)
    if is_encoded(view):
        view._kernel_hub_seen = decode(view)  # once for all layers
    return view


def _held_back(cache: Any, x: Any) -> Any:
    """An output as a graph keeps it: without the cache, which is to be free to go."""
    if x is cache:
        return _CACHE
    if isinstance(x, torch.Tensor) or type(x) in _PLAIN:
        return x
    raise TypeError(f"an output of {type(x).__name__}")


def _given_back(x: Any, cache: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.clone()
    return cache if x is _CACHE else x


def _keep(kept: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > MOST:
        kept.popitem(last=False)
