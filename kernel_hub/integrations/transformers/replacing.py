"""`accelerate(model)`: known modules of a model run by ops, until `restore(model)`.

First everything is looked at, then everything is changed; what fails in between is undone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch

from ...errors import TensorError
from . import families, forwards
from .attention import DTYPES, NAME, refused_head
from .forwards import STATE, Replaced
from .fused import Fused
from .outcomes import ModuleOutcome, Outcomes
from .registration import register

_CONFIG_STATE = "_kernel_hub_attention_before"
_NORM_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_FORWARDS = {
    "norm": forwards.norm_forward, "linear": forwards.linear_forward,
    "mlp": forwards.mlp_forward, "attention": forwards.attention_forward,
}  # fmt: skip


@dataclass
class _Change:
    """A module to be changed: its new forward, and the layers to be joined first."""

    module: torch.nn.Module
    kind: str
    op: str
    details: dict[str, Any] = field(default_factory=dict)
    joined: tuple[Any, ...] = ()


@dataclass
class _Survey:
    """What was found so far."""

    shared: set[int]
    switches: dict[str, bool]
    rows: list[ModuleOutcome] = field(default_factory=list)
    changes: list[_Change] = field(default_factory=list)
    attentions: dict[int, tuple[Any, list[str | None]]] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)  # ids of layers that a fused product replaces

    def leave(self, name: str, module: torch.nn.Module, reason: str) -> None:
        self.rows.append(ModuleOutcome(name, type(module).__name__, None, reason))

    def take(self, name: str, change: _Change, note: str = "") -> None:
        self.rows.append(ModuleOutcome(name, type(change.module).__name__, change.op, note))
        self.changes.append(change)
        self.joined.update(id(each) for each in change.joined)


def accelerate(
    model: torch.nn.Module,
    *,
    attention: bool = True,
    norms: bool = True,
    rotary: bool = True,
    mlps: bool = True,
    linears: bool = True,
    fuse_qkv: bool = True,
) -> Outcomes:
    """Let ops run the modules of `model` that they know, in place, and say which in a table.

    model: one of transformers' Llama, Mistral, Qwen 2 and 3, Gemma 1 to 3, OLMo 2; of Mixtral and
        Qwen3-MoE all but the experts. Of others, what they share with these: linear layers.
    attention: its configuration gets attn_implementation "kernel_hub" (see `register`).
    norms: RMSNorm by `rms_norm`, those of queries and keys too.
    rotary: attention's projections and rotation in one forward: by `qkv_linear` where queries and
        keys have no norm, else `linear`, norms and `rope`; in fp32 by `rope` alone.
    mlps: gate and up of SiLU-gated MLPs by `swiglu_linear`.
    linears: every other torch.nn.Linear by `linear`.
    fuse_qkv: the weights of queries, keys and values become rows of one matrix; False: three
        products and `rope`.

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
        "linears": linears, "fuse_qkv": fuse_qkv,
    }  # fmt: skip
    survey = _survey(model, switches)
    undo: list[Callable[[], None]] = []
    try:
        for change in survey.changes:
            _apply(change, undo)
        for config, _ in survey.attentions.values():
            _set_attention(config, undo)
    except BaseException:
        for step in reversed(undo):
            step()
        raise
    return Outcomes(tuple(survey.rows))


def restore(model: torch.nn.Module) -> None:
    """Undo `accelerate`: every forward and configuration as before, every weight with the same bits
    in memory of its own. A model that was not accelerated is left as it is."""
    for module in model.modules():
        state = module.__dict__.get(STATE)
        if state is not None:
            del module.__dict__[STATE]
            # One that somebody put over ours stays theirs.
            if getattr(module.__dict__.get("forward"), "__func__", None) in _FORWARDS.values():
                del module.__dict__["forward"]
            if state.fused is not None and state.fused.is_current():
                state.fused.release()
        config = module.__dict__.get("config")
        if _CONFIG_STATE in getattr(config, "__dict__", {}):
            config._attn_implementation = config.__dict__.pop(_CONFIG_STATE)


def _apply(change: _Change, undo: list[Callable[[], None]]) -> None:
    module = change.module
    fused = Fused(*change.joined) if change.joined else None
    if fused is not None:
        undo.append(fused.release)
    # Not by setattr, which modules of torch have their own of.
    module.__dict__[STATE] = Replaced(change.op, fused, change.details)
    undo.append(lambda: module.__dict__.pop(STATE))
    module.__dict__["forward"] = MethodType(_FORWARDS[change.kind], module)
    undo.append(lambda: module.__dict__.pop("forward"))


def _set_attention(config: Any, undo: list[Callable[[], None]]) -> None:
    register()
    before = config._attn_implementation
    config.__dict__[_CONFIG_STATE] = before

    def put_back() -> None:
        config._attn_implementation = config.__dict__.pop(_CONFIG_STATE)

    undo.append(put_back)
    config._attn_implementation = NAME


def _survey(model: torch.nn.Module, switches: dict[str, bool]) -> _Survey:
    """Look at every module, outer ones first; change nothing."""
    survey = _Survey(families.shared_memory(model), switches)
    rest = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in families.NORMS:
            _norm(survey, name, module)
        elif kind in families.ATTENTIONS:
            _attention(survey, name, module)
        elif kind in families.MLPS:
            _mlp(survey, name, module)
        elif type(module) is torch.nn.Linear:
            rest.append((name, module))
        elif families.is_of_interest(module):
            survey.leave(name, module, "this class is not known")
    for name, module in rest:
        if id(module) not in survey.joined:
            _linear(survey, name, module)
    _implementations(survey)
    return survey


def _norm(survey: _Survey, name: str, module: Any) -> None:
    eps = families.eps_of(module)
    reason = families.stranger(module, "norm")
    if not survey.switches["norms"]:
        reason = "norms=False"
    elif reason is None and eps is None:
        reason = "it has no epsilon of a known name"
    elif reason is None:
        reason = families.unfit_weight("weight", module.weight, _NORM_DTYPES, survey.shared)
    if reason is not None:
        survey.leave(name, module, reason)
        return
    details = {"eps": eps, "weight_offset": families.weight_offset(module)}
    survey.take(name, _Change(module, "norm", "rms_norm", details))


def _linear(survey: _Survey, name: str, module: Any) -> None:
    reason = families.unfit_linear("", module, DTYPES, survey.shared)
    if not survey.switches["linears"]:
        reason = "linears=False"
    if reason is None:
        survey.take(name, _Change(module, "linear", "linear"))
    else:
        survey.leave(name, module, reason)


def _mlp(survey: _Survey, name: str, module: Any) -> None:
    reason = families.stranger(module, "mlp")
    if not survey.switches["mlps"]:
        reason = "mlps=False"
    elif reason is None and not families.is_silu(module.act_fn):
        activation = type(module.act_fn).__name__
        reason = f"its gate is {activation}: swiglu_linear has SiLU alone"
    elif reason is None:
        reason = _unfit_to_join(survey, module, ("gate_proj", "up_proj"))
    if reason is not None:
        survey.leave(name, module, reason)
        return
    joined = (module.gate_proj, module.up_proj)
    if module.gate_proj.bias is None:
        survey.take(name, _Change(module, "mlp", "swiglu_linear", joined=joined))
    else:
        survey.take(name, _Change(module, "mlp", "linear, silu_and_mul", joined=joined))


def _unfit_to_join(survey: _Survey, module: Any, names: tuple[str, ...]) -> str | None:
    """Why layers that read one input cannot be one product; None: they can."""
    layers = [getattr(module, name) for name in names]
    for name, layer in zip(names, layers, strict=True):
        reason = families.unfit_linear(name, layer, DTYPES, survey.shared)
        if reason is not None:
            return reason
    first = layers[0]
    for name, layer in zip(names, layers, strict=True):
        alike = (layer.in_features, layer.bias is None, layer.weight.dtype, layer.weight.device)
        if alike != (
            first.in_features, first.bias is None, first.weight.dtype, first.weight.device,
        ):  # fmt: skip
            return f"{names[0]} and {name} differ in inputs, bias, dtype or device"
    return None


def _attention(survey: _Survey, name: str, module: Any) -> None:
    reason = families.stranger(module, "attention")
    dtype = module.q_proj.weight.dtype if hasattr(module.q_proj, "weight") else None
    refused = "its q_proj has no weight" if dtype is None else None
    if dtype is not None:
        refused = refused_head(dtype, module.head_dim)
    _, reasons = survey.attentions.setdefault(id(module.config), (module.config, []))
    reasons.append(reason or refused)
    if not survey.switches["rotary"]:
        reason = "rotary=False"
    code = families.code_of(module)
    if reason is not None or code is None:
        survey.leave(name, module, str(reason))
        return
    details = _details(module, code)
    if isinstance(details, str):
        survey.leave(name, module, details)
        return
    layers = (module.q_proj, module.k_proj, module.v_proj)
    unfit = _unfit_to_join(survey, module, ("q_proj", "k_proj", "v_proj"))
    if not survey.switches["fuse_qkv"]:
        unfit = "fuse_qkv=False"
    if unfit is not None:
        weight = module.q_proj.weight if dtype is not None else None
        unfit_q = families.unfit_weight("q_proj.weight", weight, _NORM_DTYPES, set())
        if unfit_q is not None:
            survey.leave(name, module, unfit_q)
        else:
            change = _Change(module, "attention", "rope", details)
            survey.take(name, change, f"projections not joined: {unfit}")
        return
    has_norm, narrow = details["norm"] is not None, module.head_dim % 32
    op = "linear, rope" if has_norm or narrow else "qkv_linear"
    survey.take(name, _Change(module, "attention", op, details, layers))


def _details(module: Any, code: Any) -> dict[str, Any] | str:
    """How the forward of its class calls what it calls; in words, what is not known of it."""
    parameters = code.co_varnames[1 : code.co_argcount]
    caches = [name for name in ("past_key_values", "past_key_value") if name in parameters]
    if not caches or parameters[:3] != ("hidden_states", "position_embeddings", "attention_mask"):
        return f"its forward takes {', '.join(parameters)}, which this version does not know"
    norm = None
    if "q_norm" in code.co_names:
        sizes = (module.q_norm.weight.shape, module.k_norm.weight.shape)
        head = torch.Size((module.head_dim,))
        whole = torch.Size((module.q_proj.out_features,)), torch.Size((module.k_proj.out_features,))
        norm = "head" if sizes == (head, head) else "whole" if sizes == whole else "unknown"
    if norm == "unknown":
        return "norms of queries and keys of another size than heads and projections have"
    window = "own" if "sliding_window" in code.co_names else None
    return {
        "parameters": parameters, "cache": caches[0], "norm": norm,
        "cache_kwargs": "cache_kwargs" in code.co_varnames,
        "window": "config" if families.window_from_config(module) else window,
        "softcap": "attn_logit_softcapping" in code.co_names,
    }  # fmt: skip


def _implementations(survey: _Survey) -> None:
    """Which configurations get our attention: those all of whose layers may have it."""
    for key, (config, reasons) in list(survey.attentions.items()):
        reason = next((each for each in reasons if each is not None), None)
        if not survey.switches["attention"]:
            reason = "attention=False"
        kind = type(config).__name__
        if reason is None:
            note = (
                f"attn_implementation of {len(reasons)} layers, was {config._attn_implementation}"
            )
            survey.rows.append(
                ModuleOutcome("config", kind, "flash_attention, decode_attention", note)
            )
        else:
            survey.rows.append(
                ModuleOutcome("config", kind, None, f"attn_implementation: {reason}")
            )
            del survey.attentions[key]
