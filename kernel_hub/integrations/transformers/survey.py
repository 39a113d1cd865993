"""Which modules of a model are replaced, and by what: looks at everything, changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from . import families, moe
from .attention import DTYPES, refused_head
from .outcomes import ModuleOutcome


@dataclass
class Change:
    """A module to be changed: its new forward, and the groups of layers to be joined first."""

    module: torch.nn.Module
    kind: str
    op: str
    details: dict[str, Any] = field(default_factory=dict)
    joined: tuple[tuple[Any, ...], ...] = ()


@dataclass
class Survey:
    """What was found so far."""

    shared: set[int]
    switches: dict[str, bool]
    rows: list[ModuleOutcome] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    attentions: dict[int, tuple[Any, list[str | None]]] = field(default_factory=dict)
    covered: set[int] = field(default_factory=set)  # ids of modules whose work another one's does

    def leave(self, name: str, module: torch.nn.Module, reason: str) -> None:
        self.rows.append(ModuleOutcome(name, type(module).__name__, None, reason))

    def take(self, name: str, change: Change, note: str = "") -> None:
        self.rows.append(ModuleOutcome(name, type(change.module).__name__, change.op, note))
        self.changes.append(change)
        self.covered.update(id(each) for group in change.joined for each in group)


def survey_of(model: torch.nn.Module, switches: dict[str, bool]) -> Survey:
    """Look at every module, outer ones first."""
    survey = Survey(families.shared_memory(model), switches)
    rest = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        if id(module) in survey.covered:
            continue
        if kind in families.NORMS:
            _norm(survey, name, module)
        elif kind in families.ATTENTIONS:
            _attention(survey, name, module)
        elif kind in families.MLPS:
            _mlp(survey, name, module)
        elif kind in families.MOE_BLOCKS:
            _moe(survey, name, module)
        elif type(module) is torch.nn.Linear:
            rest.append((name, module))
        elif families.is_of_interest(module):
            survey.leave(name, module, "this class is not known")
    for name, module in rest:
        if id(module) not in survey.covered:
            _linear(survey, name, module)
    _implementations(survey)
    return survey


def _norm(survey: Survey, name: str, module: Any) -> None:
    reason = families.unfit_norm(module, survey.shared)
    if not survey.switches["norms"]:
        reason = "norms=False"
    if reason is not None:
        survey.leave(name, module, reason)
        return
    survey.take(name, Change(module, "norm", "rms_norm", _norm_details(module)))


def _linear(survey: Survey, name: str, module: Any) -> None:
    reason = families.unfit_linear("", module, DTYPES, survey.shared)
    if not survey.switches["linears"]:
        reason = "linears=False"
    if reason is None:
        survey.take(name, Change(module, "linear", "linear"))
    else:
        survey.leave(name, module, reason)


def _mlp(survey: Survey, name: str, module: Any) -> None:
    reason = families.stranger(module, "mlp")
    gate = families.gate_of(getattr(module, "act_fn", None))
    if not survey.switches["mlps"]:
        reason = "mlps=False"
    elif reason is None and gate is None:
        reason = _unknown_gate(module)
    elif reason is None:
        reason = _unfit_to_join(survey, module, ("gate_proj", "up_proj"))
    if reason is not None:
        survey.leave(name, module, reason)
        return
    op = "linear, silu_and_mul" if gate == "silu" else "linear, gelu_and_mul"
    if module.gate_proj.bias is None:
        op = "swiglu_linear" if gate == "silu" else "gated_linear"
    joined = ((module.gate_proj, module.up_proj),)
    survey.take(name, Change(module, "mlp", op, {"gate": gate}, joined))


def _unknown_gate(module: Any) -> str:
    return f"its gate is {type(module.act_fn).__name__}: SiLU and GELU are known"


def _moe(survey: Survey, name: str, module: Any) -> None:
    """Experts, and the router in front of them, by one of two ways: transformers 5 has both as
    modules, with the weights of all experts in one parameter; before it the block did it all."""
    reason = families.stranger(module, "moe_block")
    if not survey.switches["experts"]:
        reason = "experts=False"
    if reason is not None:
        survey.leave(name, module, reason)
    elif isinstance(module.experts, torch.nn.ModuleList):
        _moe_of_layers(survey, name, module)
    else:
        _moe_of_parameters(survey, name, module)


def _moe_of_parameters(survey: Survey, name: str, module: Any) -> None:
    experts, router = module.experts, module.gate
    reason = families.stranger(experts, "experts") or families.stranger(router, "router")
    gate = families.gate_of(getattr(experts, "act_fn", None))
    if reason is None and gate is None:
        reason = _unknown_gate(experts)
    for which, parts in (("gate", ["weight"]), ("experts", ["gate_up_proj", "down_proj"])):
        for part in parts:
            weight = getattr(getattr(module, which), part, None)
            unfit = families.unfit_weight(f"{which}.{part}", weight, DTYPES, survey.shared)
            reason = reason or unfit
    reason = reason or moe.unfit_sizes(experts.gate_up_proj, experts.down_proj)
    survey.covered.update((id(experts), id(router)))
    if reason is not None:
        survey.leave(f"{name}.experts", experts, reason)
        return
    survey.take(f"{name}.experts", Change(experts, "experts", moe.OPS, {"gate": gate}))
    details = {"renormalise": getattr(router, "norm_topk_prob", True)}
    survey.take(f"{name}.gate", Change(router, "router", "linear, moe_route", details))


def _moe_of_layers(survey: Survey, name: str, module: Any) -> None:
    names = moe.layers_of(module.experts[0])
    reason = None if names else "its experts have layers of unknown names"
    alike: tuple[list[Any], list[Any]] = [], []
    for index, expert in enumerate(module.experts):
        if names is None or reason is not None:
            break
        reason = families.stranger(expert, "mlp") or _unfit_to_join(survey, expert, names[:2])
        if families.has_hooks(expert):
            reason = "it has hooks"
        down = getattr(expert, names[2])
        reason = reason or families.unfit_linear(names[2], down, DTYPES, survey.shared)
        if reason is None and any(getattr(expert, each).bias is not None for each in names):
            reason = "biases of experts"
        reason = reason and f"experts.{index}: {reason}"
        alike[0].extend(getattr(expert, each) for each in names[:2])
        alike[1].append(down)
    reason = reason or moe.unlike(alike)
    gate = families.gate_of(getattr(module.experts[0], "act_fn", None))
    if reason is None and gate is None:
        reason = _unknown_gate(module.experts[0])
    if reason is not None:
        survey.leave(name, module, reason)
        return
    details = {"gate": gate, "renormalise": getattr(module, "norm_topk_prob", True)}
    joined = (tuple(alike[0]), tuple(alike[1]))
    op = f"moe_route, {moe.OPS}"
    survey.take(name, Change(module, "moe_block", op, details, joined))
    survey.covered.update(id(each) for each in module.experts.modules())


def _unfit_to_join(survey: Survey, module: Any, names: tuple[str, ...]) -> str | None:
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


def _attention(survey: Survey, name: str, module: Any) -> None:
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
        unfit_q = families.unfit_weight("q_proj.weight", weight, families.NORM_DTYPES, set())
        if unfit_q is not None:
            survey.leave(name, module, unfit_q)
        else:
            change = Change(module, "attention", "rope", details)
            survey.take(name, change, f"projections not joined: {unfit}")
        return
    op = "linear, rope" if module.head_dim % 32 or details["norm"] == "whole" else "qkv_linear"
    if details["norm"] == "head" and op == "qkv_linear":
        unfit = _unfit_to_fuse(survey, module)
        details["norm_details"] = _norm_details(module.q_norm)
        op = op if unfit is None else "linear, rope"
    survey.take(name, Change(module, "attention", op, details, (layers,)))


def _unfit_to_fuse(survey: Survey, module: Any) -> str | None:
    """Why norms of queries and keys cannot be part of their projection; None: they can."""
    found = []
    for name in ("q_norm", "k_norm"):
        norm = getattr(module, name)
        reason = families.unfit_norm(norm, survey.shared)
        if not survey.switches["norms"]:
            reason = "norms=False"
        elif reason is None and families.has_hooks(norm):
            reason = f"{name} has hooks"
        elif reason is None and norm.weight.dtype is not module.q_proj.weight.dtype:
            reason = f"{name} is of another dtype"
        if reason is not None:
            return reason
        found.append(_norm_details(norm))
    return None if found[0] == found[1] else "q_norm and k_norm differ"


def _norm_details(norm: Any) -> dict[str, Any]:
    return {"eps": families.eps_of(norm), "weight_offset": families.weight_offset(norm)}


def _details(module: Any, code: Any) -> dict[str, Any] | str:
    """How the forward of its class calls what it calls; in words, what is not known of it."""
    parameters = code.co_varnames[1 : code.co_argcount]
    caches = [name for name in families.CACHES if name in parameters]
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
        "softcap": "attn_logit_softcapping" in code.co_names, "norm_details": {},
    }  # fmt: skip


def _implementations(survey: Survey) -> None:
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
