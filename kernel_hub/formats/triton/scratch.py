"""Triton's global scratch: memory of a launch's own, so many bytes a block of the grid.

From kernel_hub's pool in stream order: launches on several streams never share a piece.
"""

from __future__ import annotations

import ctypes
from typing import Any

from ...arrays import interop
from ...arrays.device_array import DeviceArray
from ...arrays.pool import allocate
from ...errors import LaunchConfigError
from ...launch.device_function import DeviceFunction
from ...launch.function import KernelFunction
from ...launch.geometry import LaunchOptions, check
from .metadata import Metadata

_POOL_ALIGN = 256  # of every block of the driver's pools
_ALWAYS_THERE_BYTES = 1 << 30


def launch(
    function: KernelFunction,
    metadata: Metadata,
    gridDim: Any,
    stream: Any,
    values: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    """Launch `function` with `values` and scratch that is freed behind it in stream order."""
    state, handle, size_bytes = _measure(function, metadata, gridDim, stream, values)
    asked = (
        f"{size_bytes:,} bytes of global scratch of {metadata.name} (inside a graph capture: bind "
        "the launch to the stream before it, capture the bound launch and keep it)"
    )
    block = allocate(size_bytes, state.device, handle, asked)
    address = block.address + -block.address % metadata.global_scratch_align
    hidden = (ctypes.c_void_p(address), *(None,) * (metadata.num_hidden - 1))
    threads, shared = (metadata.block_threads, 1, 1), metadata.shared_bytes
    # Where this raises, the block goes back when it dies.
    function(gridDim, threads, shared, handle, (*values, *hidden), **options)
    block.free()


def bound(
    function: KernelFunction,
    metadata: Metadata,
    gridDim: Any,
    stream: Any,
    values: tuple[Any, ...],
) -> tuple[Any, ...]:
    """The hidden parameters of a bound launch, scratch of its own among them where it needs any."""
    hidden: tuple[Any, ...] = (None,) * metadata.num_hidden
    if not metadata.global_scratch_bytes:
        return hidden
    if stream is None:
        raise LaunchConfigError(
            f"bind of {metadata.name}: the kernel has global scratch memory, which launches on "
            "several streams must not share: give the stream"
        )
    state, handle, size_bytes = _measure(function, metadata, gridDim, stream, values)
    scratch = DeviceArray.empty(size_bytes, "uint8", device=state.device, stream=handle)
    return scratch[-scratch.ptr % metadata.global_scratch_align :], *hidden[1:]


def _measure(
    function: KernelFunction,
    metadata: Metadata,
    gridDim: Any,
    stream: Any,
    values: tuple[Any, ...],
) -> tuple[DeviceFunction, int, int]:
    """(the function on the launch's device, the stream's handle, bytes of scratch)."""
    device = function._device_of(values)
    handle = interop.stream_handle(stream, device)
    state = function._state(device, handle)
    block, shared = (metadata.block_threads, 1, 1), metadata.shared_bytes
    x, y, z = check(state.limits, gridDim, block, shared, LaunchOptions(metadata.cluster))[:3]
    size_bytes = x * y * z * metadata.global_scratch_bytes
    size_bytes += max(0, metadata.global_scratch_align - _POOL_ALIGN)
    if size_bytes > _ALWAYS_THERE_BYTES:
        total = ctypes.c_size_t()
        state.driver.call("cuDeviceTotalMem_v2", ctypes.byref(total), device)
        if size_bytes > total.value:
            raise LaunchConfigError(
                f"gridDim={(x, y, z)} of {metadata.name}: {metadata.global_scratch_bytes:,} bytes "
                f"of global scratch a block (global_scratch_size in {metadata.label}) make "
                f"{size_bytes:,} bytes; device {device} ({state.limits.device_name}) has "
                f"{total.value:,}: launch fewer blocks at a time"
            )
    return state, handle, size_bytes
