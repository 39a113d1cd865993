"""What every op needs: checks with full messages, row layouts, and registration with torch.library.

Knows nothing of any one op.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import TensorError
from ..tuning import Gpu

DTYPE_TOKENS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
VEC_BYTES = 16
MAX_GRID_Y = 65535
MAX_GRID_X = 2**31 - 1
# Sizes are C ints on the device, and an index may pass the end by one block's span.
MAX_SIZE = 2**30
MAX_PLANS = 4096
PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})

LIBRARY = torch.library.Library("kernel_hub", "FRAGMENT")


def define(
    schema: str,
    *,
    cuda: Callable[..., Any],
    cpu: Callable[..., Any],
    fake: Callable[..., Any],
) -> Any:
    """Register `kernel_hub::<schema>` with torch and return the op."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, cuda, "CUDA")
    LIBRARY.impl(name, cpu, "CPU")
    torch.library.register_fake(f"kernel_hub::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.kernel_hub, name).default


def shipped(cubin: str, function: str) -> Any:
    """The KernelFunction; the runtime is imported here, so that CPU tensors do without it."""
    from ..registry import own

    return own[cubin][function]


def say(tensor: torch.Tensor) -> str:
    """A tensor in an error message: shape, dtype, strides, device."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    strides = tuple(tensor.stride())
    return f"shape {tuple(tensor.shape)}, {dtype}, strides {strides}, on {tensor.device}"


def refuse(op: str, argument: str, expected: str, found: object) -> TensorError:
    """The TensorError for `argument` of `op`."""
    shown = say(found) if isinstance(found, torch.Tensor) else found
    return TensorError(f"{op}: {argument}: expected {expected}, found {shown}")


def check_tensor(op: str, argument: str, value: Any) -> None:
    """`value` must be a torch tensor."""
    if not isinstance(value, torch.Tensor):
        raise refuse(op, argument, "a torch tensor", f"{type(value).__name__} {value!r:.60}")


def check_data(op: str, argument: str, value: Any) -> None:
    """`value` must be an fp16, bf16 or fp32 tensor on a GPU or the CPU, its last dim contiguous."""
    check_tensor(op, argument, value)
    if value.dtype not in DTYPE_TOKENS:
        raise refuse(op, argument, "dtype float16, bfloat16 or float32", value)
    if value.device.type not in ("cuda", "cpu", "meta"):
        raise refuse(op, argument, "a CUDA or CPU tensor", value)
    if value.dim() == 0:
        raise refuse(op, argument, "at least one dimension", value)
    if value.shape[-1] > 1 and value.stride(-1) != 1:
        raise refuse(op, argument, "a contiguous last dimension (call .contiguous() first)", value)


def check_like(
    op: str,
    argument: str,
    value: Any,
    shape: Sequence[int],
    like: torch.Tensor,
    *,
    dtypes: Sequence[torch.dtype] = (),
) -> None:
    """`value` must be a tensor of `shape`, on the device of `like`, of its dtype or of `dtypes`."""
    check_tensor(op, argument, value)
    allowed = tuple(dtypes) or (like.dtype,)
    if value.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise refuse(op, argument, f"dtype {names}", value)
    if value.device != like.device:
        raise refuse(op, argument, f"device {like.device}", value)
    if tuple(value.shape) != tuple(shape):
        raise refuse(op, argument, f"shape {tuple(shape)}", value)
    if value.shape and value.shape[-1] > 1 and value.stride(-1) != 1:
        raise refuse(op, argument, "a contiguous last dimension (call .contiguous() first)", value)


def check_output(op: str, argument: str, out: torch.Tensor) -> None:
    """No two elements of an output may share memory."""
    if any(n > 1 and s == 0 for n, s in zip(out.shape, out.stride(), strict=True)):
        raise refuse(op, argument, "an output whose elements do not overlap", out)


def check_no_grad(op: str, **tensors: torch.Tensor | None) -> None:
    """These ops have no backward: refuse inputs that autograd would follow."""
    if not torch.is_grad_enabled():
        return
    for argument, value in tensors.items():
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise TensorError(
                f"{op}: {argument}: requires grad, but {op} has no backward; call it under "
                f"torch.no_grad() or pass {argument}.detach()"
            )


def collapse(
    op: str, sizes: Sequence[int], strides: Sequence[Sequence[int]], groups: int = 2
) -> tuple[list[int], list[list[int]]]:
    """Merge leading dimensions that are evenly spaced in every tensor.

    sizes: the leading dimensions; strides: for each tensor, its strides along them.
    Returns exactly `groups` sizes, and for each tensor as many strides; size-1 groups come first.
    Raises TensorError where more groups than that are left.
    """
    merged_sizes: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    for axis, size in enumerate(sizes):
        if size == 1:
            continue
        evenly = bool(merged_sizes) and all(
            kept[-1] == size * stride[axis] for kept, stride in zip(merged, strides, strict=True)
        )
        if evenly:
            merged_sizes[-1] *= size
        else:
            merged_sizes.append(size)
        for kept, stride in zip(merged, strides, strict=True):
            if evenly:
                kept[-1] = stride[axis]
            else:
                kept.append(stride[axis])
    missing = groups - len(merged_sizes)
    if missing < 0:
        raise TensorError(
            f"{op}: the leading dimensions {tuple(sizes)} with strides "
            f"{[tuple(stride) for stride in strides]} are {len(merged_sizes)} separately strided "
            f"groups, at most {groups} are supported; call .contiguous() first"
        )
    return [1] * missing + merged_sizes, [[0] * missing + kept for kept in merged]


def split_rows(
    op: str, sizes: Sequence[int], strides: Sequence[Sequence[int]]
) -> tuple[int, int, list[tuple[int, int]]]:
    """(outer, rows, [(outer stride, row stride) for each tensor]); outer fits gridDim.y."""
    (outer, rows), pairs = collapse(op, sizes, strides)
    if outer > MAX_GRID_Y:
        outer, rows = rows, outer
        pairs = [pair[::-1] for pair in pairs]
    if outer > MAX_GRID_Y or rows > MAX_GRID_X:
        raise TensorError(
            f"{op}: {outer} x {rows} rows that do not collapse into one dimension; "
            "call .contiguous() first"
        )
    return outer, rows, [(pair[0], pair[1]) for pair in pairs]


def is_debugging() -> bool:
    """Whether KERNEL_HUB_DEBUG asks for checks of values on the device, which wait for it."""
    return os.environ.get("KERNEL_HUB_DEBUG", "0") not in ("", "0")


def is_aligned(elems: int, *strides: int) -> bool:
    """Whether all strides are multiples of a vector of `elems` elements."""
    return all(stride % elems == 0 for stride in strides)


def is_plain(*tensors: torch.Tensor | None) -> bool:
    """Whether all are real torch tensors with memory, not fake, meta or another library's."""
    return all(
        tensor is None or (type(tensor) in PLAIN_TYPES and not tensor.is_meta) for tensor in tensors
    )


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """The GPU a launch is for; the emulator counts as a small sm_80."""
    if device.type != "cuda":
        return Gpu((8, 0), 4)
    found = torch.cuda.get_device_properties(device)
    return Gpu((found.major, found.minor), found.multi_processor_count, found.name)
