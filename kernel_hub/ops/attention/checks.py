"""What attention demands of its arguments, by name and with both values; the numbers they come to.

Everything here looks at shapes, strides, dtypes and devices only, but for `check_values`, which
reads tables on the device and therefore waits for it: only under KERNEL_HUB_DEBUG=1.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from ...errors import TensorError
from ..core import common
from ..core.kv_cache import check_alibi, check_block_table, check_cu_seqlens, check_sinks
from .problem import TABLES, Options, Problem

LAYOUTS = {"bshd": 1, "bhsd": 2}  # the dimension of tokens
MIN_HEAD_DIM, MAX_HEAD_DIM, MAX_HEAD_DIM_FP32 = 16, 256, 128
DTYPES = (*common.HALF, torch.float32)  # fp32 has no backward
MAX_PAGE_SIZE = 256
# batch_size, max_seqlen_q, max_seqlen_k, softmax_scale, window_left, window_right, softcap
Numbers = tuple[int, int, int, float, int, int, float]


def check_layout(op: str, layout: Any) -> None:
    """`layout` must be one of the known ones."""
    common.check_choice(op, "layout", layout, LAYOUTS)


def resolve(
    op: str, q: Any, k: Any, v: Any, options: Options, *,
    dtypes: tuple[torch.dtype, ...] = DTYPES, cache_dtypes: tuple[torch.dtype, ...] = (),
) -> Numbers:  # fmt: skip
    """Check everything that does not lie on the device; what the launch needs beside tensors.

    cache_dtypes: of k and v, where that is not q's."""
    (causal, softmax_scale, window_size, softcap, alibi_slopes, cu_seqlens_q, cu_seqlens_k,
     max_seqlen_q, max_seqlen_k, block_table, cache_seqlens, sinks, _) = options  # fmt: skip
    _check_qkv(op, q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, dtypes, cache_dtypes)
    if cu_seqlens_k is not None:
        for argument, value in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
            if value is not None:
                raise TensorError(
                    f"{op}: {argument}: expected None beside cu_seqlens_k, which says where the "
                    f"keys are, found {common.say(value)}"
                )
    batch_size = q.shape[0]
    if cu_seqlens_q is not None:
        check_cu_seqlens(op, "cu_seqlens_q", cu_seqlens_q, q)
        batch_size = cu_seqlens_q.shape[0] - 1
    if cu_seqlens_k is not None:
        check_cu_seqlens(op, "cu_seqlens_k", cu_seqlens_k, q, batch_size + 1)
    elif block_table is not None:
        _check_pages(op, block_table, q, k, batch_size)
    elif k.shape[0] != batch_size:
        raise common.refuse(op, "k", f"{batch_size} sequences, as q has", k)
    if cache_seqlens is not None:
        common.check_like(
            op, "cache_seqlens", cache_seqlens, (batch_size,), q, dtypes=(torch.int32,)
        )
    check_alibi(op, alibi_slopes, q, batch_size)
    check_sinks(op, sinks, q)

    rows_q = q.shape[0] if cu_seqlens_q is not None else q.shape[1]
    if cu_seqlens_k is not None:
        rows_k = k.shape[0]
    elif block_table is not None:
        rows_k = block_table.shape[1] * k.shape[1]
    else:
        rows_k = k.shape[1]
    for argument, rows in (("q", rows_q), ("k", rows_k)):
        if rows > common.MAX_SIZE:
            raise TensorError(
                f"{op}: {argument}: expected at most {common.MAX_SIZE} tokens, found {rows}"
            )
    longest_q = _bound(op, "max_seqlen_q", max_seqlen_q, rows_q, cu_seqlens_q is not None)
    lengths_vary = cu_seqlens_k is not None or cache_seqlens is not None
    longest_k = _bound(op, "max_seqlen_k", max_seqlen_k, rows_k, lengths_vary)

    left, right = common.check_window(op, window_size)
    scale = q.shape[-1] ** -0.5
    if softmax_scale is not None:
        scale = common.check_number(op, "softmax_scale", softmax_scale)
    softcap = 0.0 if softcap is None else common.check_number(op, "softcap", softcap, least=0.0)
    common.check_flag(op, "causal", causal)
    return (batch_size, longest_q, longest_k, scale, left, 0 if causal else right, softcap)


def _check_qkv(
    op: str, q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, block_table: Any,
    dtypes: tuple[torch.dtype, ...], cache_dtypes: tuple[torch.dtype, ...],
) -> None:  # fmt: skip
    for argument, value in (("q", q), ("k", k), ("v", v)):
        common.check_tensor(op, argument, value)
    _check_dims(op, "q", q, "batch_size, seqlen_q", "total_q", cu_seqlens_q, "num_heads")
    if block_table is None:
        _check_dims(op, "k", k, "batch_size, seqlen_k", "total_k", cu_seqlens_k, "num_kv_heads")
    elif k.dim() != 4:
        shape = "(num_pages, page_size, num_kv_heads, head_dim) with block_table"
        raise common.refuse(op, "k", f"shape {shape}", k)
    check_rows(op, "q", q, dtypes)
    num_heads, head_dim = q.shape[-2:]
    common.check_like(op, "k", k, (*k.shape[:-1], head_dim), q, dtypes=cache_dtypes)
    own = v.shape[-1] if v.dim() > 0 and q.dtype != torch.float8_e4m3fn else head_dim
    common.check_like(op, "v", v, (*k.shape[:-1], own), q, dtypes=cache_dtypes)
    check_rows(op, "v", v, cache_dtypes or dtypes)
    num_kv_heads = k.shape[-2]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise TensorError(
            f"{op}: k: expected num_kv_heads to divide num_heads = {num_heads} of q, found "
            f"{num_kv_heads} ({common.say(k)})"
        )


def check_rows(
    op: str, argument: str, x: torch.Tensor, dtypes: tuple[torch.dtype, ...] = common.HALF
) -> None:
    """One of `dtypes`, somewhere we run, a head_dim we have, its elements side by side."""
    if x.dtype not in dtypes:
        raise common.refuse(op, argument, f"dtype {common.named(dtypes)}", x)
    if x.device.type not in ("cuda", "cpu", "meta"):
        raise common.refuse(op, argument, "a CUDA or CPU tensor", x)
    head_dim = x.shape[-1]
    most = MAX_HEAD_DIM_FP32 if x.dtype == torch.float32 else MAX_HEAD_DIM
    if not MIN_HEAD_DIM <= head_dim <= most or head_dim % 8:
        expected = f"a head_dim from {MIN_HEAD_DIM} to {most} in multiples of 8"
        raise TensorError(f"{op}: {argument}: expected {expected}, found {head_dim}: "
                          f"{common.say(x)}")  # fmt: skip
    if x.stride(-1) != 1:
        raise common.refuse(
            op, argument, "a contiguous last dimension (call .contiguous() first)", x
        )


def _check_dims(
    op: str, argument: str, x: torch.Tensor, dense: str, packed: str, bounds: Any, heads: str
) -> None:
    if bounds is not None and x.dim() != 3:
        name = f"cu_seqlens_{argument}"
        raise common.refuse(op, argument, f"shape ({packed}, {heads}, head_dim) with {name}", x)
    if bounds is None and x.dim() != 4:
        raise common.refuse(op, argument, f"shape ({dense}, {heads}, head_dim)", x)


def _check_pages(
    op: str, block_table: Any, q: torch.Tensor, k: torch.Tensor, batch_size: int
) -> None:
    check_block_table(op, block_table, batch_size, q)
    page_size = k.shape[1]
    if not 1 <= page_size <= MAX_PAGE_SIZE:
        raise TensorError(
            f"{op}: k: expected a page_size (dimension 1) from 1 to {MAX_PAGE_SIZE}, "
            f"found {page_size}: {common.say(k)}"
        )


def _bound(op: str, argument: str, value: Any, rows: int, lengths_vary: bool) -> int:
    """The longest a sequence can be: what the caller says, at most the rows there are."""
    if value is None:
        return rows
    value = common.check_whole(op, argument, value, expected="a whole number from 0")
    if not lengths_vary:
        raise TensorError(
            f"{op}: {argument}: expected None where the tensors say the length ({rows}), "
            f"found {value}"
        )
    return min(value, rows)


# In the order in which calls that were planned read addresses.
_SCALES = "q_scale k_scale v_scale k_scale_cache v_scale_cache"
_writes = common.Writes("flash_attention", f"q k v out {' '.join(TABLES)} {_SCALES}", "out")


def _all_scales(scales: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*scales, *[None] * (len(_SCALES.split()) - len(scales)))


def spans_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, options: Options,
    scales: tuple[torch.Tensor | None, ...] = (None, None, None),
) -> common.Spans:  # fmt: skip
    """How far the tensors of a call reach; None for an out of its own, which meets nothing."""
    return _writes.spans(q, k, v, out, *options.tables, *_all_scales(scales))


def check_out(
    op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: Any, options: Options,
    scales: tuple[Any, ...] = (None, None, None), dtypes: tuple[torch.dtype, ...] = (),
) -> None:  # fmt: skip
    """`out` must be like q with v's head_dim, or of `dtypes`, and share no memory with the inputs
    (or itself)."""
    check_out_layout(op, out, q, v, dtypes)
    tensors = (q, k, v, out, *options.tables, *_all_scales(scales))
    if common.is_plain(*tensors):  # they have memory
        _writes.check(*tensors)


def check_out_layout(
    op: str, out: Any, q: torch.Tensor, v: torch.Tensor, dtypes: tuple[torch.dtype, ...] = ()
) -> None:
    """`out` must be like q with v's head_dim, or of `dtypes`, no element of it twice."""
    common.check_written(op, "out", out, (*q.shape[:-1], v.shape[-1]), q, dtypes)


def read_tables(op: str, problem: Problem) -> bool:
    """True, as the call debugs: it looks at what tables on the device hold, if there are any."""
    if any(table is not None for table in problem.lengths):
        check_values(op, problem)
    return True


def finished(cache_seqlens: torch.Tensor | None) -> tuple[tuple[str, str], ...]:
    """What `bounds.report` is to leave out behind `read_tables`: some kernels say of a length below
    0, a finished row, that it is outside."""
    if cache_seqlens is None or not bool((cache_seqlens < 0).any()):
        return ()
    return (("flash_attention", "cache_seqlens"),)


def check_values(op: str, problem: Problem, *, is_strict: bool = True) -> None:
    """Values on the device: bounds, lengths and page numbers. Waits for the device.

    is_strict: rows before the first bound of queries, and a max_seqlen that is less than a length,
    are refused too; they cost rows, not memory. Keys that no query sees may lie anywhere.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return  # a captured call cannot wait
    has_queries = [True] * problem.batch_size
    for argument, bounds, total, longest in (
        ("cu_seqlens_q", problem.cu_seqlens_q, problem.q.shape[0], problem.max_seqlen_q),
        ("cu_seqlens_k", problem.cu_seqlens_k, problem.k.shape[0], problem.max_seqlen_k),
    ):
        if bounds is None:
            continue
        values = bounds.tolist()
        lengths = [end - start for start, end in itertools.pairwise(values)]
        begins = is_strict and argument == "cu_seqlens_q"
        if min(lengths, default=0) < 0 or (values[0] != 0 if begins else values[0] < 0):
            expected = f"bounds that start at 0{'' if begins else ' or after it'} and do not fall"
            raise common.refuse(op, argument, expected, values)
        if values[-1] > total:
            raise common.refuse(op, argument, f"an end of at most {total} rows", values)
        seen = [length for length, has in zip(lengths, has_queries, strict=True) if has]
        most = max(seen, default=0)
        if most > longest and is_strict:
            name = argument.replace("cu_seqlens", "max_seqlen")
            raise common.refuse(op, argument, f"lengths of at most {name} = {longest}", most)
        if argument == "cu_seqlens_q":
            has_queries = [length > 0 for length in lengths]
    lengths = [problem.max_seqlen_k] * problem.batch_size
    if problem.cache_seqlens is not None:
        lengths = problem.cache_seqlens.tolist()
        most = problem.max_seqlen_k
        if not is_strict:
            most = problem.k.shape[1]
            if problem.block_table is not None:
                most *= problem.block_table.shape[1]
        if any(length > most for length in lengths):  # below 0: a finished or padding row
            raise common.refuse(op, "cache_seqlens", f"lengths of at most {most}", lengths)
    if problem.block_table is not None:
        num_pages, page_size = problem.k.shape[:2]
        for index, (length, row) in enumerate(
            zip(lengths, problem.block_table.tolist(), strict=True)
        ):
            used = row[: -(-max(length, 0) // page_size)]
            if any(not 0 <= page < num_pages for page in used):
                expected = f"pages from 0 to {num_pages - 1} in sequence {index}"
                raise common.refuse(op, "block_table", expected, used)


def check_has_gradient(op: str, q: torch.Tensor) -> None:
    """There are kernels for the gradients of 16 bits alone."""
    if q.dtype not in common.HALF:
        expected = "dtype float16 or bfloat16 where gradients are computed"
        raise common.refuse(op, "q", expected, q)
