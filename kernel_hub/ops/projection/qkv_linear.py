"""The query, key and value projection with bias, rotation and cache
(csrc/matmul/qkv_linear*.cu)."""

from __future__ import annotations

import math
from typing import Literal

import torch

from ...errors import KernelHubError
from ..core import bounds, common
from ..core.device import device_of
from ..core.kv_cache import places
from ..core.launch import Launch, Plans
from ..core.rotary import rotated
from ..core.tensor_maps import Boxes
from ..kv_cache.append_checks import norm_numbers, normed
from ..matmul.checks import rows_and_strides
from ..matmul.linear_launch import launch_of, maps_of, row_boxes
from ..matmul.paired_plan import APART, GROUP_ROWS, TABLES, choose
from ..matmul.tiles import BLOCK_K
from . import qkv_apart
from .qkv_checks import OP, QkvGiven, check, check_heads

_is_tracing = torch.compiler.is_dynamo_compiling
_OPTIONAL = (
    "bias cos sin positions k_cache v_cache cache_seqlens block_table slot_mapping cu_seqlens "
    "out_q out_k out_v q_norm_weight k_norm_weight k_scale v_scale k_scale_cache v_scale_cache"
)
_operands = common.Operands(OP, "x w_qkv", _OPTIONAL)
_writes = common.Writes(
    OP, f"x w_qkv {_OPTIONAL}", "k_cache v_cache out_q out_k out_v k_scale_cache v_scale_cache"
)
_plans: Plans[tuple[Launch, common.Spans]] = Plans()
TABLES[OP].on_change(_plans.clear)


def qkv_linear(
    x: torch.Tensor, w_qkv: torch.Tensor, bias: torch.Tensor | None = None,
    cos: torch.Tensor | None = None, sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None, *, num_heads: int, num_kv_heads: int,
    interleaved: bool = False, rotary_dim: int | None = None, k_cache: torch.Tensor | None = None,
    v_cache: torch.Tensor | None = None, cache_seqlens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None, slot_mapping: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None, out_q: torch.Tensor | None = None,
    out_k: torch.Tensor | None = None, out_v: torch.Tensor | None = None,
    q_norm_weight: torch.Tensor | None = None, k_norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6, weight_offset: float = 0.0, deterministic: bool | Literal["batch"] = False,
    weights_ready: bool = False, cache_ready: bool = False, k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None, k_scale_cache: torch.Tensor | None = None,
    v_scale_cache: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Project tokens to queries, keys and values, rotate, and write keys and values to a cache.

        q, k, v = (x @ w_qkv.T + bias) as heads;  q, k rotated as by `rope`;  k, v as by `append_kv`

    in one launch, with fp32 sums and rotation, rounded once; or, where it is quicker (some tens to
    hundreds of tokens on Hopper), where heads are normed and where caches are of bytes, in two, as
    `linear` and `append_kv`, rounded in between. Token i of sequence b is number
    n = cache_seqlens[b] + i of it, and its keys and values go to

        slot_mapping:  page, row = divmod(slot_mapping[token], page_size)
        block_table:   page, row = block_table[b, n // page_size], n % page_size
        neither:       row n of the cache of sequence b

    and nowhere where that is outside the cache (a slot of -1, say) or the length of the sequence is
    below 0, a finished or padding row. Two tokens must not go to one place.

    x: (batch, seqlen, hidden_size) or (total, hidden_size), fp16 or bf16, on the GPU or the CPU;
        hidden_size a multiple of 8; tokens evenly spaced, at multiples of 16 bytes.
    w_qkv: ((num_heads + 2 * num_kv_heads) * head_dim, hidden_size), query heads, key heads, value
        heads; dtype of x; head_dim a multiple of 32.
    bias: (rows of w_qkv,), dtype of x.
    cos, sin: (max_position, rotary_dim // 2), fp32 or the dtype of x; None: nothing is rotated.
    positions: int32 or int64, one for each token; None: n. One outside the table gives nan.
    interleaved: rotate neighbouring elements (GPT-J) instead of the two halves (GPT-NeoX, Llama).
    rotary_dim: None is 2 * cos.shape[-1]; a multiple of 16.
    k_cache, v_cache: (num_pages, page_size, num_kv_heads, head_dim), or without slot_mapping and
        block_table (batch, max_seqlen, num_kv_heads, head_dim); dtype of x, or float8_e4m3fn
        or int8, which take value / scale, saturated.
    cache_seqlens: (batch,) int32, the tokens of each sequence before these; None: none.
    block_table: (batch, max_pages) int32.
    slot_mapping: int32 or int64, one for each token; -1 skips it.
    cu_seqlens: (batch + 1,) int32, where each sequence of x (total, hidden_size) starts.
    out_q: (..., num_heads, head_dim), where to write queries; None: a new tensor.
    out_k, out_v: (..., num_kv_heads, head_dim), without a cache only; None: new tensors.
    q_norm_weight, k_norm_weight, eps, weight_offset: a norm of each head before its rotation, as
        `append_kv` has it; without a cache neither with cu_seqlens nor with cache_seqlens.
    deterministic: "batch": a token's bits depend on it alone, not on how many there are: one way
        for any number of them.
    weights_ready: a promise that nothing ahead in the stream still writes w_qkv, as of `linear`.
    cache_ready: with it, one that nothing still writes what says where tokens go and how they turn:
        cos, sin, positions, cache_seqlens, block_table, slot_mapping, cu_seqlens.
    k_scale, v_scale: (num_kv_heads,) fp32, only with e4m3 and int8 caches; None: 1 of e4m3.
    k_scale_cache, v_scale_cache: in place of those, where the scale of each token and head is
        written, as `append_kv` finds it.

    Returns (out_q, out_k, out_v); with a cache the last two are None. Rows of out_q whose token is
    outside every sequence, or of a finished one, are not written. A CUDA tensor runs a shipped
    cubin on torch's current
    stream, and nothing waits for the device; a CPU tensor runs a reference in torch. No backward.
    Raises TensorError naming the argument that does not fit.
    Source: Su et al., "RoFormer", 2021; Kwon et al., "Efficient Memory Management for Large
    Language Model Serving with PagedAttention", 2023.
    """
    if rotary_dim is None:
        rotary_dim = 2 * common.last_size(cos)
    else:
        rotary_dim = common.check_count(OP, "rotary_dim", rotary_dim)
    num_heads = common.check_count(OP, "num_heads", num_heads, least=1)
    num_kv_heads = common.check_count(OP, "num_kv_heads", num_kv_heads, least=1)
    optional = (
        bias, cos, sin, positions, k_cache, v_cache, cache_seqlens, block_table, slot_mapping,
        cu_seqlens, out_q, out_k, out_v, q_norm_weight, k_norm_weight, k_scale, v_scale,
        k_scale_cache, v_scale_cache,
    )  # fmt: skip
    plain = _operands.are_plain((x, w_qkv), optional)
    batch_invariant = deterministic is not False and common.is_batch(OP, deterministic)
    if weights_ready is not False:
        common.check_flag(OP, "weights_ready", weights_ready)
    if cache_ready is not False:
        common.check_flag(OP, "cache_ready", cache_ready)
    outputs = (k_cache, v_cache, out_q, out_k, out_v, k_scale_cache, v_scale_cache)
    written = [out for out in outputs if out is not None]
    if not (q_norm_weight is k_norm_weight is None):
        eps, weight_offset = norm_numbers(OP, eps, weight_offset)
    if not plain:
        check_heads(x, w_qkv, num_heads, num_kv_heads)
    try:
        head_dim = w_qkv.shape[0] // (num_heads + 2 * num_kv_heads)
        if out_q is None:
            out_q = x.new_empty((*x.shape[:-1], num_heads, head_dim))
        if k_cache is None:
            kv_shape = (*x.shape[:-1], num_kv_heads, head_dim)
            out_k = x.new_empty(kv_shape) if out_k is None else out_k
            out_v = x.new_empty(kv_shape) if out_v is None else out_v
    except common.FOREIGN:
        _operands.check_tensors((x, w_qkv), optional)  # names what has no memory
        check_heads(x, w_qkv, num_heads, num_kv_heads)
        raise
    values = (
        x, w_qkv, *optional[:10], out_q, out_k, out_v, num_heads, num_kv_heads, interleaved,
        rotary_dim, q_norm_weight, k_norm_weight, eps, weight_offset, batch_invariant,
        bool(weights_ready), bool(cache_ready), k_scale, v_scale, k_scale_cache, v_scale_cache,
    )  # fmt: skip
    if not plain:
        if not _is_tracing():
            check(QkvGiven(*values))
        _op(*values)  # checks the fake tensors
        return out_q, out_k, out_v
    given = QkvGiven(*values)
    try:
        (_cuda_into if x.is_cuda else _cpu_into)(given, bool(written))
    except common.FOREIGN:
        _operands.check_tensors((x, w_qkv), optional)  # names what has no memory
        check(given)
        raise
    if written:
        common.written(tuple(written))
    return out_q, out_k, out_v


def _paired_dim(given: QkvGiven) -> int:
    """Of a head, the columns that lie in blocks of pairs: all where rotary_dim divides them."""
    rotary_dim, head_dim = given.rotary_dim, given.head_dim
    if rotary_dim == 0 or given.interleaved:
        return 0
    return head_dim if head_dim % rotary_dim == 0 else rotary_dim


def _swapped_boxes(given: QkvGiven, share: int, b_stride: int) -> tuple[tuple[int, int], Boxes]:
    """((groups a block, rows of a box), boxes) for tiles whose rows are w_qkv's:
    8 rows and their partners, 8 rows ...
    """
    rows, k = given.w_qkv.shape
    if not _paired_dim(given):  # interleaved: even rows, then odd ones; nothing rotated: any
        half, row = (1, 2) if given.rotary_dim else (8, 1)
        groups, box = rows // GROUP_ROWS, share // GROUP_ROWS
        shape = (1, groups, 2, 8, k)
        strides = (GROUP_ROWS * b_stride, GROUP_ROWS * b_stride, half * b_stride, row * b_stride, 1)
    else:
        block = given.rotary_dim
        groups = block // GROUP_ROWS
        box = math.gcd(groups, share // GROUP_ROWS)
        shape = (rows // block, groups, 2, 8, k)
        strides = (block * b_stride, 8 * b_stride, block // 2 * b_stride, b_stride, 1)
    return (groups, box * GROUP_ROWS), Boxes(shape, strides, (1, box, 2, 8, BLOCK_K))


def _block_boxes(given: QkvGiven, b_stride: int) -> tuple[tuple[int, int, int, int], Boxes]:
    """((pairs a run, blocks a run, step, distance), boxes) for the others.

    A box is a block of 32 rows, in the order in which four lanes have 8 neighbours each. Blocks
    come in pairs: those that a rotation pairs, or neighbours.
    """
    rows, k = given.w_qkv.shape
    strides = (32 * b_stride, 2 * b_stride, 8 * b_stride, b_stride, 1)
    boxes = Boxes((rows // 32, 4, 4, 2, k), strides, (1, 4, 4, 2, BLOCK_K))
    pairs = given.rotary_dim // 64
    if not _paired_dim(given):
        return (rows // 32 + 1, 0, 2, 1), boxes
    return (pairs, 2 * pairs, 1, pairs), boxes


def _fits_hopper(given: QkvGiven) -> bool:
    """Whether the bodies for Hopper take this rotation: whole runs, tables in 16-byte reads."""
    paired_dim, cos, sin = _paired_dim(given), given.cos, given.sin
    if paired_dim and (paired_dim != given.head_dim or given.rotary_dim % 64):
        return False
    if cos is None:
        return True
    elems = common.VEC_BYTES // cos.element_size()
    addresses = cos.data_ptr() | sin.data_ptr()
    return bool(cos.stride(0) % elems == 0 and addresses % common.VEC_BYTES == 0)


def _plan(given: QkvGiven) -> Launch:
    """Check the tensors; choose the kernel, its tensor maps and its integer parameters.

    A launch of APART is two, of other ops.
    """
    check(given)
    x, w, cos, k_cache = given.x, given.w_qkv, given.cos, given.k_cache
    rows, k = w.shape
    batch_size, seqlen = given.batch_and_seqlen
    if given.out_q.numel() == 0 or batch_size == 0:
        return Launch()
    # NOTE: to one launch page_size 0 is no cache; append_kv takes one without rows.
    if given.is_normed or given.is_quantised or (k_cache is not None and not k_cache.shape[1]):
        rows_and_strides(OP, x, "w_qkv", w, a_name="x")  # which linear would call a and b
        return Launch(APART)
    named = {"out_q": given.out_q, "out_k": given.out_k, "out_v": given.out_v}
    outs = {name: out for name, out in named.items() if out is not None}
    m, (x_stride, q_stride, *kv_strides), w_stride = rows_and_strides(
        OP, x, "w_qkv", w, a_name="x", **outs
    )
    paired_dim = _paired_dim(given)
    # Rows that overlap, and pairs in part of a head: pointers, no tensor maps.
    is_spaced = (m == 1 or x_stride >= k) and w_stride >= k
    may_part = is_spaced and qkv_apart.may_part(given)
    has_maps = is_spaced and _fits_hopper(given)
    gpu = device_of(x.device)
    choice = choose(OP, gpu.gpu, m, rows, k, has_maps, may_part, given.batch_invariant)
    if choice is APART:
        return Launch(APART)
    if k_cache is None:  # page_size 0: keys and values lie as tokens do
        kv = given.out_k, given.out_v
        caches = [(0, stride, x.stride(-2)) for stride, x in zip(kv_strides, kv, strict=True)]
        pages = (0, 0)
    else:
        caches = [tensor.stride()[:3] for tensor in (k_cache, given.v_cache)]
        # NOTE: a cache of no rows has no pages either; the kernel divides by page_size.
        pages = (k_cache.shape[0] if k_cache.shape[1] else 0, max(1, k_cache.shape[1]))
    table, slots, positions = given.block_table, given.slot_mapping, given.positions
    strides = (
        q_stride, given.out_q.stride(-2), *caches[0], *caches[1],
        0 if cos is None else cos.stride(0), 0 if table is None else table.stride(0),
    )  # fmt: skip
    sizes = (
        m, k, given.num_heads, given.num_kv_heads, given.head_dim, given.rotary_dim, paired_dim,
        int(bool(given.interleaved) and given.rotary_dim > 0), seqlen, batch_size,
        *((0, 0) if cos is None else (cos.shape[0], cos.element_size())),
        *pages,
        # NOTE: a table of no columns has no address either; -1 says that there is none.
        -1 if table is None else table.shape[1] if pages[0] else 0,
        0 if positions is None else positions.element_size(),
        0 if slots is None else slots.element_size(),
    )  # fmt: skip
    leads = int(given.weights_ready and gpu.overlaps_launches)
    if choice.tile is None:
        return launch_of(OP, choice, x, (*strides, x_stride, w_stride, *sizes, leads))
    leads |= int(given.cache_ready) << 1
    boxes, blocks = (1, 16), (1, 0, 1, 1)
    if choice.tile.swaps:
        boxes, b_boxes = _swapped_boxes(given, choice.tile.b_share, w_stride)
    else:
        blocks, b_boxes = _block_boxes(given, w_stride)
    numbers = (*strides, *sizes, *blocks, *boxes, choice.group, leads)
    return launch_of(OP, choice, x, numbers, *row_boxes(choice, m, k, x_stride), b_boxes)


def _cuda_into(given: QkvGiven, is_given: bool = True) -> None:
    """All of it in one launch. is_given: the caller gave a cache, out_q, out_k or out_v."""
    x, w = given.x, given.w_qkv
    tensors = given.tensors
    addresses = tuple([tensor.data_ptr() for tensor in tensors if tensor is not None])
    low_bits = 0
    for address in addresses:
        low_bits |= address
    layout = [
        None if tensor is None else (tensor.dtype, tensor.shape, tensor.stride())
        for tensor in tensors
    ]
    key = (
        low_bits & 15, x.device, w.device, given.num_heads, given.num_kv_heads, given.interleaved,
        given.rotary_dim, given.batch_invariant, given.weights_ready, given.cache_ready, *layout,
    )  # fmt: skip
    found = _plans.get(key)
    if found is None:
        plan = _plan(given)
        found = _plans.keep(key, (plan, _writes.spans(*tensors)))
    (function, grid, block, shared_bytes, numbers, boxes, options), spans = found
    maps = spans.apart.get(addresses)
    if maps is None:
        maps = spans.made(addresses, is_given, maps_of, boxes, x, w)
    if function is APART:
        qkv_apart.into(given)
        return
    has_cache = given.k_cache is not None
    params = (
        given.out_q, given.k_cache if has_cache else given.out_k,
        given.v_cache if has_cache else given.out_v, bounds.flag(OP, x), *(maps or (x, w)),
        given.bias, given.cos, given.sin, given.positions, given.cache_seqlens,
        given.slot_mapping, given.block_table, given.cu_seqlens, *numbers,
    )  # fmt: skip
    try:
        function(grid, block, shared_bytes, None, params, **options)
    except KernelHubError:
        check(given)  # names the devices that differ
        raise
    if common.is_debugging():
        bounds.report(x)


@common.in_own_dtypes
def _cpu_into(given: QkvGiven, is_given: bool = True) -> None:
    """The same on the CPU, by torch."""
    check(given)
    if is_given:
        _writes.check(*given.tensors)
    x = given.x
    m = x.shape[:-1].numel()
    values = x.reshape(m, x.shape[-1]).float() @ given.w_qkv.float().T
    if given.bias is not None:
        values += given.bias.float()
    heads = values.view(m, given.total_heads, given.head_dim)
    cache = given.k_cache
    if cache is None:  # one page a sequence, of which sizes and device count
        cache = x.new_empty(()).expand(*given.batch_and_seqlen, 1, 1)
    tokens = places(
        x.shape[:-1], cache, given.cache_seqlens, given.block_table, given.slot_mapping,
        given.cu_seqlens, given.positions,
    )  # fmt: skip
    norm = (given.eps, given.weight_offset)
    q, k, v = heads.split([given.num_heads, given.num_kv_heads, given.num_kv_heads], dim=1)
    q.copy_(normed(q, given.q_norm_weight, *norm))
    k.copy_(normed(k, given.k_norm_weight, *norm))
    turned = heads[:, : given.num_heads + given.num_kv_heads]
    turned.copy_(
        rotated(turned, given.cos, given.sin, tokens.position, given.interleaved, given.rotary_dim)
    )
    tokens.assign(given.out_q, q)
    if given.k_cache is None:
        tokens.assign(given.out_k, k)
        tokens.assign(given.out_v, v)
        return
    tokens.store(given.k_cache, k, given.k_scale, given.k_scale_cache)
    tokens.store(given.v_cache, v, given.v_scale, given.v_scale_cache)


_op = common.define_given(
    f"{OP}(Tensor x, Tensor w_qkv, Tensor? bias, Tensor? cos, Tensor? sin, Tensor? positions, "
    "Tensor(a!)? k_cache, Tensor(b!)? v_cache, Tensor? cache_seqlens, Tensor? block_table, "
    "Tensor? slot_mapping, Tensor? cu_seqlens, Tensor(c!) out_q, Tensor(d!)? out_k, "
    "Tensor(e!)? out_v, int num_heads, int num_kv_heads, bool interleaved, SymInt rotary_dim, "
    "Tensor? q_norm_weight=None, Tensor? k_norm_weight=None, float eps=1e-6, "
    "float weight_offset=0.0, bool batch_invariant=False, bool weights_ready=False, "
    "bool cache_ready=False, "
    "Tensor? k_scale=None, Tensor? v_scale=None, Tensor(f!)? k_scale_cache=None, "
    "Tensor(g!)? v_scale_cache=None) -> ()",
    QkvGiven, cuda=_cuda_into, cpu=_cpu_into, check=check,
)  # fmt: skip
