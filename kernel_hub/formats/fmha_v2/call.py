"""Filling the struct of an fmha_v2 kernel, argument by argument, each checked first."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np

from ...arrays import interop
from ...arrays.device_array import DeviceArray
from ...kernel import KernelFunction
from . import launch_shape
from .inputs import Inputs, Rows
from .mask import mask_row_bytes
from .names import KernelName
from .options import Factors, bits
from .param_struct import Params
from .struct_layouts import StructReader, reader_of


class Call:
    """One call on its way: what fills `params`, argument by argument."""

    device: int
    out: Any
    out_rows: Rows
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int

    def __init__(
        self, function: KernelFunction, name: KernelName, inputs: Inputs, params: Params
    ) -> None:
        self.function, self.name, self.inputs, self.params = function, name, inputs, params
        rows = inputs.rows
        for part in "qkv":
            setattr(params, f"{part}_stride", rows[part].stride)
        if name.layout == "qkv":
            params.qkv = rows["q"].address
        else:
            params.q = rows["q"].address
        if name.layout == "q_kv":
            params.kv = rows["k"].address
        elif name.layout == "q_k_v":
            params.k, params.v = rows["k"].address, rows["v"].address
        params.num_heads, params.num_kv_heads = inputs.num_heads, inputs.num_kv_heads
        params.num_heads_per_kv = inputs.num_heads // inputs.num_kv_heads
        params.head_dim, params.head_dim_v = name.head_dim, name.head_dim_v
        params.num_grouped_heads = 1

    def lengths(self, cu_seqlens: Any, cu_seqlens_k: Any, max_seqlen: int | None) -> None:
        inputs, params = self.inputs, self.params
        q = inputs.take(cu_seqlens, "cu_seqlens", "int32", (None,), rows=False)
        if q.shape[0] < 2:
            raise inputs.refuse("cu_seqlens", "shape (batch_size + 1,)", q.shape)
        params.batch_size = q.shape[0] - 1
        params.cu_seqlens_q = params.cu_seqlens_k = q.address
        if cu_seqlens_k is not None:
            if self.name.layout == "qkv":
                raise inputs.refuse("cu_seqlens_k", "None, as Q and K are rows of one", "a tensor")
            k = inputs.take(cu_seqlens_k, "cu_seqlens_k", "int32", q.shape, rows=False)
            params.cu_seqlens_k = k.address
        elif inputs.pool is None and inputs.total_k != inputs.total_q:
            found = f"None, with {inputs.total_q} rows of Q and {inputs.total_k} of K"
            raise inputs.refuse("cu_seqlens_k", "an int32 tensor", found)
        longest = inputs.count(max_seqlen, "max_seqlen", inputs.total_q)
        limit = self.name.seq_len
        if limit is not None and longest > limit:
            raise inputs.refuse("max_seqlen", f"at most {limit}, the kernel's own length", longest)
        params.max_seqlen_q = longest

    def paged(self, block_table: Any, max_seqlen_k: int | None) -> None:
        inputs, params = self.inputs, self.params
        if (block_table is not None) != (inputs.pool is not None):
            found = "a tensor" if inputs.pool is None else "None"
            wanted = "None" if inputs.pool is None else "int32 (batch_size, 2, max_blocks)"
            raise inputs.refuse("block_table", f"{wanted} for layout {self.name.layout}", found)
        if inputs.pool is None:
            return
        wanted_shape = (params.batch_size, 2, None)
        table = inputs.take(block_table, "block_table", "int32", wanted_shape, rows=False)
        num_kv_heads, page_size = inputs.pool.shape[1:3]
        longest = inputs.count(max_seqlen_k, "max_seqlen_k", min(1, inputs.total_q))
        if table.shape[2] * page_size < longest:
            wanted = f"max_blocks of at least {-(-longest // page_size)}, for {longest} keys"
            raise inputs.refuse("block_table", wanted, f"shape {table.shape}")
        block_bytes = num_kv_heads * inputs.rows["k"].stride
        if block_bytes > 2**31 - 1:
            raise inputs.refuse("pool", "blocks of less than 2 GiB", f"{block_bytes:,} bytes")
        cache = params.paged
        cache.max_seqs, cache.max_blocks_per_seq = params.batch_size, table.shape[2]
        cache.tokens_per_block = page_size
        cache.tokens_per_block_log2 = page_size.bit_length() - 1
        cache.bytes_per_block = block_bytes
        cache.pool, cache.block_offsets = inputs.pool.address, table.address

    def custom_mask(self, packed: Any, cu_rows: Any, max_seqlen_k: int | None) -> None:
        inputs, params = self.inputs, self.params
        for argument, value in (("packed_mask", packed), ("cu_mask_rows", cu_rows)):
            if (value is not None) != (self.name.mask == "custom_mask"):
                wanted = f"what pack_mask made, for the mask {self.name.mask}"
                wanted = wanted if value is None else f"None, for the mask {self.name.mask}"
                raise inputs.refuse(argument, wanted, "None" if value is None else "a tensor")
        longest = inputs.count(max_seqlen_k, "max_seqlen_k", inputs.total_k)
        if packed is None:
            return
        if max_seqlen_k is None:
            raise inputs.refuse("max_seqlen_k", "what pack_mask was given", None)
        params.packed_mask_stride = mask_row_bytes(longest)
        mask = inputs.take(packed, "packed_mask", "uint32", (None,), rows=False)
        if not mask.shape[0] or 4 * mask.shape[0] % (128 * params.packed_mask_stride):
            wanted = f"a multiple of 128 rows of {params.packed_mask_stride} bytes"
            raise inputs.refuse("packed_mask", wanted, f"{4 * mask.shape[0]} bytes")
        params.packed_mask = mask.address
        shape = (params.batch_size + 1,)
        params.cu_mask_rows = inputs.take(cu_rows, "cu_mask_rows", "int32", shape, False).address

    def stats(self, softmax_stats: Any, scales: Factors, stream: Any) -> None:
        inputs = self.inputs
        shape = (inputs.total_q, inputs.num_heads, 2)
        self.params.softmax_stats_stride = 8 * inputs.num_heads
        if softmax_stats is None:
            if self.name.variant == "tma_ws" and "softmax" in self.name.attributes:
                # Such a kernel always writes them: to memory that nobody reads.
                unread = DeviceArray.empty(shape, "fp32", device=self.device, stream=stream)
                inputs.arrays.append(unread)
                self.params.softmax_stats = unread.ptr if inputs.total_q else 0
            return
        if self.name.variant == "tma_ws" and "softmax" not in self.name.attributes:
            wanted = "None, as the name has no _softmax"
            raise inputs.refuse("softmax_stats", wanted, "a tensor")
        default = self.name.head_dim**-0.5
        if self.name.variant == "tma_ws" and not math.isclose(scales.qk, default):
            # Measured, and so in its source: the maximum is divided by sqrt(head_dim).
            wanted = f"the kernel's own softmax_scale, {default:.6g}, which it writes them with"
            raise inputs.refuse("softmax_stats", wanted, scales.qk)
        view = inputs.take(softmax_stats, "softmax_stats", "fp32", shape, rows=False)
        self.params.softmax_stats = view.address

    def alibi(self) -> None:
        alibi = self.params.alibi
        self.params.has_alibi = True
        alibi.num_heads_pow2 = 1 << (self.inputs.num_heads.bit_length() - 1)
        alibi.neg4_div_num_heads = -4.0 / alibi.num_heads_pow2
        alibi.scale_after_alibi = 1.0

    def output(self, out: Any, stream: Any) -> None:
        """Check `out`, or make one beside Q."""
        inputs, name = self.inputs, self.name
        shape = (inputs.total_q, inputs.num_heads, name.head_dim_v)
        like = inputs.arrays[0]
        if out is None:
            out = _empty_like(like, shape, name.out_dtype, self.device, stream)
        self.out = out
        view = inputs.take(out, "out", name.out_dtype, shape)
        self.out_rows = inputs.rows_of(view, "out", name.out_dtype)
        self.params.out, self.params.out_stride = self.out_rows.address, self.out_rows.stride

    def check_kernel(self) -> StructReader:
        """Load it, which refuses an image for another GPU, and find what it reads."""
        self.function.load(self.device)
        return reader_of(self.function, self.name, self.device)

    def scale(self, scales: Factors, softcap: int | None, alibi: bool, stream: Any) -> None:
        """The factors as the kernel reads them: half2, or float, in base 2 for tma_ws."""
        params, name = self.params, self.name
        in_base_2 = name.variant == "tma_ws" and not alibi and softcap is None
        qk = scales.qk * math.log2(math.e) if in_base_2 else scales.qk
        params.scale_bmm1 = bits(qk, "fp32" if in_base_2 else name.accumulation)
        params.scale_softmax = bits(1.0, name.accumulation)
        params.scale_bmm2 = bits(scales.pv, name.accumulation)
        params.softcap = softcap or 0
        if name.dtype == "e4m3":  # those kernels read their factors from the device
            values = np.array([qk, scales.pv], np.float32)
            held = DeviceArray.from_numpy(values, device=self.device, stream=stream)
            self.inputs.arrays.append(held)
            params.scale_bmm1_on_device, params.scale_bmm2_on_device = held.ptr, held.ptr + 4

    def geometry(self, threads: int | None, shared_bytes: int | None, unroll: int | None) -> None:
        name, function = self.name, self.function
        if threads is not None:
            threads = self.inputs.count(threads, "threads", 0)
        if shared_bytes is not None:
            shared_bytes = self.inputs.count(shared_bytes, "shared_bytes", 0, least=0)
        self.threads = launch_shape.block_threads(name, function, threads)
        self.shared_bytes = launch_shape.shared_bytes(name, function, self.device, shared_bytes)
        rows = self.inputs.count(unroll, "unroll", 0)
        self.grid = launch_shape.grid(name, self.params, self.device, rows)
        if name.variant == "tma_ws" and self.inputs.total_q:
            launch_shape.set_tensor_maps(self.params, self.inputs, self.out_rows)


def _empty_like(like: Any, shape: tuple[int, ...], dtype: str, device: int, stream: Any) -> Any:
    torch = interop.loaded_torch()
    if torch is None or not isinstance(like, torch.Tensor):
        return DeviceArray.empty(shape, dtype, device=device, stream=stream)
    on_stream: Any = contextlib.nullcontext()
    if stream is not None:
        handle = interop.stream_handle(stream, device)
        on_stream = torch.cuda.stream(torch.cuda.ExternalStream(handle, device=device))
    with on_stream:
        return torch.empty(shape, dtype=interop.torch_dtype(dtype), device=like.device)
