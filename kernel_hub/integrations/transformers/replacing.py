"""`accelerate(model)`: known modules of a model run by ops, until `restore(model)`.

First everything is looked at, then everything is changed; what fails in between is undone.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from ...errors import TensorError
from . import forwards, moe, step_graphs
from .attention import NAME
from .forwards import STATE, Replaced
from .fused import Fused
from .outcomes import ModuleOutcome, Outcomes
from .registration import register
from .survey import Change, survey_of

_CONFIG_STATE = "_kernel_hub_attention_before"
_FORWARDS: dict[str, Callable[..., Any]] = {
    "norm": forwards.norm_forward, "linear": forwards.linear_forward,
    "mlp": forwards.mlp_forward, "attention": forwards.attention_forward,
    "experts": moe.experts_forward, "router": moe.router_forward, "moe_block": moe.block_forward,
}  # fmt: skip


def accelerate(
    model: torch.nn.Module,
    *,
    attention: bool = True,
    norms: bool = True,
    rotary: bool = True,
    mlps: bool = True,
    experts: bool = True,
    linears: bool = True,
    fuse_qkv: bool = True,
    graphs: bool = False,
) -> Outcomes:
    """Let ops run the modules of `model` that they know, in place, and say which in a table.

    model: one of transformers' Llama, Mistral, Mixtral, Qwen 2 and 3, Qwen3-MoE, Gemma 1 to 3,
        OLMo 2. Of others, what they share with these: linear layers.
    attention: its configuration gets attn_implementation "kernel_hub" (see `register`).
    norms: RMSNorm by `rms_norm`, those of queries and keys too.
    rotary: attention's projections, norms of heads and rotation by `qkv_linear`; where queries and
        keys are normed over all heads by `linear`, norms and `rope`; in fp32 by `rope` alone.
    mlps: gate and up of SiLU-gated MLPs by `swiglu_linear`, of GELU-gated ones by `gated_linear`;
        with a bias by `linear`, then `silu_and_mul` or `gelu_and_mul`.
    experts: mixtures of experts by `moe_route`, `moe_permute`, `grouped_linear` and `moe_combine`,
        without a step of the host.
    linears: every other torch.nn.Linear by `linear`.
    fuse_qkv: the weights of queries, keys and values become rows of one matrix; False: three
        products and `rope`.
    graphs: steps of one new token with transformers' StaticCache, without gradients, are replays of
        CUDA graphs: of each cache one, captured at its second step. Outputs are the caller's own.
        Steps that no graph can hold run as before, and `report()` says why. What modules keep on
        the host stays as it was at the capture. `generate` does not compile such a model.

    Weights that are joined become views of one matrix (nothing is kept twice); names and values in
    state_dict stay. A call that wants gradients, or comes under autocast, runs as before.
    Moving the model, or loading weights with assign=True, ends the use of joined ones: call it
    again; torch.compile sees such a change only in device and dtype.

    Returns the table: `print` it. What is left alone is named with its reason: classes, dtypes and
    head_dims that are not known, quantised, sharded, tied or hooked weights. Calling it again
    begins with `restore`. Raises TensorError where model is no module; what is raised in the middle
    leaves the model as it was.
    """
    if not isinstance(model, torch.nn.Module):
        raise TensorError(
            f"accelerate: model: expected a torch.nn.Module, found {type(model).__name__}"
        )
    restore(model)
    switches = {
        "attention": attention, "norms": norms, "rotary": rotary, "mlps": mlps,
        "experts": experts, "linears": linears, "fuse_qkv": fuse_qkv,
    }  # fmt: skip
    survey = survey_of(model, switches)
    undo: list[Callable[[], None]] = []
    try:
        for change in survey.changes:
            _apply(change, undo)
        for config, _ in survey.attentions.values():
            _set_attention(config, undo)
        rows = [*survey.rows, _step_graphs(model)] if graphs else survey.rows
    except BaseException:
        for step in reversed(undo):
            step()
        raise
    return Outcomes(tuple(rows))


def restore(model: torch.nn.Module) -> None:
    """Undo `accelerate`: every forward and configuration as before, every weight with the same bits
    in memory of its own. A model that was not accelerated is left as it is."""
    for module in model.modules():
        step_graphs.remove(module)
        state = module.__dict__.get(STATE)
        if state is not None:
            del module.__dict__[STATE]
            # One that somebody put over ours stays theirs.
            if getattr(module.__dict__.get("forward"), "__func__", None) in _FORWARDS.values():
                del module.__dict__["forward"]
            for fused in state.fused:
                if fused.is_current():
                    fused.release()
        config = module.__dict__.get("config")
        if _CONFIG_STATE in getattr(config, "__dict__", {}):
            config._attn_implementation = config.__dict__.pop(_CONFIG_STATE)


def _apply(change: Change, undo: list[Callable[[], None]]) -> None:
    module = change.module
    fused = []
    for group in change.joined:
        fused.append(Fused(*group))
        undo.append(fused[-1].release)
    # Not by setattr, which modules of torch have their own of.
    module.__dict__[STATE] = Replaced(change.op, tuple(fused), change.details)
    undo.append(lambda: module.__dict__.pop(STATE))
    module.__dict__["forward"] = MethodType(_FORWARDS[change.kind], module)
    undo.append(lambda: module.__dict__.pop("forward"))


def _step_graphs(model: torch.nn.Module) -> ModuleOutcome:
    reason = step_graphs.install(model)
    op = "CUDA graphs" if reason is None else None
    more = reason or "steps of one token, static caches"
    return ModuleOutcome("", type(model).__name__, op, more)


def _set_attention(config: Any, undo: list[Callable[[], None]]) -> None:
    register()
    before = config._attn_implementation
    config.__dict__[_CONFIG_STATE] = before

    def put_back() -> None:
        config._attn_implementation = config.__dict__.pop(_CONFIG_STATE)

    undo.append(put_back)
    config._attn_implementation = NAME
