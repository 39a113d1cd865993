"""flash_attention of e4m3 tensors with fp32 scales: checks, CPU reference, registration.

Takes q, k, v as (..., tokens, heads, head_dim). On Hopper
csrc/attention/flash_attention_fp8_sm90.cu runs it; no other GPU does.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ...errors import KernelHubError, TensorError
from ..core import common
from . import checks as checks
from . import cpu
from . import eager as run
from . import forward_fp8 as launch
from .forward_fp8 import OUT_DTYPES, SCALE_TOKENS, Scales
from .problem import Problem

DTYPE = torch.float8_e4m3fn
_DTYPES = (DTYPE,)
_OP = "flash_attention"
_HEAD_DIM_STEP = 16  # bytes of the TMA
_operands = common.Operands(
    f"{_OP} with float8_e4m3fn", "q k v",
    "q_scale k_scale v_scale alibi_slopes cu_seqlens_q cu_seqlens_k block_table cache_seqlens out",
)  # fmt: skip
# Calls on a GPU whose options and scales were checked.
_checked: set[tuple[Any, ...]] = set()


def check_unscaled(**options: Any) -> None:
    """Scales and out_dtype belong to e4m3."""
    for argument, value in options.items():
        if value is not None:
            shown = common.say(value) if isinstance(value, torch.Tensor) else value
            raise TensorError(
                f"{_OP}: {argument}: expected None where q is not float8_e4m3fn, found {shown}"
            )


def _check_options(q: Any, options: tuple[Any, ...]) -> None:
    """What the kernels do not do; the same on every device."""
    causal, _, _, softcap = options[:4]
    window_size = common.check_window(_OP, options[2])
    is_open = window_size[0] == -1 and (window_size[1] == -1 or (causal or window_size[1] == 0))
    if not is_open:
        raise common.refuse(
            _OP, "window_size", "no window where q is float8_e4m3fn", repr(tuple(window_size))
        )
    if softcap:
        raise common.refuse(_OP, "softcap", "0 where q is float8_e4m3fn", softcap)
    head_dim = q.shape[-1]
    if head_dim % _HEAD_DIM_STEP:
        expected = f"a head_dim in multiples of {_HEAD_DIM_STEP} with float8_e4m3fn"
        raise common.refuse(_OP, "q", expected, q)


def _check_scales(problem: Problem, scales: Scales) -> None:
    q, k = problem.q, problem.k
    heads, kv_heads = q.shape[-2], k.shape[-2]
    for argument, scale, counts, bounds, rows, longest in (
        ("q_scale", scales.q, (heads, kv_heads), problem.cu_seqlens_q, q, problem.max_seqlen_q),
        ("k_scale", scales.k, (kv_heads,), problem.cu_seqlens_k, k, problem.max_seqlen_k),
        ("v_scale", scales.v, (kv_heads,), problem.cu_seqlens_k, k, problem.max_seqlen_k),
    ):
        if scale is None:
            continue
        common.check_tensor(_OP, argument, scale)
        if scale.dtype != torch.float32:
            raise common.refuse(_OP, argument, "dtype float32", scale)
        if scale.device != q.device:
            raise common.refuse(_OP, argument, f"device {q.device}", scale)
        if tuple(scale.shape) in ((), (1,)):
            continue
        tokens = rows.shape[1] if bounds is None else longest
        blocks = -(-tokens // SCALE_TOKENS)
        of_blocks = heads if argument == "q_scale" else kv_heads
        shape = tuple(scale.shape)
        if len(shape) == 3:
            fits = shape[:2] == (problem.batch_size, of_blocks) and (
                shape[2] == blocks or (shape[2] > blocks and bounds is not None)
            )
        else:
            fits = shape[-1] in counts and shape[:-1] in ((), (problem.batch_size,))
        if not fits:
            names = " or ".join(str(count) for count in sorted({int(count) for count in counts}))
            least = f"{blocks}" if bounds is None else f"at least {blocks}"
            raise common.refuse(
                _OP, argument, f"a scale of the tensor, () or (1,); of heads, ({names},) or "
                f"({problem.batch_size}, {names}); or of blocks of {SCALE_TOKENS} tokens, "
                f"({problem.batch_size}, {of_blocks}, {least})", scale,
            )  # fmt: skip


def _out_dtype(out: Any, out_dtype: Any) -> torch.dtype:
    common.check_dtype(_OP, "out_dtype", out_dtype, OUT_DTYPES)
    if out is None:
        return out_dtype or torch.bfloat16
    common.check_tensor(_OP, "out", out)
    if out_dtype is not None and out.dtype != out_dtype:
        raise common.refuse(_OP, "out", f"dtype {out_dtype}, as out_dtype says", out)
    return out.dtype


def _check_out(out: torch.Tensor, problem: Problem, scales: Scales) -> None:
    checks.check_out(
        _OP, out, problem.q, problem.k, problem.v, None, problem.cu_seqlens_q,
        problem.cu_seqlens_k, None, problem.cache_seqlens, scales.q, scales.k, scales.v,
        dtypes=OUT_DTYPES,
    )  # fmt: skip
    step = common.VEC_BYTES // out.element_size()
    if not common.is_aligned(step, *out.stride()[:-1]) or (
        common.is_plain(out) and out.data_ptr() % common.VEC_BYTES
    ):
        raise common.refuse(_OP, "out", "rows that start at multiples of 16 bytes", out)


def _new_out(q: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """With the order of q's dimensions in memory, without its gaps."""
    out = torch.empty_like(q, dtype=dtype)
    contiguous = torch.contiguous_format
    return (
        out if out.stride(-1) == 1 else torch.empty_like(q, dtype=dtype, memory_format=contiguous)
    )


def _problem(q: Any, k: Any, v: Any, scales: Scales, options: tuple[Any, ...]) -> Problem:
    """Everything but out, checked."""
    for argument, value in (("alibi_slopes", options[4]), ("block_table", options[9])):
        if value is not None:
            raise common.refuse(_OP, argument, "None where q is float8_e4m3fn", value)
    problem = run.problem_of(_OP, q, k, v, *options, dtypes=_DTYPES)
    if not (q.is_cuda and common.is_plain(q, k)):
        _check_options(q, options)
        _check_scales(problem, scales)
        return problem
    key = (
        q.shape, k.shape, q.device, options[0], options[2], options[3], problem.batch_size,
        problem.max_seqlen_q, problem.max_seqlen_k, options[5] is None, options[6] is None,
        *[None if x is None else (x.shape, x.dtype, x.device)
          for x in (scales.q, scales.k, scales.v)],
    )  # fmt: skip
    if key not in _checked:
        _check_options(q, options)
        _check_scales(problem, scales)
        if len(_checked) >= common.MAX_PLANS:
            _checked.clear()
        _checked.add(key)
    return problem


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: Scales, out: torch.Tensor | None,
    out_dtype: Any, need_lse: bool, options: tuple[Any, ...],
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """(out, lse or None), out being written if given."""
    dtype = _out_dtype(out, out_dtype)
    problem = _problem(q, k, v, scales, options)
    if out is None:
        out = _new_out(q, dtype)
    else:
        _check_out(out, problem, scales)
    lse = run.new_lse(q, problem.cu_seqlens_q is not None) if need_lse else None
    if out.numel() == 0:
        return out, lse
    try:
        (launch.forward if q.is_cuda else _cpu_forward)(problem, scales, out, lse)
    except KernelHubError:
        # The launch checks devices and dtypes; this names them.
        checks.resolve(_OP, q, k, v, *options, dtypes=_DTYPES)
        raise
    run.report(problem)
    return out, lse


def _dequantised(
    x: torch.Tensor, scale: torch.Tensor | None, bounds: torch.Tensor | None
) -> torch.Tensor:
    """x * scale in fp32."""
    values = x.float()
    if scale is None or scale.numel() == 1:
        return values if scale is None else values * scale
    group = x.shape[-2] // scale.shape[0 if scale.dim() == 1 else 1]
    if scale.dim() == 1:
        return values * scale.repeat_interleave(group)[:, None]
    by_head = scale.repeat_interleave(group, 1)
    starts = None if bounds is None else bounds.tolist()
    for index in range(by_head.shape[0]):
        rows = values[index] if starts is None else values[starts[index] : starts[index + 1]]
        if scale.dim() == 2:
            rows *= by_head[index][:, None]
        else:
            blocks = torch.arange(rows.shape[0]).clamp(max=scale.shape[2] * SCALE_TOKENS - 1)
            rows *= by_head[index][:, blocks // SCALE_TOKENS].transpose(0, 1)[..., None]
    return values


def _cpu_forward(
    problem: Problem, scales: Scales, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """In fp32, probabilities too."""
    checks.check_values(_OP, problem, is_strict=False)
    cpu.forward(
        dataclasses.replace(
            problem,
            q=_dequantised(problem.q, scales.q, problem.cu_seqlens_q),
            k=_dequantised(problem.k, scales.k, problem.cu_seqlens_k),
            v=_dequantised(problem.v, scales.v, problem.cu_seqlens_k),
        ),
        out,
        lse,
    )


_OPTIONS = (
    "Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, bool causal, float? softmax_scale, "
    "SymInt[] window_size, float softcap, Tensor? alibi_slopes, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, SymInt? max_seqlen_q, SymInt? max_seqlen_k, Tensor? block_table, "
    "Tensor? cache_seqlens"
)


def _no_lse(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty((0,), dtype=torch.float32)


def _split(rest: tuple[Any, ...]) -> tuple[Scales, tuple[Any, ...]]:
    """The scales; the options, a schema's list of numbers as the tuple the plans are kept by."""
    options = rest[3:14]
    return Scales(*rest[:3]), (*options[:2], tuple(options[2]), *options[3:])


def _registered(q: Any, k: Any, v: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    scales, options = _split(rest)
    out, lse = _forward(q, k, v, scales, None, rest[14], rest[15], options)
    return out, _no_lse(q) if lse is None else lse


def _registered_fake(q: Any, k: Any, v: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    scales, options = _split(rest)
    _problem(q, k, v, scales, options)
    lse = run.new_lse(q, options[5] is not None) if rest[15] else _no_lse(q)
    return _new_out(q, _out_dtype(None, rest[14])), lse


def _registered_out(q: Any, k: Any, v: Any, *rest: Any) -> torch.Tensor:
    scales, options = _split(rest)
    _, lse = _forward(q, k, v, scales, rest[15], None, rest[14], options)
    return _no_lse(q) if lse is None else lse


def _registered_out_fake(q: Any, k: Any, v: Any, *rest: Any) -> torch.Tensor:
    scales, options = _split(rest)
    _check_out(rest[15], _problem(q, k, v, scales, options), scales)
    return run.new_lse(q, options[5] is not None) if rest[14] else _no_lse(q)


_op = common.define(
    f"flash_attention_fp8(Tensor q, Tensor k, Tensor v, {_OPTIONS}, ScalarType? out_dtype, "
    "bool need_lse) -> (Tensor, Tensor)",
    cuda=_registered, cpu=_registered, fake=_registered_fake,
)  # fmt: skip
_out_op = common.define(
    f"flash_attention_fp8_out(Tensor q, Tensor k, Tensor v, {_OPTIONS}, bool need_lse, "
    "Tensor(a!) out) -> Tensor",
    cuda=_registered_out, cpu=_registered_out, fake=_registered_out_fake,
)  # fmt: skip


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: tuple[Any, Any, Any], out: Any,
    out_dtype: Any, return_lse: bool, options: tuple[Any, ...],
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """(out, lse or None). `options`: those of `_attention_run.problem_of`."""
    if _operands.are_plain((q, k, v), (*scales, *options[4:7], *options[9:], out)):
        return _forward(q, k, v, Scales(*scales), out, out_dtype, return_lse, options)
    problem = _problem(q, k, v, Scales(*scales), options)
    dtype = _out_dtype(out, out_dtype)
    if out is not None:
        _check_out(out, problem, Scales(*scales))
        lse = _out_op(q, k, v, *scales, *options, return_lse, out)
        return out, lse if return_lse else None
    out, lse = _op(q, k, v, *scales, *options, dtype, return_lse)
    return out, lse if return_lse else None
