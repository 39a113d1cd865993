"""The forward launch of attention: which kernel, which tiles, which numbers.

Knows the canonical `Problem`, of which it checks nothing, and the kernels of
csrc/attention/flash_attention.cu. forward_sm90 plans what Hopper's own kernels take.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ...errors import TensorError
from ..core import bounds, common
from ..core.device import PlannedGpu, Stated, device_of, launch_facts
from ..core.launch import Launch
from . import forward_sm90 as sm90
from .problem import Options, Problem, is_mappable, lse_strides_of

CUBIN = "flash_attention"
_KIB = 1024


@dataclass(frozen=True, slots=True)
class Body:
    """One compiled tile shape: `flash_attention_{dtype}_hdim{head_dim}{suffix}`.

    features: "plain", "paged" (K and V in pages, with the same strides), "general" (anything) or
        "fp32" (anything, in fp32: csrc/attention/flash_attention_fp32.cu).
    blocks_an_sm: how many an SM should hold at once for it to be worth its shared memory.
    """

    features: str
    head_dim: int
    suffix: str
    blocks_an_sm: int = 2

    @property
    def stated(self) -> Stated:
        """Threads, shared memory, block_m (queries) and block_n (keys) of a tile."""
        is_fp32 = self.features == "fp32"
        return launch_facts(self.cubin, self.name(torch.float32 if is_fp32 else torch.bfloat16))

    @property
    def cubin(self) -> str:
        """Where it is."""
        return f"{CUBIN}_fp32" if self.features == "fp32" else CUBIN

    def name(self, dtype: torch.dtype) -> str:
        """The function's name."""
        token = common.DTYPE_TOKENS[dtype]
        return f"{CUBIN}_{token}_hdim{self.head_dim}{self.suffix}"


# What `forward_sm90.applies` does not take gets the rows of its features with the smallest
# head_dim that holds its own, and of those the first that fits `blocks_an_sm` times into the shared
# memory of an SM of the device, else the last that fits once.
# docs/notes/flash_attention.md says why these.
BODIES = (
    Body("plain", 32, ""),
    Body("plain", 64, ""),
    Body("plain", 96, ""),
    Body("plain", 96, "_48k"),
    Body("plain", 128, ""),
    Body("plain", 128, "_64k"),
    Body("plain", 128, "_48k"),
    Body("plain", 160, ""),
    Body("plain", 192, "", blocks_an_sm=1),
    Body("plain", 192, "_72k"),
    Body("plain", 256, ""),
    Body("paged", 64, "_paged"),
    Body("paged", 96, "_paged"),
    Body("paged", 128, "_paged"),
    Body("paged", 192, "_paged"),
    Body("paged", 256, "_paged"),
    Body("general", 32, "_general"),
    Body("general", 64, "_general"),
    Body("general", 96, "_general"),
    Body("general", 128, "_general"),
    Body("general", 160, "_general"),
    Body("general", 192, "_general"),
    Body("general", 256, "_general"),
    Body("fp32", 128, ""),
)


def choose(features: str, head_dim: int, device: PlannedGpu) -> Body:
    """The row of BODIES for such a problem on such a device."""
    fitting = [
        body
        for body in BODIES
        if body.features == features
        and body.head_dim >= head_dim
        and body.stated.shared_bytes <= device.shared_bytes
    ]
    if not fitting:
        raise TensorError(
            f"flash_attention: head_dim {head_dim}: no kernel for it on compute capability "
            f"{device.compute_capability} with {device.shared_bytes} bytes of shared memory a block"
        )
    least = min(body.head_dim for body in fitting)
    fitting = [body for body in fitting if body.head_dim == least]
    for body in fitting:
        # Every block takes 1 KiB more, the driver's.
        if body.blocks_an_sm * (body.stated.shared_bytes + _KIB) <= device.sm_shared_bytes:
            return body
    return fitting[-1]


def heads_a_group(problem: Problem) -> int:
    """How many (batch, head) pairs are scheduled together, row block by row block.

    Measured on an H200 (docs/notes/flash_attention.md): causal row blocks differ in length, and the
    longest of many heads first keeps the SMs busy to the end (5 to 25 % over one head at a time);
    where all are equally long it makes no difference.
    """
    return 32 if problem.window_right >= 0 else 1


def _strides(tensor: torch.Tensor, has_batch: bool) -> tuple[int, int, int]:
    """(batch, token, head) strides; 0 where there is one only."""
    sizes, strides = tensor.shape[:-1], tensor.stride()[:-1]
    used = [stride if size > 1 else 0 for size, stride in zip(sizes, strides, strict=True)]
    batch, token, head = used if has_batch else [0, *used]
    return batch, token, head


def _unkept(problem: Problem, out: torch.Tensor) -> str:
    """Why Hopper's kernels do not take it."""
    q, k, v = problem.q, problem.k, problem.v
    device = device_of(q.device)
    if not device.has_wgmma:
        return "compute capability {}.{}".format(*device.compute_capability)
    if q.dtype not in common.HALF:
        return str(q.dtype)
    if problem.alibi_slopes is not None:
        return "alibi_slopes"
    for argument, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
        if not is_mappable(tensor):
            behind = tensor.data_ptr() % common.VEC_BYTES
            at = f", {behind} bytes behind a multiple of 16" if behind else ""
            return f"{argument} of {common.say(tensor)}{at} (call .contiguous() first)"
    if problem.block_table is not None:
        return f"page_size {k.shape[1]}"
    return f"softmax_scale {problem.softmax_scale}, softcap {problem.softcap}"


def plan(problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> Launch:
    """Choose the kernel and make its launch; one with `maps` is for `forward_sm90.launch`.

    out: like problem.q with the head_dim of v, any strides, the last dimension contiguous.
    lse: fp32, (batch_size, num_heads, seqlen_q) or with cu_seqlens_q (num_heads, total_q), the last
        dimension contiguous.
    """
    q, k, v = problem.q, problem.k, problem.v
    device = device_of(q.device)
    if sm90.is_enabled and device.has_wgmma and sm90.applies(problem, out):
        return sm90.plan(problem, out, lse)
    if problem.batch_invariant:  # a maximum here moves for all rows of a warp
        raise TensorError(
            "flash_attention: deterministic: 'batch' is what Hopper's kernels keep: compute "
            "capability 9.0, 16 bits, no alibi_slopes, tensors 16-byte aligned and no element of "
            f"them twice, page_size a multiple of 8; found {_unkept(problem, out)}"
        )
    num_heads, head_dim = q.shape[-2:]
    num_kv_heads = k.shape[-2]
    is_varlen_q = problem.cu_seqlens_q is not None
    is_paged = problem.block_table is not None
    has_k_batch = problem.cu_seqlens_k is None or is_paged
    strides = [
        _strides(out, not is_varlen_q),
        _strides(q, not is_varlen_q),
        _strides(k, has_k_batch),
        _strides(v, has_k_batch),
    ]
    elems = common.VEC_BYTES // q.element_size()
    low_bits = q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()
    is_aligned = low_bits % common.VEC_BYTES == 0
    is_aligned = is_aligned and all(common.is_aligned(elems, *each) for each in strides)
    # A scale that is not positive turns the order of the scores, which the others rely on, and the
    # paged ones find V by the offsets of K.
    is_general = (
        not is_aligned
        or (is_paged and strides[2] != strides[3])
        or problem.softcap != 0
        or problem.alibi_slopes is not None
        or not problem.softmax_scale > 0
    )
    features = "general" if is_general else "paged" if is_paged else "plain"
    features = "fp32" if q.dtype == torch.float32 else features
    body = choose(features, problem.widest_head, device)

    seqlen_q, seqlen_k = problem.seqlens
    table = problem.block_table
    alibi = problem.alibi_slopes
    alibi_stride = alibi.stride(0) if alibi is not None and alibi.dim() == 2 else 0

    block, shared_bytes, sizes = body.stated
    num_row_blocks = -(-seqlen_q // sizes["block_m"])
    num_batch_heads = problem.batch_size * num_heads
    num_tiles = num_row_blocks * num_batch_heads
    if num_tiles == 0:
        return Launch()
    if num_tiles > common.MAX_GRID_X or max(seqlen_q, seqlen_k) > common.MAX_SIZE:
        raise TensorError(
            f"flash_attention: q: expected at most {common.MAX_GRID_X} tiles of {sizes['block_m']} "
            f"queries of a head and sequences up to {common.MAX_SIZE}, found {num_tiles} tiles "
            f"(batch_size {problem.batch_size}, num_heads {num_heads}, seqlen_q {seqlen_q}, "
            f"seqlen_k {seqlen_k})"
        )
    log2e = math.log2(math.e)
    numbers = (
        *strides[0],
        *lse_strides_of(lse),
        *(stride for each in strides[1:] for stride in each),
        0 if table is None else table.stride(0),
        alibi_stride,
        num_batch_heads,
        min(num_batch_heads, heads_a_group(problem)),
        num_row_blocks,
        num_heads,
        num_kv_heads,
        head_dim,
        seqlen_q,
        seqlen_k,
        k.shape[1] if is_paged else 1,  # keys of a page
        *problem.window,
        int(is_aligned),
        *problem.totals,
        k.shape[0] if is_paged else 1,  # pages
        problem.sink_type,
        v.shape[-1],
        problem.softmax_scale * log2e,
        problem.softcap * log2e,
    )
    function = common.shipped(body.cubin, body.name(q.dtype))
    return Launch(function, (num_tiles, 1, 1), block, shared_bytes, numbers)


def launch(
    planned: Launch, maps: tuple[bytes, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor | None, options: Options,
) -> None:  # fmt: skip
    """Write softmax(q k^T) v to `out`, and its log-sum-exp to `lse` unless that is None."""
    function, grid, block, shared_bytes, numbers, _, _ = planned
    params = (
        out, lse, bounds.flag("flash_attention", q), q, k, v, options.cu_seqlens_q,
        options.cu_seqlens_k, options.cache_seqlens, options.block_table, options.alibi_slopes,
        options.sinks, *numbers,
    )  # fmt: skip
    function(grid, block, shared_bytes, None, params)
