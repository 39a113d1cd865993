"""Calls of the registered ops, as the public ones make them of what call_cases draws."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from call_cases import NAMES, draw
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from ways import op_modules

from kernel_hub.ops.core.register import NAMESPACE


def _copy(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


class _Recorder(TorchDispatchMode):
    """Keeps the arguments of each registered op that is called, as they were before."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == NAMESPACE:
            # Arguments that are their defaults do not come along.
            names = [x.name for x in op._schema.arguments]
            given = {x.name: x.default_value for x in op._schema.arguments}
            given |= dict(zip(names, args, strict=False)) | (kwargs or {})
            self.calls[op.name()].append({name: _copy(x) for name, x in given.items()})
        return op(*args, **(kwargs or {}))


def optional_tensors() -> dict[str, list[str]]:
    """Of each registered op, the arguments that its schema lets be a tensor or None."""
    op_modules()
    return {
        schema.name: [x.name for x in schema.arguments if str(x.type) == "Optional[Tensor]"]
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith(f"{NAMESPACE}::")
    }


def record(seeds: int) -> dict[str, list[dict[str, Any]]]:
    """The calls of each registered op that `seeds` public calls of each name lead to."""
    recorder = _Recorder()
    with pytest.MonkeyPatch.context() as patch:
        for module in op_modules():  # no tensor goes the quick way, past torch's dispatcher
            for name in ("PLAIN_TYPES", "_PLAIN_TYPES"):
                if hasattr(module, name):
                    patch.setattr(module, name, frozenset())
        for name in NAMES:
            for seed in range(seeds):
                case = draw(name, seed)
                with recorder, torch.no_grad():
                    case.call()
                    if case.outs:
                        case.call_fresh()
                if case.differentiable:
                    given = {key: case.tensors[key].requires_grad_() for key in case.differentiable}
                    with recorder:
                        found = tree_leaves(case.call_fresh())[0]
                        torch.autograd.grad(found, list(given.values()), torch.ones_like(found))
    return dict(recorder.calls)
