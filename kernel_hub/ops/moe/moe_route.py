"""Top-k routing of a mixture of experts (csrc/moe/moe_route.cu)."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from ...errors import KernelHubError
from ..core import common
from ..core.device import device_of
from ..core.launch import Launch, Plans

_OP = "moe_route"
_plans: Plans[tuple[tuple[Any, ...], common.Spans]] = Plans()
_operands = common.Operands(_OP, "logits", "bias weights experts")
_writes = common.Writes(_OP, "weights experts logits bias", "weights experts")
_SCORINGS = {"softmax": 0, "sigmoid": 1}
_THREADS, _WARP = 128, 32
_EACH = (4, 8, 16)  # experts a lane
_FEW_TOKENS = 4096
_MOST_EXPERTS = _WARP * _EACH[-1]
_NONE = -(2**31)  # below the key of every choice


class _Rule(NamedTuple):
    """How experts are chosen and weighed."""

    k: int
    scoring: int  # of _SCORINGS
    renormalise: bool
    num_groups: int
    top_groups: int
    scale: float
    batch_invariant: bool


def moe_route(
    logits: torch.Tensor, k: int, *, scoring: str = "softmax", renormalise: bool = False,
    bias: torch.Tensor | None = None, num_groups: int = 1, top_groups: int = 1, scale: float = 1.0,
    weights: torch.Tensor | None = None, experts: torch.Tensor | None = None,
    deterministic: bool | Literal["batch"] = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The k experts of each token, the best first, and what each of them counts.

        score = softmax(logits) or sigmoid(logits)
        choice = logits, or score + bias
        experts = the k largest choices;  weights = score[experts]
        renormalise: weights / (sum of the k + 1e-20);  then weights * scale

    in fp32. Of equal choices the lowest index goes first. A softmax over the k chosen logits alone
    (Mixtral, gpt-oss) is scoring="softmax" with renormalise. A NaN logit is the lowest of all, an
    infinite one the largest finite number of its sign; a NaN choice counts as -inf. Experts are
    always k different ones.

    logits: (tokens, num_experts), fp16, bf16 or fp32, on the GPU or the CPU; at most 512 experts;
        the last dimension contiguous.
    k: experts of a token, from 1 to those of top_groups.
    bias: (num_experts,), fp32, added to the scores for the choice alone (DeepSeek-V3).
    num_groups: of as many neighbouring experts, at most 32; experts of all but the `top_groups`
        best groups are not chosen. A group is as good as its best choice (DeepSeek-V2), with a bias
        as the sum of its two best (DeepSeek-V3).
    scale: a factor of all weights (routed_scaling_factor).
    weights: (tokens, k), fp32, contiguous, where to write; must not overlap the others.
    experts: (tokens, k), int32, likewise.
    deterministic: "batch": a token's bits depend on its logits alone, not on how many there are.

    Returns (weights, experts). A CUDA tensor runs the shipped cubin on torch's current stream; a
    CPU tensor runs a reference in torch. No backward. Raises TensorError naming the argument that
    does not fit.
    Source: Shazeer et al., "Outrageously Large Neural Networks", 2017; DeepSeek-AI, "DeepSeek-V2",
    2024, 2.1.2, and "DeepSeek-V3 Technical Report", 2024, 2.1.2.
    """
    code = common.check_choice(_OP, "scoring", scoring, _SCORINGS)
    common.check_flags(_OP, renormalise=renormalise)
    scale = common.check_number(_OP, "scale", scale)
    k, num_groups, top_groups = (
        common.check_count(_OP, argument, value, least=1)
        for argument, value in (("k", k), ("num_groups", num_groups), ("top_groups", top_groups))
    )
    batch_invariant = deterministic is not False and common.is_batch(_OP, deterministic)
    rule = _Rule(k, code, bool(renormalise), num_groups, top_groups, scale, batch_invariant)
    is_plain = _operands.are_plain((logits,), (bias, weights, experts))
    is_given = weights is not None or experts is not None
    try:
        if not is_plain:
            _check(logits, bias, *rule, weights, experts)
            if not is_given:
                return _registered.returning(logits, bias, *rule)
        if weights is None or experts is None:
            made = _new(logits, bias, *rule)
            weights = made[0] if weights is None else weights
            experts = made[1] if experts is None else experts
        if not is_plain:
            _registered.writing(logits, bias, *rule, weights, experts)
            return weights, experts
        into = _cuda_into if logits.is_cuda else _cpu_into
        into(logits, bias, *rule, weights, experts, is_given)
    except common.FOREIGN:
        _operands.check_tensors((logits,), (bias, weights, experts))  # names what has no memory
        _check(logits, bias, *rule, weights, experts)
        raise
    if is_given:
        common.written((weights, experts))
    return weights, experts


def _check(logits: Any, bias: Any, *rest: Any) -> None:
    """rest: the numbers of a _Rule, then weights and experts."""
    rule, (weights, experts) = _Rule(*rest[:-2]), rest[-2:]
    common.check_data(_OP, "logits", logits)
    if logits.dim() != 2:
        raise common.refuse(_OP, "logits", "two dimensions (tokens, num_experts)", logits)
    tokens, num_experts = logits.shape
    if not 1 <= num_experts <= _MOST_EXPERTS or tokens > common.MAX_SIZE:
        expected = f"1 to {_MOST_EXPERTS} experts of at most {common.MAX_SIZE} tokens"
        raise common.refuse(_OP, "logits", expected, logits)
    for argument, value in (("k", rule.k), ("top_groups", rule.top_groups)):
        common.check_count(_OP, argument, value, least=1)
    groups = rule.num_groups
    common.check_count(_OP, "num_groups", groups, least=1)
    if groups > _WARP or num_experts % groups:
        expected = f"at most {_WARP}, which divide {num_experts} experts"
        raise common.refuse(_OP, "num_groups", expected, groups)
    if rule.top_groups > groups:
        raise common.refuse(_OP, "top_groups", f"at most num_groups = {groups}", rule.top_groups)
    if rule.k > (most := num_experts // groups * rule.top_groups):
        raise common.refuse(_OP, "k", f"at most {most} experts of those that stay", rule.k)
    if tokens * rule.k > common.MAX_SIZE:
        expected = f"at most {common.MAX_SIZE} experts of all tokens"
        raise common.refuse(_OP, "k", expected, rule.k)
    if bias is not None:
        common.check_like(_OP, "bias", bias, (num_experts,), logits, dtypes=(torch.float32,))
    shape = (tokens, rule.k)
    for argument, out, dtype in (
        ("weights", weights, torch.float32), ("experts", experts, torch.int32)
    ):  # fmt: skip
        common.check_written(_OP, argument, out, shape, logits, (dtype,))
        if out is not None and not out.is_contiguous():
            raise common.refuse(_OP, argument, "a contiguous tensor", out)


def _new(logits: torch.Tensor, bias: Any, k: int, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (logits.shape[0], k)
    return (
        logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)
    )  # fmt: skip


def _choose(num_experts: int, tokens: int, num_groups: int) -> tuple[int, int]:
    """(experts a lane, lanes a token).

    Of few tokens a warp each, whose lanes find the largest in one instruction; of many, few lanes,
    so that tokens share what a round costs. Measured on an H200 (docs/notes/moe_route.md).
    """
    is_few = tokens <= _FEW_TOKENS or num_groups > 1
    each = next(n for n in _EACH if num_experts <= _WARP * n)
    if num_experts <= 2 * _WARP and not is_few:
        each = 8
    lanes = 1 << (-(-num_experts // each) - 1).bit_length()
    return each, _WARP if is_few else lanes


def _plan(logits: torch.Tensor, bias: Any, rule: _Rule, low_bits: int) -> Launch:
    """Choose the kernel, its launch shape and its integer parameters, for checked arguments."""
    tokens, num_experts = logits.shape
    if tokens == 0:
        return Launch()
    counted = 1 if rule.batch_invariant else tokens  # its lanes add in one order
    each, lanes = _choose(num_experts, counted, rule.num_groups)
    block_tokens = _THREADS // lanes
    elems = common.VEC_BYTES // logits.element_size()
    stride = logits.stride(0) if tokens > 1 else 0
    is_vec = not low_bits and common.is_aligned(elems, stride)
    function = common.shipped(_OP, f"{_OP}_each{each}")
    numbers = (
        stride, common.ELEMENT_TYPES.index(logits.dtype), tokens, num_experts, rule.k, lanes,
        int(is_vec), rule.scoring, int(rule.renormalise), rule.num_groups, rule.top_groups,
        rule.scale,
    )  # fmt: skip
    grid, block = (-(-tokens // block_tokens), 1, 1), (_THREADS, 1, 1)
    options = device_of(logits.device).following
    return Launch(function, grid, block, 8 * block_tokens * rule.k, numbers, options=options)


def _split(rest: tuple[Any, ...]) -> tuple[_Rule, Any, Any, bool]:
    """(rule, weights, experts, whether the caller gave one of these)."""
    size = len(_Rule._fields)
    weights, experts, is_given = (*rest[size:], True)[:3]
    return _Rule(*rest[:size]), weights, experts, is_given


def _cuda_into(logits: Any, bias: Any, *rest: Any) -> None:
    """One launch. rest: as `_split` takes it."""
    rule, weights, experts, is_given = _split(rest)
    low_bits = logits.data_ptr() & 15
    tensors = (weights, experts, logits, bias)
    key = (
        rule, low_bits,
        *[None if t is None else (t.dtype, t.shape, t.stride(), t.device) for t in tensors],
    )  # fmt: skip
    found = _plans.get(key)
    if found is None:
        _check(logits, bias, *rule, weights, experts)
        plan = _plan(logits, bias, rule, low_bits)
        found = _plans.keep(key, (tuple(plan), _writes.spans(*tensors)))
    (function, grid, block, shared_bytes, numbers, _, options), spans = found
    if is_given:
        addresses = tuple([t.data_ptr() for t in tensors if t is not None])
        if addresses not in spans.apart:
            spans.check(addresses)
    try:
        function(grid, block, shared_bytes, None, (*tensors, *numbers), **options)
    except KernelHubError:
        # The launch checks devices and dtypes; this names them.
        _check(logits, bias, *rule, weights, experts)
        raise


def _keys(choices: torch.Tensor) -> torch.Tensor:
    """Integers in the order of fp32 values, -0 as 0 and NaN as -inf."""
    known = torch.where(choices.isnan(), -torch.inf, choices) + 0.0
    bits = known.view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _first_of_equal(keys: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the `count` largest of each row, the largest first."""
    return keys.sort(dim=-1, descending=True, stable=True)[1][..., :count]


def _cpu_into(logits: Any, bias: Any, *rest: Any) -> None:
    """The same on the CPU, by torch."""
    rule, weights, experts, is_given = _split(rest)
    k, scoring, renormalise, num_groups, top_groups, scale, _ = rule
    _check(logits, bias, *rule, weights, experts)
    if is_given:
        _writes.check(weights, experts, logits, bias)
    most = torch.finfo(torch.float32).max
    x = logits.float().nan_to_num(-most, most, -most).clamp(-most, most)
    scores = torch.sigmoid(x) if scoring else x.softmax(-1)
    choices = x if bias is None else scores + bias
    keys = _keys(choices)
    if num_groups > 1:
        grouped = choices.nan_to_num(-torch.inf, torch.inf, -torch.inf).unflatten(
            -1, (num_groups, -1)
        )
        of_two = bias is not None and grouped.shape[-1] > 1
        best = grouped.topk(2, -1)[0].sum(-1) if of_two else grouped.amax(-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(-1, _first_of_equal(_keys(best), top_groups), True)
        keys = torch.where(kept[..., None], keys.unflatten(-1, (num_groups, -1)), _NONE).flatten(-2)
    chosen = _first_of_equal(keys, k)
    found = scores.gather(-1, chosen)
    if renormalise and not scoring and bias is None:
        # Not from scores, which may all be too small for fp32.
        found = (x.gather(-1, chosen) - x.amax(-1, keepdim=True)).exp()
    if renormalise:
        found = found / (found.sum(-1, keepdim=True) + 1e-20)
    weights.copy_(found * scale)
    experts.copy_(chosen)


# By their names at each call: a test gives one another's.
_registered = common.define_pair(
    _OP,
    "Tensor logits, Tensor? bias, SymInt k, int scoring, bool renormalise, SymInt num_groups, "
    "SymInt top_groups, float scale, bool batch_invariant",
    "weights experts", new=_new,
    cuda=lambda *given: _cuda_into(*given), cpu=lambda *given: _cpu_into(*given), check=_check,
)  # fmt: skip
