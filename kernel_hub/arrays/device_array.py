"""DeviceArray: GPU memory with a shape and a dtype, for NumPy users without torch.

Shapes, strides, copies and interchange; the memory itself is `pool`'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import TensorError
from . import copies, dlpack, dtypes, interop, pool, strided
from .dtypes import Dtype
from .interop import contiguous_strides
from .pool import Block, MemoryStats, memory_stats, trim

__all__ = ["DeviceArray", "MemoryStats", "memory_stats", "trim"]


class DeviceArray:
    """A strided array in the memory of one GPU.

    Made by `empty`, `zeros`, `from_numpy`, `from_dlpack` or `from_address`; slices, `reshape` and
    `view` share the memory, which goes back to kernel_hub's pool in stream order when the last of
    them dies. `strides` are in elements. Allocations, copies and frees are ordered on `stream`:
    None is torch's current stream of the device when torch is loaded, else the legacy default
    stream; a stream handed over as a plain int must outlive the array.

    An array that a captured CUDA graph uses must be kept alive for as long as the graph is.
    """

    __slots__ = ("__weakref__", "_block", "_dtype", "_ptr", "read_only", "shape", "strides")

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    read_only: bool

    def __init__(
        self,
        block: Block,
        ptr: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: Dtype,
        read_only: bool = False,
    ) -> None:
        """For kernel_hub's own use: see the class methods."""
        self._block = block
        self._ptr = ptr
        self.shape = shape
        self.strides = strides
        self._dtype = dtype
        self.read_only = read_only

    # -- making one

    @classmethod
    def empty(
        cls, shape: int | Sequence[int], dtype: Any = "fp32", *, device: Any = None,
        stream: Any = None,
    ) -> DeviceArray:  # fmt: skip
        """An array of `shape` with whatever the memory held.

        dtype: a token ('fp16', 'bf16', 'e4m3', …), a NumPy dtype or a torch dtype.
        device: a number, 'cuda:1', or a device of torch, CuPy or cuda.core; None is torch's current
            one when torch uses CUDA, else 0.
        Raises TensorError, DeviceOutOfMemoryError, CudaDriverError.
        """
        kind = dtypes.of(dtype)
        dims = strided.as_shape(shape)
        device = pool.device_number(device)
        handle = interop.stream_handle(stream, device)
        size_bytes = math.prod(dims) * kind.size_bytes
        if size_bytes:
            asked = f"{size_bytes:,} bytes for shape {dims} of {kind.token}"
            block = pool.allocate(size_bytes, device, handle, asked)
            # An object, unlike an int, can be kept alive until the memory is freed on its stream.
            block.owner = None if isinstance(stream, int) else stream
        else:
            block = Block(0, 0, device, 0 if handle == 1 else handle)
        return cls(block, block.address, dims, contiguous_strides(dims), kind)

    @classmethod
    def zeros(
        cls, shape: int | Sequence[int], dtype: Any = "fp32", *, device: Any = None,
        stream: Any = None,
    ) -> DeviceArray:  # fmt: skip
        """An array of `shape` filled with zeros; arguments as for `empty`."""
        array = cls.empty(shape, dtype, device=device, stream=stream)
        if array.size_bytes:
            on = array._block.stream
            call = ("cuMemsetD8Async", array.ptr, 0, array.size_bytes, on)
            pool.work(array.device, on, "zeros", call)
        return array

    @classmethod
    def from_numpy(
        cls, array: Any, *, device: Any = None, stream: Any = None, non_blocking: bool = False
    ) -> DeviceArray:
        """A copy on the GPU of a NumPy array (or what `numpy.asarray` takes), row-major.

        The host array may be changed as soon as this returns; non_blocking: as for `copy_from`.
        bfloat16 and float8 arrays of `ml_dtypes` keep their dtype.
        """
        host = copies.host_array(array)
        made = cls.empty(host.shape, host.dtype, device=device, stream=stream)
        return made.copy_from(host, stream=stream, non_blocking=non_blocking)

    @classmethod
    def from_dlpack(cls, producer: Any, *, stream: Any = None) -> DeviceArray:
        """The same memory as `producer` (torch, CuPy, JAX, … on a GPU), without a copy.

        stream: where the array will be used next; the producer orders its own work before it.
        """
        device = dlpack.device_of(producer)
        handle = interop.stream_handle(stream, device)
        given = dlpack.consume(producer, handle)
        block = Block(given.address, given.size_bytes, given.device, handle, owner=given.owner)
        strides = contiguous_strides(given.shape) if given.strides is None else given.strides
        return cls(block, given.address, given.shape, strides, given.dtype, given.read_only)

    @classmethod
    def from_address(
        cls,
        ptr: int,
        shape: int | Sequence[int],
        dtype: Any,
        device: int = 0,
        owner: object = None,
    ) -> DeviceArray:
        """A row-major view of memory at `ptr` that somebody else frees; `owner` is kept alive."""
        kind = dtypes.of(dtype)
        dims = strided.as_shape(shape)
        block = Block(ptr, math.prod(dims) * kind.size_bytes, device, 0, owner=owner)
        return cls(block, ptr, dims, contiguous_strides(dims), kind)

    # -- what it is

    @property
    def ptr(self) -> int:
        """The device address of the first element. Raises TensorError once freed."""
        if self._block.freed:
            raise TensorError(f"this {self!r} was freed: it has no memory any more")
        return self._ptr

    @property
    def device(self) -> int:
        """The GPU's number."""
        return self._block.device

    @property
    def dtype_token(self) -> str:
        """'fp32', 'bf16', …"""
        return self._dtype.token

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy's dtype; for bf16, e4m3 and e5m2 without ml_dtypes that of the raw bits."""
        return dtypes.numpy_dtype(self._dtype)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self._dtype.size_bytes

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        return strided.is_contiguous(self.shape, self.strides)

    @property
    def is_freed(self) -> bool:
        """Whether `free` was called on this array or one that shares its memory."""
        return self._block.freed

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-dimensional DeviceArray")
        return self.shape[0]

    def __repr__(self) -> str:
        where = "freed" if self.is_freed else f"ptr={self._ptr:#x}"
        return (
            f"DeviceArray(shape={self.shape}, dtype={self.dtype_token!r}, device={self.device}, "
            f"{where})"
        )

    # -- views

    def reshape(self, *shape: int | Sequence[int]) -> DeviceArray:
        """The same elements in another shape (one length may be -1). The array is contiguous."""
        dims = strided.reshaped(self.shape, shape[0] if len(shape) == 1 else shape)
        if not self.is_contiguous:
            raise TensorError(
                f"cannot reshape a view with strides {self.strides}: its elements are not adjacent"
            )
        return self._derive(self.ptr, dims, contiguous_strides(dims))

    def view(self, dtype: Any) -> DeviceArray:
        """The same bytes as another dtype; the last dimension scales with the element size."""
        kind = dtypes.of(dtype)
        sizes = (self._dtype.size_bytes, kind.size_bytes)
        shape, strides = strided.reinterpreted(self.shape, self.strides, self.ptr, *sizes)
        return self._derive(self.ptr, shape, strides, kind)

    def __getitem__(self, key: Any) -> DeviceArray:
        """A view: integers, slices with a positive step, and `...`."""
        offset, shape, strides = strided.indexed(self.shape, self.strides, key)
        return self._derive(self.ptr + offset * self._dtype.size_bytes, shape, strides)

    def _derive(
        self,
        ptr: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: Dtype | None = None,
    ) -> DeviceArray:
        return DeviceArray(self._block, ptr, shape, strides, dtype or self._dtype, self.read_only)

    # -- copies

    def to_numpy(self, stream: Any = None) -> NDArray[Any]:
        """A copy on the host, after the work that `stream` and earlier launches hold.

        bf16, e4m3 and e5m2 need `ml_dtypes` for their own dtype; without it the raw bits come as
        uint16 or uint8.
        """
        if not self.size:
            return np.empty(self.shape, self.dtype)
        # A view with gaps travels as the one stretch of memory that it lies in.
        span = 1 + sum(
            (length - 1) * stride for length, stride in zip(self.shape, self.strides, strict=True)
        )
        host = np.empty(span, self._dtype.raw)
        copies.with_host(self, host, stream, to_host=True)
        if self.is_contiguous:
            return host.view(self.dtype).reshape(self.shape)
        byte_strides = [stride * host.itemsize for stride in self.strides]
        gaps = np.lib.stride_tricks.as_strided(host, self.shape, byte_strides)
        return gaps.copy().view(self.dtype)

    def copy_from(
        self, source: Any, *, stream: Any = None, non_blocking: bool = False
    ) -> DeviceArray:
        """Overwrite the elements with those of a NumPy array or a DeviceArray; returns self.

        Shape and dtype agree, and this array (and a DeviceArray source) is contiguous. Returns
        when a host source may be changed again.
        non_blocking: return at once where the source is page-locked (`empty_pinned`, torch's
            `pin_memory()`) and contiguous. It is kept alive, and stays as it is until the work on
            `stream` is done; work of other streams on this array is for the caller to order.
        """
        copies.overwrite(self, source, stream, non_blocking)
        return self

    def copy_to(
        self, target: NDArray[Any], *, stream: Any = None, non_blocking: bool = False
    ) -> NDArray[Any]:
        """Overwrite the elements of a NumPy array with these; returns it.

        Shape and dtype agree, both are contiguous. non_blocking: as for `copy_from`; the target
        holds the elements once the work on `stream` is done.
        """
        copies.read_into(self, target, stream, non_blocking)
        return target

    # -- life

    def free(self) -> None:
        """Give the memory back now; every later use of it, through any view, raises TensorError."""
        self._block.free()

    def _record_use(self, stream: int) -> None:
        """The runtime's note that `stream` works on the memory: freeing takes it into account."""
        self._block.record_use(stream)

    def __reduce__(self) -> Any:
        raise TypeError("a DeviceArray is memory of this process: send .to_numpy() instead")

    # -- interchange

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        stream = self._block.last_stream
        size = self._dtype.size_bytes
        return {
            "shape": self.shape,
            "typestr": np.dtype(self._dtype.raw).str,
            "data": (self.ptr if self.size else 0, self.read_only),
            "version": 3,
            "strides": None if self.is_contiguous else tuple(s * size for s in self.strides),
            "stream": stream or 1,  # 0 is not allowed; 1 names the legacy default stream
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.CUDA, self.device)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"{self!r} cannot be exported to DLPack device {tuple(dl_device)}")
        if copy:
            raise BufferError("a DeviceArray is exported without a copy")
        if stream == 0:
            raise ValueError("DLPack: stream=0 is ambiguous; pass 1 for the legacy default stream")
        ptr = self.ptr if self.size else 0
        if stream != -1:
            consumer = stream or 1
            self._block.settle(consumer)
            self._record_use(consumer)
        return dlpack.export(
            ptr,
            self.shape,
            self.strides,
            self._dtype,
            self.device,
            owner=self._block,
            read_only=self.read_only,
            max_version=max_version,
        )

    def __array__(self, *args: Any, **kwargs: Any) -> NDArray[Any]:
        raise TypeError("a DeviceArray is not converted silently: use .to_numpy()")


def _reset_for_tests() -> None:
    pool._reset_for_tests()
