"""How an fmha_v2 kernel is launched: threads, shared memory, grid, and the TMA's tensor maps.

The sizes are those of TensorRT-LLM's own tables of these kernels; a cubin does not hold them.
"""

from __future__ import annotations

import ctypes

from ... import driver as _driver
from ...arrays.device_array import DeviceArray
from ...arrays.tensor_map import TensorMap
from ...errors import LaunchConfigError
from ...kernel import KernelFunction
from .inputs import ITEM_BYTES, Inputs, Rows
from .names import SLIDING, KernelName
from .param_struct import Params

_MULTIPROCESSORS, _L2_BYTES, _SHARED_OPT_IN = 16, 38, 97  # CUdevice_attribute
_DESCRIPTOR_BYTES = 64
_SWIZZLE_SPAN = 128
_TMA_OUT_ROWS = 16
# A tiled kernel's block covers this many columns of V; more blocks take the others.
_MAX_TILE_V = 256


def block_threads(name: KernelName, function: KernelFunction, asked: int | None = None) -> int:
    """Threads a block: 4 warps, or for tma_ws 3 groups of 4 (load, and two that compute).

    asked: the caller's, which must be those where they are known.
    """
    known = 384 if name.variant == "tma_ws" else None if name.q_step is None else 128
    if known is None and asked is None:
        allows = function.spec.max_threads or "any"
        raise LaunchConfigError(
            f"{name}: threads= is needed: only the host's table has the block size of kernels that "
            f"are not flash attention (this one allows {allows})"
        )
    if known is not None and asked not in (None, known):
        raise LaunchConfigError(f"{name}: threads={asked}: its blocks have {known}; omit it")
    return known or asked or 0


def shared_bytes(
    name: KernelName, function: KernelFunction, device: int, asked: int | None = None
) -> int:
    """Dynamic shared memory: `asked`, which must be enough where that is known, or just enough."""
    needed = _needed_shared_bytes(name, function, device)
    if needed is None and asked is None:
        raise LaunchConfigError(
            f"{name}: shared_bytes= is needed: it stands in the host's table of kernels, and is "
            "known here for flash attention only"
        )
    if needed is not None and asked is not None and asked < needed:
        raise LaunchConfigError(
            f"{name}: shared_bytes={asked}: it takes {needed}; omit it, or give no less"
        )
    return needed or 0 if asked is None else asked


def _needed_shared_bytes(name: KernelName, function: KernelFunction, device: int) -> int | None:
    """What the known configurations take; None for another."""
    if name.variant == "tma_ws":
        # Its registers leave room for one block an SM, so that all shared memory may be its.
        most = _driver.get().attribute(device, _SHARED_OPT_IN)
        return most - (function.spec.static_shared_bytes or 0)
    if name.q_step is None or name.kv_step is None:
        return None
    item = ITEM_BYTES[name.dtype]
    depth, depth_v = _power_of_two(name.head_dim), _power_of_two(name.head_dim_v)
    if name.variant == "nl":
        elements = name.q_step * depth + name.kv_step * (depth + depth_v)
    else:  # tiled: K and V in double-buffered tiles, Q too where it is wider than one
        tile, depth_v = min(depth, 64), min(depth_v, _MAX_TILE_V)
        v_rows = 64 if name.head_dim_v <= 128 else 32
        if name.head_dim_v > _MAX_TILE_V:
            v_rows = 32 // item
        elements = (2 if depth > 64 else 1) * name.q_step * tile
        elements += 2 * (name.kv_step * tile + v_rows * depth_v)
    # O is brought into its rows in shared memory, 64 at a time; that of e4m3 as floats.
    return max(item * elements, 64 * depth_v * (4 if item == 1 else 2))


def grid(name: KernelName, params: Params, device: int, unroll: int) -> tuple[int, int, int]:
    """gridDim; for tma_ws also the tile counts of `params`, which its scheduler reads.

    unroll: rows a block of a kernel that is not flash attention handles (`_nl`), or 0.
    """
    heads, batch = params.num_heads, params.batch_size
    whole = name.q_step is None and name.variant != "plain"
    if unroll and not whole:
        raise LaunchConfigError(
            f"{name}: unroll={unroll}: only kernels that are not flash attention and end in _nl "
            "have one; omit it"
        )
    if name.q_step is None:
        if not whole:
            return heads, batch, 1
        if not unroll:
            raise LaunchConfigError(
                f"{name}: unroll= is needed: only the host's table has the rows a block handles"
            )
        return heads, batch, -(-(name.seq_len or 0) // unroll)
    steps = -(-params.max_seqlen_q // name.q_step)
    if name.variant == "nl_tiled":
        return steps * -(-params.head_dim_v // _MAX_TILE_V), heads, batch
    if name.variant != "tma_ws":
        return steps, heads, batch
    if (name.head_dim, name.head_dim_v) != (576, 512):
        steps = -(-steps // 2)  # two groups of warps, a step each
    driver = _driver.get()
    num_tiles = steps * batch * heads
    if num_tiles >= 2**31:
        raise LaunchConfigError(
            f"max_seqlen={params.max_seqlen_q}: {num_tiles:,} tiles of {name}, more than an int "
            "holds; give the longest sequence"
        )
    params.num_tiles_per_head, params.num_tiles = steps, num_tiles
    tokens = batch * heads * params.max_seqlen_q
    kv_bytes = 2 * ITEM_BYTES[name.dtype] * tokens * name.head_dim
    fits = kv_bytes <= driver.attribute(device, _L2_BYTES)
    params.balanced = name.mask == "causal" and fits
    return 1, min(num_tiles, driver.attribute(device, _MULTIPROCESSORS)), 1


def set_tensor_maps(params: Params, inputs: Inputs, out: Rows) -> None:
    """The TMA descriptors of a tma_ws kernel: a box is one step's rows and at most 128 bytes."""
    name = inputs.name
    item = ITEM_BYTES[name.dtype]
    unit = _SWIZZLE_SPAN // item
    depth = min(-(-name.head_dim // unit) * unit, _power_of_two(name.head_dim))
    columns = min(depth, unit)
    row_bytes = columns * item
    swizzle = "128B" if row_bytes > 64 else "64B" if row_bytes > 32 else "32B"
    q_step, kv_step = name.q_step or 0, name.kv_step or 0
    rows, heads, kv_heads = inputs.rows, params.num_heads, params.num_kv_heads

    def describe(of: Rows, dtype: str, shape: tuple[int, int, int], box_rows: int) -> bytes:
        strides = (of.stride // ITEM_BYTES[dtype], shape[2], 1)
        return _encode(inputs, of.address, dtype, shape, strides, (box_rows, 1, columns), swizzle)

    q_shape = (inputs.total_q, heads, name.head_dim)
    _put(params, "tma_q", describe(rows["q"], name.dtype, q_shape, q_step))
    if name.out_dtype == "e4m3" and name.mask not in SLIDING:
        out_shape = (inputs.total_q, heads, name.head_dim_v)
        _put(params, "tma_out", describe(out, name.out_dtype, out_shape, _TMA_OUT_ROWS))
    for part, length in (("k", name.head_dim), ("v", name.head_dim_v)):
        if inputs.pool is None:
            shape = (inputs.total_k, kv_heads, length)
            _put(params, f"tma_{part}", describe(rows[part], name.dtype, shape, kv_step))
            continue
        num_blocks, _, page_size, width = inputs.pool.shape
        if kv_step % page_size and page_size % kv_step:
            raise inputs.refuse("pool", f"a page_size that fits kv_step={kv_step}", page_size)
        blocks = max(1, kv_step // page_size)
        params.blocks_per_tma_load, params.blocks_per_tma_load_log2 = (
            blocks,
            blocks.bit_length() - 1,
        )
        pool_strides = (kv_heads * page_size * width, page_size * width, width, 1)
        pool_shape = (num_blocks, kv_heads, page_size, length)
        box = (1, 1, min(page_size, kv_step), columns)
        made = _encode(
            inputs, rows[part].address, name.dtype, pool_shape, pool_strides, box, swizzle
        )
        _put(params, f"tma_{part}", made)


def _encode(
    inputs: Inputs,
    address: int,
    dtype: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: str,
) -> bytes:
    base = DeviceArray.from_address(address, shape, dtype, inputs.device or 0)
    made = TensorMap.tiled(
        base, box, swizzle=swizzle, l2_promotion="none", shape=shape, strides=strides
    )
    # The hardware's descriptor is the first half of a CUtensorMap; the other is the driver's own.
    return made.raw[:_DESCRIPTOR_BYTES]


def _put(params: Params, field: str, descriptor: bytes) -> None:
    ctypes.memmove(getattr(params, field), descriptor, _DESCRIPTOR_BYTES)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
