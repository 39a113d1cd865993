"""Calling an fmha_v2 kernel with tensors: plan (check, fill the struct, bind), then launch."""

from __future__ import annotations

from typing import Any

from ... import driver as _driver
from ...arrays import interop
from ...arrays.device_array import DeviceArray
from ...errors import ParamsError
from ...kernel import KernelFunction
from .call import Call
from .inputs import read_inputs
from .names import parse_name
from .options import NO_WINDOW, check_options, check_sinks, read_scales, read_softcap
from .param_struct import Params
from .struct_layouts import laid_out


class Attention:
    """One planned call: all checked, packed and bound. Call it to launch; it returns `out`.

    Calls of one Attention share a scheduler's counter: make them on one stream, or in order.

    params: the struct as the kernel gets it. gridDim, blockDim, sharedMemBytes: the launch.
    """

    def __init__(self, call: Call, stream: Any) -> None:
        self.name, self.params, self.out = call.name, call.params, call.out
        self.gridDim, self.blockDim = call.grid, call.threads
        self.sharedMemBytes = call.shared_bytes
        self._device, self._stream = call.device, stream
        self._counter: DeviceArray | None = None
        keep = [*call.inputs.arrays]
        if call.name.variant == "tma_ws":
            self._counter = DeviceArray.empty(1, "uint32", device=call.device, stream=stream)
            self.params.tile_counter = self._counter.ptr
            keep.append(self._counter)
        self._launch = None
        if call.inputs.total_q:
            packed = _ByValue(bytes(self.params), call.device, keep)
            geometry = (self.gridDim, self.blockDim, self.sharedMemBytes)
            self._launch = call.function.bind(*geometry, stream, [packed])

    def __call__(self) -> Any:
        """Launch, asynchronously; returns `out`."""
        if self._launch is None:
            return self.out
        if self._counter is not None:
            driver = _driver.get()
            stream = interop.stream_handle(self._stream, self._device)
            asked = f"setting the tile counter of {self.name} to 0"
            call = "cuMemsetD8Async", self._counter.ptr, 0, 4, stream
            driver.run(self._device, call, asked=asked, relaxed=False)
        self._launch()
        return self.out


def run(kernel: KernelFunction, *inputs: Any, **options: Any) -> Any:
    """`plan(kernel, *inputs, **options)()`: attention by an fmha_v2 kernel; returns `out`."""
    return plan(kernel, *inputs, **options)()


def plan(
    kernel: KernelFunction,
    *inputs: Any,
    cu_seqlens: Any,
    cu_seqlens_k: Any = None,
    max_seqlen: int | None = None,
    max_seqlen_k: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    causal: bool | None = None,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    chunk_size: int | None = None,
    softcap: float | None = None,
    alibi: bool = False,
    packed_mask: Any = None,
    cu_mask_rows: Any = None,
    block_table: Any = None,
    q_scale: float = 1.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out_scale: float = 1.0,
    attention_sinks: Any = None,
    softmax_stats: Any = None,
    out: Any = None,
    stream: Any = None,
    threads: int | None = None,
    shared_bytes: int | None = None,
    unroll: int | None = None,
) -> Attention:
    """Check everything and make the launch of `kernel` on these tensors; nothing runs yet.

    kernel: a function whose name `parse_name` reads; layout, head size and dtype come from it.
    inputs: CUDA tensors of the name's dtype, rows aligned to 16 bytes, by layout:
        qkv: one packed (total, 3, num_heads, head_dim); with num_kv_heads= (total, num_heads +
        2 num_kv_heads, head_dim); with num_heads= too (total, row).
        q_kv: q (total_q, num_heads, head_dim), kv (total_k, 2, num_kv_heads, head_dim).
        q_k_v: q, k (total_k, num_kv_heads, head_dim), v (total_k, num_kv_heads, head_dim_v).
        q_paged_kv: q, pool (num_blocks, num_kv_heads, page_size, head_dim).
    cu_seqlens, cu_seqlens_k: int32 (batch_size + 1) on the device: where sequences begin in Q, in
        K and V; the latter is the former unless it is given. A sequence's K is at least as long as
        its Q; its last query sees its last key.
    max_seqlen, max_seqlen_k: the longest Q (None: total_q, which launches idle blocks) and K.
    causal: what the kernel's mask must be; None takes it as it is.
    softmax_scale: None is 1 / sqrt(head_dim).
    window_size: (left, right): keys before a query that it sees, for kernels with a sliding mask.
    chunk_size: a power of two: a query sees its own chunk only (sliding_or_chunked_causal, tma_ws).
    softcap: c in c tanh(scores / c), a whole number, as these kernels read an integer; given
        exactly where the name says softcapping.
    alibi: add ALiBi's bias, under a causal mask; a tma_ws kernel's name says whether it does.
    packed_mask, cu_mask_rows: what `pack_mask` made, on the device, for custom_mask kernels.
    block_table: int32 (batch_size, 2, max_blocks): the blocks of K, then of V; room for
        max_seqlen_k keys, where that is given.
    q_scale, k_scale, v_scale, out_scale: for e4m3, value = e4m3 number * scale.
    attention_sinks: fp32 (num_heads,); of kernels that read them (their machine code says),
        but for e4m3 with alibi or softcapping, which weigh them wrongly.
    softmax_stats: fp32 (total_q, num_heads, 2), written: each row's largest score and its sum of
        exp(score - largest); of tma_ws kernels those with _softmax, at the default softmax_scale.
    out: (total_q, num_heads, head_dim_v); None makes one: a torch tensor for torch tensors, else a
        DeviceArray.
    stream: as in a launch; the plan keeps it.
    threads, shared_bytes, unroll: what the host's table of kernels has, where it is not known here;
        where it is (flash attention), other threads, less shared memory and unroll are refused.

    Raises TensorError, LaunchConfigError and ParamsError, naming the argument, before the driver
    is asked for anything but to load; CubinNotFoundError where the kernel does not fit the GPU.
    """
    if not isinstance(kernel, KernelFunction):
        raise ParamsError(f"kernel={kernel!r:.80}: a KernelFunction; find() picks one of load()'s")
    name = parse_name(kernel.name)
    read = read_inputs(name, inputs, num_heads, num_kv_heads)
    window = check_options(name, causal, window_size, chunk_size, softcap, alibi)
    params = Params()
    call = Call(kernel, name, read, params)
    call.lengths(cu_seqlens, cu_seqlens_k, max_seqlen)
    call.paged(block_table, max_seqlen_k)
    call.custom_mask(packed_mask, cu_mask_rows, max_seqlen_k)
    if attention_sinks is not None:
        check_sinks(name)
        sinks = read.take(attention_sinks, "attention_sinks", "fp32", (read.num_heads,), False)
        params.attention_sinks = sinks.address
    params.sliding_window_size = NO_WINDOW if window < 0 else window + 1
    params.log2_chunk_size = 0 if chunk_size is None else chunk_size.bit_length() - 1
    if alibi:
        call.alibi()
    factors = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale, "out_scale": out_scale}
    cap = read_softcap(name, softcap)
    scales = read_scales(name, softmax_scale, cap, factors)
    if read.device is None:
        read.device = interop.current_device()
    call.device = read.device
    call.stats(softmax_stats, scales, stream)
    call.output(out, stream)
    reader = call.check_kernel()
    call.scale(scales, cap, alibi, stream)
    call.geometry(threads, shared_bytes, unroll)
    call.params = laid_out(params, name, reader)
    return Attention(call, stream)


class _ByValue:
    """The struct as a launch parameter that says which device it is for and what it points to.

    The array interface of no elements is how the runtime asks a parameter for its device.
    """

    def __init__(self, raw: bytes, device: int, arrays: list[Any]) -> None:
        self._raw, self.device, self._arrays = raw, device, arrays
        self.__cuda_array_interface__ = {
            "shape": (0,),
            "typestr": "|u1",
            "data": (0, True),
            "version": 3,
        }

    def _as_bytes(self) -> bytes:
        return self._raw

    def _record_use(self, stream: int) -> None:
        for array in self._arrays:
            if (record := getattr(array, "_record_use", None)) is not None:
                record(stream)
