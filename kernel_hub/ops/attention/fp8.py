"""flash_attention of e4m3 tensors with fp32 scales: checks, CPU reference, registration.

Takes q, k, v as (..., tokens, heads, head_dim). On Hopper
csrc/attention/flash_attention_fp8_sm90.cu runs it; no other GPU does.
"""

from __future__ import annotations

from typing import Any

import torch

from ...errors import KernelHubError, TensorError
from ..core import bounds, common
from ..core.launch import Launch, Plans
from . import checks as checks
from . import cpu
from . import eager as run
from . import forward_fp8 as launch
from . import registered as registered
from .forward_fp8 import OUT_DTYPES, SCALE_TOKENS, Scales
from .problem import TABLES, Options, Problem

DTYPE = torch.float8_e4m3fn
_DTYPES = (DTYPE,)
_OP = "flash_attention"
_HEAD_DIM_STEP = 16  # bytes of the TMA
_operands = common.Operands(
    f"{_OP} with float8_e4m3fn", "q k v",
    f"q_scale k_scale v_scale {' '.join(TABLES)} out",
)  # fmt: skip
_plans: Plans[run.AttentionPlan] = Plans()


def check_unscaled(**options: Any) -> None:
    """Scales and out_dtype belong to e4m3."""
    for argument, value in options.items():
        if value is not None:
            shown = common.say(value) if isinstance(value, torch.Tensor) else value
            raise TensorError(
                f"{_OP}: {argument}: expected None where q is not float8_e4m3fn, found {shown}"
            )


def _check_options(q: Any, options: Options) -> None:
    """What the kernels do not do; the same on every device."""
    causal, softcap = options.causal, options.softcap
    window_size = common.check_window(_OP, options.window_size)
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
    for argument, scale, counts, starts, rows, longest in (
        ("q_scale", scales.q, (heads, kv_heads), problem.cu_seqlens_q, q, problem.max_seqlen_q),
        ("k_scale", scales.k, (kv_heads,), problem.cu_seqlens_k, k, problem.max_seqlen_k),
        ("v_scale", scales.v, (kv_heads,), problem.cu_seqlens_k, k, problem.max_seqlen_k),
    ):
        if scale is None:
            continue
        common.check_fp32(_OP, argument, scale, q)
        if tuple(scale.shape) in ((), (1,)):
            continue
        tokens = rows.shape[1] if starts is None else longest
        blocks = -(-tokens // SCALE_TOKENS)
        of_blocks = heads if argument == "q_scale" else kv_heads
        shape = tuple(scale.shape)
        if len(shape) == 3:
            fits = shape[:2] == (problem.batch_size, of_blocks) and (
                shape[2] == blocks or (shape[2] > blocks and starts is not None)
            )
        else:
            fits = shape[-1] in counts and shape[:-1] in ((), (problem.batch_size,))
        if not fits:
            names = " or ".join(str(count) for count in sorted({int(count) for count in counts}))
            least = f"{blocks}" if starts is None else f"at least {blocks}"
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


def _check_rows_of_out(out: torch.Tensor) -> None:
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


def _problem(q: Any, k: Any, v: Any, scales: Scales, options: Options) -> Problem:
    """Everything but out, checked."""
    for argument in ("alibi_slopes", "block_table", "sinks"):
        value = getattr(options, argument)
        if value is not None:
            raise common.refuse(_OP, argument, "None where q is float8_e4m3fn", value)
    if options.batch_invariant:
        raise common.refuse(_OP, "deterministic", "no 'batch' where q is float8_e4m3fn", "'batch'")
    numbers = checks.resolve(_OP, q, k, v, options, dtypes=_DTYPES)
    problem = run.problem_of(q, k, v, numbers, options)
    _check_options(q, options)
    _check_scales(problem, scales)
    return problem


def _gpu_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: Scales, out: torch.Tensor | None,
    dtype: torch.dtype, need_lse: bool, options: Options,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    more = (
        not need_lse, dtype,
        *[None if x is None else (x.dtype, x.get_device(), x.shape, x.stride()) for x in scales],
    )  # fmt: skip
    addresses, key = run.addresses_and_key(q, k, v, out, options, more)
    if out is not None:
        addresses += tuple([x.data_ptr() for x in scales if x is not None])
    try:
        plan = _plans.get(key)
    except TypeError:  # something that is no number, which the checks will name
        plan = None
    if plan is None:
        plan = _plans.keep(key, _plan(q, k, v, scales, out, dtype, need_lse, options))
    maps = plan.spans.apart.get(addresses)
    if maps is None:
        maps = plan.spans.made(addresses, True, launch.maps, plan.launch, q, k, v)
    is_debugging = common.is_debugging() and checks.read_tables(
        _OP, run.problem_of(q, k, v, plan.numbers, options)
    )
    if out is None:
        assert plan.out is not None
        out = torch.empty_like(plan.out)
    lse = None if plan.lse is None else torch.empty_like(plan.lse)
    try:
        launch.launch(plan.launch, maps, q, scales, out, lse, options)
    except KernelHubError:
        _problem(q, k, v, scales, options)  # the launch checks devices and dtypes; this names
        raise
    if is_debugging:
        bounds.report(q, *checks.finished(options.cache_seqlens))
    return out, lse


def _plan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: Scales, out: torch.Tensor | None,
    dtype: torch.dtype, need_lse: bool, options: Options,
) -> run.AttentionPlan:  # fmt: skip
    problem = _problem(q, k, v, scales, options)
    spans = checks.spans_of(q, k, v, out, options, scales)
    to: torch.Tensor = _new_out(q, dtype) if out is None else out
    if out is not None:
        checks.check_out_layout(_OP, out, q, v, OUT_DTYPES)
        _check_rows_of_out(out)
    lse = run.new_lse(q) if need_lse else None
    planned = launch.plan(problem, scales, to, lse) if to.numel() else Launch()
    return run.attention_plan(problem.numbers, to if out is None else None, lse, planned, spans)


def _cpu_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: Scales, out: torch.Tensor | None,
    dtype: torch.dtype, need_lse: bool, options: Options,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """In fp32, probabilities too."""
    problem = _problem(q, k, v, scales, options)
    if common.is_debugging():
        checks.read_tables(_OP, problem)
    if out is None:
        out = _new_out(q, dtype)
    else:
        _check_out(problem, out, options, scales)
    lse = run.new_lse(q) if need_lse else None
    if out.numel():
        checks.check_values(_OP, problem, is_strict=False)
        values = problem._replace(
            q=_dequantised(q, scales.q, options.cu_seqlens_q),
            k=_dequantised(k, scales.k, options.cu_seqlens_k),
            v=_dequantised(v, scales.v, options.cu_seqlens_k),
        )
        cpu.forward(values, out, lse)
    return out, lse


def _check_out(problem: Problem, out: torch.Tensor, options: Options, scales: Scales) -> None:
    q, k, v = problem.q, problem.k, problem.v
    checks.check_out(_OP, q, k, v, out, options, scales, OUT_DTYPES)
    _check_rows_of_out(out)


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


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: Scales, out: torch.Tensor | None,
    out_dtype: Any, need_lse: bool, options: Options,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """(out, lse or None), out being written if given."""
    dtype = _out_dtype(out, out_dtype)
    into = _gpu_forward if q.is_cuda else _cpu_forward
    return into(q, k, v, scales, out, dtype, need_lse, options)


def _split(given: tuple[Any, ...]) -> tuple[Scales, Options, list[Any]]:
    """A schema's arguments behind v: the scales, the options, what follows them."""
    num_scales, num_options = len(Scales._fields), len(Options._fields)
    options, rest = given[num_scales:][:num_options], given[num_scales + num_options :]
    return Scales(*given[:num_scales]), registered.options_of(*options), list(rest)


def _registered(q: Any, k: Any, v: Any, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    scales, options, (out_dtype, need_lse) = _split(given)
    out, lse = _forward(q, k, v, scales, None, out_dtype, need_lse, options)
    return out, run.registered_lse(q, lse)


def _registered_fake(q: Any, k: Any, v: Any, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    scales, options, (out_dtype, need_lse) = _split(given)
    _problem(q, k, v, scales, options)
    lse = run.registered_lse(q, run.new_lse(q) if need_lse else None)
    return _new_out(q, _out_dtype(None, out_dtype)), lse


def _registered_out(q: Any, k: Any, v: Any, *given: Any) -> torch.Tensor:
    scales, options, (need_lse, out) = _split(given)
    _, lse = _forward(q, k, v, scales, out, None, need_lse, options)
    return run.registered_lse(q, lse)


def _registered_out_fake(q: Any, k: Any, v: Any, *given: Any) -> torch.Tensor:
    scales, options, (need_lse, out) = _split(given)
    _check_out(_problem(q, k, v, scales, options), out, options, scales)
    return run.registered_lse(q, run.new_lse(q) if need_lse else None)


_SCALES = "Tensor? q_scale, Tensor? k_scale, Tensor? v_scale"
_op = registered.define(
    f"flash_attention_fp8(Tensor q, Tensor k, Tensor v, {_SCALES}, {registered.OPTIONS}, "
    "ScalarType? out_dtype, bool need_lse) -> (Tensor, Tensor)",
    _registered, _registered_fake,
)  # fmt: skip
_out_op = registered.define(
    f"flash_attention_fp8_out(Tensor q, Tensor k, Tensor v, {_SCALES}, {registered.OPTIONS}, "
    "bool need_lse, Tensor(a!) out) -> Tensor",
    _registered_out, _registered_out_fake,
)  # fmt: skip


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: Scales, out: Any, out_dtype: Any,
    return_lse: bool, options: Options,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """(out, lse or None)."""
    if _operands.are_plain((q, k, v), (*scales, *options.tables, out)):
        return _forward(q, k, v, scales, out, out_dtype, return_lse, options)
    problem = _problem(q, k, v, scales, options)
    dtype = _out_dtype(out, out_dtype)
    if out is not None:
        _check_out(problem, out, options, scales)
        lse = _out_op(q, k, v, *scales, *options, return_lse, out)
        return out, lse if return_lse else None
    out, lse = _op(q, k, v, *scales, *options, dtype, return_lse)
    return out, lse if return_lse else None
