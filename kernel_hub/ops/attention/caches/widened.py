"""flash_attention of 16-bit queries over caches of e4m3 or int8: checks, plan, CPU reference.

Takes q, k, v as (..., tokens, heads, head_dim). One launch of
csrc/attention/flash_attention_byte_caches.cu widens the keys that queries may see to 16 bits, side
by side in memory of the call's own; attention of those follows, as of any others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ....errors import KernelHubError
from ...core import bounds, common
from ...core.device import device_of
from ...core.kv_cache import BYTES, check_aligned, check_cache_scales
from ...core.launch import Launch, Plans
from .. import checks as checks
from .. import cpu
from .. import eager as run
from .. import registered as registered
from ..problem import TABLES, Options, Problem

DTYPES = tuple(BYTES)
CUBIN = "flash_attention_byte_caches"
# Of a call's own memory, unless the keys and values of one head are more. For tests.
most_bytes = 1 << 29
_OP = "flash_attention"
_UNIT, _THREADS = 16, 256  # bytes a thread reads at once
_UNITS_PER_BLOCK = 8 * _THREADS
_SCALES = "k_scale v_scale k_scale_cache v_scale_cache"
_operands = common.Operands(
    f"{_OP} over caches of bytes", "q k v", f"{_SCALES} {' '.join(TABLES)} out"
)


class CacheScales(NamedTuple):
    """What the bytes of k and v are multiplied by, as they came: of heads, or of tokens."""

    k: Any
    v: Any
    k_tokens: Any = None
    v_tokens: Any = None

    @property
    def given(self) -> tuple[Any, Any]:
        """Those of k and of v."""
        return self[2:] if self.k_tokens is not None else self[:2]


class Share(NamedTuple):
    """Heads of a cache whose keys and values are widened, and attended to, at a time."""

    kv_heads: slice
    heads: slice
    widen: Launch
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]


class CachesPlan(NamedTuple):
    """All that layouts and options say of a call."""

    numbers: checks.Numbers
    shares: tuple[Share, ...]
    spans: common.Spans


_plans: Plans[CachesPlan] = Plans()
_new = torch.Tensor.new_empty  # by a name of its own, for tests


def is_cache(q: Any, k: Any) -> bool:
    """Whether k is for this module."""
    return (
        isinstance(k, torch.Tensor)
        and k.dtype in DTYPES
        and isinstance(q, torch.Tensor)
        and q.dtype is not torch.float8_e4m3fn
    )


def refuse_scales(*of_tokens: Any) -> None:
    """Where k and v are no caches of bytes, or q is of bytes too."""
    for argument, scale in zip(_SCALES.split()[2:], of_tokens, strict=True):
        if scale is not None:
            expected = "None but with k and v of float8_e4m3fn or int8 beside a q of 16 bits"
            raise common.refuse(_OP, argument, expected, scale)


def tokens_first(layout: str, *of_tokens: Any) -> tuple[Any, ...]:
    """Scales of tokens, which lie as the tensors of `layout` do, as those of bshd."""
    return tuple(
        x.transpose(1, 2) if layout != "bshd" and isinstance(x, torch.Tensor) and x.dim() == 3
        else x for x in of_tokens
    )  # fmt: skip


def _problem(q: Any, k: Any, v: Any, scales: CacheScales, options: Options) -> Problem:
    """Everything but out, checked."""
    byte = (k.dtype,) if is_cache(q, k) else DTYPES
    numbers = checks.resolve(_OP, q, k, v, options, dtypes=common.HALF, cache_dtypes=byte)
    for argument, x in (("k", k), ("v", v)):
        if x.shape[-1] % _UNIT:
            expected = f"a head_dim in multiples of {_UNIT} of a cache of bytes"
            raise common.refuse(_OP, argument, expected, x)
        check_aligned(_OP, argument, x)
    kv_heads = k.shape[-2]
    if not scales.k_tokens is scales.v_tokens is None:
        check_cache_scales(_OP, k, scales.k, scales.v, q, scales.k_tokens, scales.v_tokens)
        return run.problem_of(q, k, v, numbers, options)
    for argument, scale in (("k_scale", scales.k), ("v_scale", scales.v)):
        if scale is None and k.dtype == torch.int8:
            check_cache_scales(_OP, k, scales.k, scales.v, q)  # names it
        if scale is None:
            continue
        common.check_fp32(_OP, argument, scale, q)
        if tuple(scale.shape) not in ((), (1,), (kv_heads,)):
            raise common.refuse(
                _OP, argument, f"a scale of the cache, () or (1,), or of heads, ({kv_heads},), "
                "beside a q of 16 bits", scale,
            )  # fmt: skip
    return run.problem_of(q, k, v, numbers, options)


def _token_strides(x: torch.Tensor) -> tuple[int, int, int]:
    """(page or sequence, token, head)."""
    return 0 if x.dim() == 3 else x.stride(0), x.stride(-3), x.stride(-2)


def _scale_strides(scale: torch.Tensor | None) -> tuple[int, ...]:
    """(page or sequence, token, head); 0 where there is one scale for all of them."""
    if scale is None or (scale.dim() < 2 and scale.numel() == 1):
        return (0, 0, 0)
    return (*(0,) * (3 - scale.dim()), *scale.stride())


def _shares(problem: Problem, scales: CacheScales) -> tuple[Share, ...]:
    """As few, and as alike, as `most_bytes` lets there be."""
    q, k, v = problem.q, problem.k, problem.v
    num_kv_heads, group = k.shape[-2], q.shape[-2] // k.shape[-2]
    seqlen_q, rows = problem.seqlens
    leading: tuple[int, ...] = (k.shape[0],)
    if problem.cu_seqlens_k is None:
        rows = min(rows, problem.max_seqlen_k)
        leading = (problem.batch_size, rows)
    total = 1
    for size in leading:
        total *= size
    head_bytes = 2 * total * (q.shape[-1] + v.shape[-1])
    at_once = max(1, min(num_kv_heads, most_bytes // max(1, head_bytes)))
    count = -(-num_kv_heads // at_once)
    at_once = -(-num_kv_heads // count)
    function = common.shipped(CUBIN, f"{CUBIN}_{common.DTYPE_TOKENS[q.dtype]}")
    table, is_paged = problem.block_table, problem.block_table is not None
    shares = []
    for first in range(0, num_kv_heads, at_once):
        heads = min(at_once, num_kv_heads - first)
        units = heads * max(q.shape[-1], v.shape[-1]) // _UNIT
        tokens = max(1, _UNITS_PER_BLOCK // units)
        numbers = (
            *_token_strides(k), *_token_strides(v), *_scale_strides(scales.given[0]),
            *_scale_strides(scales.given[1]), 0 if table is None else table.stride(0),
            problem.batch_size, seqlen_q, rows, *problem.totals, heads,
            k.shape[1] if is_paged else 1, k.shape[0] if is_paged else 1, q.shape[-1], v.shape[-1],
            problem.window[0], tokens, int(k.dtype == torch.int8),
        )  # fmt: skip
        grid = (-(-rows // tokens), min(problem.batch_size, common.MAX_GRID_Y), 2)
        widen = Launch()
        if grid[0] and grid[1]:
            options = device_of(q.device).following
            widen = Launch(function, grid, (_THREADS, 1, 1), 0, numbers, options=options)
        shares.append(Share(
            slice(first, first + heads), slice(first * group, (first + heads) * group), widen,
            (*leading, heads, q.shape[-1]), (*leading, heads, v.shape[-1]),
        ))  # fmt: skip
    return tuple(shares)


def _plan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: CacheScales,
    out: torch.Tensor | None, options: Options,
) -> CachesPlan:  # fmt: skip
    problem = _problem(q, k, v, scales, options)
    spans = checks.spans_of(q, k, v, out, options, (None, *scales))
    if out is not None:
        checks.check_out_layout(_OP, out, q, v, (q.dtype,))
    return CachesPlan(problem.numbers, _shares(problem, scales), spans)


def _of_heads(x: torch.Tensor | None, heads: slice) -> torch.Tensor | None:
    """What a table of heads, its last dimension, says of these."""
    return None if x is None else x[..., heads]


def _cuda_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: CacheScales,
    out: torch.Tensor | None, need_lse: bool, options: Options,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Keys and values widened, then attention of them; a share of the heads at a time."""
    more = (
        (k.data_ptr() | v.data_ptr()) % common.VEC_BYTES, most_bytes,
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
        plan = _plans.keep(key, _plan(q, k, v, scales, out, options))
    if addresses not in plan.spans.apart:
        plan.spans.check(addresses)
    if common.is_debugging():
        checks.read_tables(_OP, run.problem_of(q, k, v, plan.numbers, options))
    # What was widened has no pages; how long it may be is its shape.
    dense = options._replace(block_table=None)
    if options.cu_seqlens_k is None:
        dense = dense._replace(max_seqlen_k=None)
    if len(plan.shares) == 1:
        keys, values = _widened(plan.shares[0], q, k, v, scales, options)
        return run.forward(_OP, q, keys, values, out, need_lse, dense)
    if out is None:
        out = run.new_out(q, v)
    lse = run.new_lse(q) if need_lse else None
    for share in plan.shares:
        heads = share.heads
        keys, values = _widened(share, q, k, v, scales, options)
        _, found = run.forward(
            _OP, q[..., heads, :], keys, values, out[..., heads, :], need_lse,
            dense._replace(
                alibi_slopes=_of_heads(options.alibi_slopes, heads),
                sinks=_of_heads(options.sinks, heads),
            ),
        )  # fmt: skip
        if lse is not None and found is not None:
            (lse[heads] if lse.dim() == 2 else lse[:, heads]).copy_(found)
    return out, lse


def _widened(
    share: Share, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: CacheScales,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Keys and values of a share's heads in q's dtype, those that queries may see."""
    keys, values = _new(q, share.k_shape), _new(q, share.v_shape)
    heads = share.kv_heads
    function, grid, block, shared_bytes, numbers, _, how = share.widen
    of_heads = [x if x is None or x.numel() == 1 else _of_heads(x, heads) for x in scales.given]
    params = (
        keys, values, bounds.flag(_OP, q), k[..., heads, :], v[..., heads, :], *of_heads,
        options.cu_seqlens_q, options.cu_seqlens_k, options.cache_seqlens, options.block_table,
        *numbers,
    )  # fmt: skip
    try:
        function(grid, block, shared_bytes, None, params, **how)
    except KernelHubError:
        _problem(q, k, v, scales, options)  # the launch checks devices and dtypes; this names
        raise
    return keys, values


def _cpu_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: CacheScales,
    out: torch.Tensor | None, need_lse: bool, options: Options,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """In fp32, of scaled keys and values too, which the kernels round to q's dtype."""
    problem = _problem(q, k, v, scales, options)
    if common.is_debugging():
        checks.read_tables(_OP, problem)
    if out is None:
        out = run.new_out(q, v)
    else:
        _check_out(problem, out, options, scales)
    lse = run.new_lse(q) if need_lse else None
    if out.numel():
        checks.check_values(_OP, problem, is_strict=False)
        keys, values = map(_scaled, (k, v), scales.given)
        cpu.forward(problem._replace(k=keys, v=values), out, lse)
    return out, lse


def _scaled(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """x * scale in fp32."""
    values = x.float()
    if scale is None:
        return values
    return values * (scale.reshape(-1, 1) if scale.dim() < 2 else scale[..., None])


def _check_out(problem: Problem, out: Any, options: Options, scales: CacheScales) -> None:
    q, k, v = problem.q, problem.k, problem.v
    checks.check_out(_OP, q, k, v, out, options, (None, *scales), (q.dtype,))


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: CacheScales,
    out: torch.Tensor | None, need_lse: bool, options: Options,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """(out, lse or None), out being written if given."""
    into = _cuda_forward if q.is_cuda else _cpu_forward
    return into(q, k, v, scales, out, need_lse, options)


def _split(given: tuple[Any, ...]) -> tuple[CacheScales, Options, list[Any]]:
    """A schema's arguments behind v: the scales, the options, what follows them."""
    num_scales, num_options = len(CacheScales._fields), len(Options._fields)
    options, rest = given[num_scales:][:num_options], given[num_scales + num_options :]
    return CacheScales(*given[:num_scales]), registered.options_of(*options), list(rest)


def _registered(q: Any, k: Any, v: Any, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    scales, options, (need_lse,) = _split(given)
    out, lse = _forward(q, k, v, scales, None, need_lse, options)
    return out, run.registered_lse(q, lse)


def _registered_fake(q: Any, k: Any, v: Any, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    scales, options, (need_lse,) = _split(given)
    _problem(q, k, v, scales, options)
    return run.new_out(q, v), run.registered_lse(q, run.new_lse(q) if need_lse else None)


def _registered_out(q: Any, k: Any, v: Any, *given: Any) -> torch.Tensor:
    scales, options, (need_lse, out) = _split(given)
    _, lse = _forward(q, k, v, scales, out, need_lse, options)
    return run.registered_lse(q, lse)


def _registered_out_fake(q: Any, k: Any, v: Any, *given: Any) -> torch.Tensor:
    scales, options, (need_lse, out) = _split(given)
    _check_out(_problem(q, k, v, scales, options), out, options, scales)
    return run.registered_lse(q, run.new_lse(q) if need_lse else None)


_GIVEN = ", ".join(["Tensor q", "Tensor k", "Tensor v", *map("Tensor? {}".format, _SCALES.split())])
_op = registered.define(
    f"{CUBIN}({_GIVEN}, {registered.OPTIONS}, bool need_lse) -> (Tensor, Tensor)",
    _registered, _registered_fake,
)  # fmt: skip
_out_op = registered.define(
    f"{CUBIN}_out({_GIVEN}, {registered.OPTIONS}, bool need_lse, Tensor(a!) out) -> Tensor",
    _registered_out, _registered_out_fake,
)  # fmt: skip


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: CacheScales, out: Any,
    return_lse: bool, options: Options,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """(out, lse or None)."""
    if _operands.are_plain((q, k, v), (*scales, *options.tables, out)):
        return _forward(q, k, v, scales, out, return_lse, options)
    problem = _problem(q, k, v, scales, options)
    if out is not None:
        _check_out(problem, out, options, scales)
        lse = _out_op(q, k, v, *scales, *options, return_lse, out)
        return out, lse if return_lse else None
    out, lse = _op(q, k, v, *scales, *options, return_lse)
    return out, lse if return_lse else None
