"""What every op needs: checks with full messages, and row layouts.

Knows nothing of any one op.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from ...errors import TensorError
from .device import device_of, is_at_hand
from .launch import emptied as emptied
from .numbers import MAX_NUMBER as MAX_NUMBER
from .numbers import MAX_SIZE as MAX_SIZE
from .numbers import check_choice as check_choice
from .numbers import check_count as check_count
from .numbers import check_dtype as check_dtype
from .numbers import check_flag as check_flag
from .numbers import check_flags as check_flags
from .numbers import check_number as check_number
from .numbers import check_whole as check_whole
from .numbers import check_window as check_window
from .numbers import is_batch as is_batch
from .numbers import last_size as last_size
from .operands import FOREIGN as FOREIGN
from .operands import PLAIN_TYPES as PLAIN_TYPES
from .operands import Operands as Operands
from .operands import bare_apply as bare_apply
from .operands import bare_backward as bare_backward
from .operands import check_tensor as check_tensor
from .operands import forward_ad as forward_ad
from .operands import gradient_refusal as gradient_refusal
from .operands import is_batched as is_batched
from .operands import is_quick as is_quick
from .operands import transform as transform
from .operands import unwrap_if_dead as unwrap_if_dead
from .overlap import Spans as Spans
from .overlap import Writes as Writes
from .overlap import check_output as check_output
from .refusals import named as named
from .refusals import refuse as refuse
from .refusals import say as say
from .register import LIBRARY as LIBRARY
from .register import Pair as Pair
from .register import define as define
from .register import define_given as define_given
from .register import define_pair as define_pair
from .versions import written as written

if torch.version.cuda is not None:  # with the ops, not in the first call: 15 ms
    from ...arrays import tensor_map as tensor_map
    from ...registry import open_ahead
    from ...registry import own as own

    open_ahead()

HALF = (torch.float16, torch.bfloat16)
DTYPE_TOKENS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
ELEMENT_TYPES = tuple(DTYPE_TOKENS)  # as csrc/include/kernel_hub/element_type.cuh numbers them
VEC_BYTES = 16
MAX_GRID_Y = 65535
MAX_GRID_X = 2**31 - 1

# The dict behind os.environ: every call asks, and the way through os.environ takes 0.6 us.
_environ: Any = getattr(os.environ, "_data", os.environ)
_encode: Any = getattr(os.environ, "encodekey", str)
_DEBUG, _ZERO, _EMPTY = (_encode(text) for text in ("KERNEL_HUB_DEBUG", "0", ""))


def shipped(cubin: str, function: str) -> Any:
    """The KernelFunction; a torch without CUDA does without the runtime until it is asked for."""
    from ...registry import own

    return own[cubin][function]


def load_ahead(like: torch.Tensor, *functions: Any) -> None:
    """Begin to load these on the GPU of `like`, under what is left to do before their launch."""
    if functions and is_at_hand(like):
        functions[0].load(like.get_device(), *functions[1:], wait=False)


def get_ready(like: torch.Tensor, cubin: str, ask: Callable[[], object]) -> None:
    """Have a thread do what a first launch on the GPU of `like` asks of no driver, under a wait of
    the caller's: read and verify the cubin; and `ask` asks what the manifest says."""
    if not is_at_hand(like):
        return
    from ...driver import apart
    from ...registry import own, read_ahead

    capability = device_of(like.device).compute_capability

    def work() -> None:  # holds no tensor, and first what leaves Python to the wait
        read_ahead(own[cubin], capability)
        ask()

    apart.begin(work)


def check_data(
    op: str, argument: str, value: Any, dtypes: Collection[torch.dtype] = DTYPE_TOKENS
) -> None:
    """`value` must be a tensor of `dtypes` on a GPU or the CPU, its last dim contiguous."""
    check_tensor(op, argument, value)
    if value.dtype not in dtypes:
        raise refuse(op, argument, f"dtype {named(dtypes)}", value)
    if value.device.type not in ("cuda", "cpu", "meta"):
        raise refuse(op, argument, "a CUDA or CPU tensor", value)
    if value.dim() == 0:
        raise refuse(op, argument, "at least one dimension", value)
    if value.shape[-1] > 1 and value.stride(-1) != 1:
        raise refuse(op, argument, "a contiguous last dimension (call .contiguous() first)", value)


def check_like(
    op: str, argument: str, value: Any, shape: Sequence[int], like: torch.Tensor, *,
    dtypes: Sequence[torch.dtype] = (),
) -> None:  # fmt: skip
    """`value` must be a tensor of `shape`, on the device of `like`, of its dtype or of `dtypes`."""
    check_tensor(op, argument, value)
    allowed = tuple(dtypes) or (like.dtype,)
    if value.dtype not in allowed:
        raise refuse(op, argument, f"dtype {named(allowed)}", value)
    if value.device != like.device:
        raise refuse(op, argument, f"device {like.device}", value)
    if tuple(value.shape) != tuple(shape):
        raise refuse(op, argument, f"shape {tuple(shape)}{_shaped_so(value, shape)}", value)
    if value.shape and value.shape[-1] > 1 and value.stride(-1) != 1:
        raise refuse(op, argument, "a contiguous last dimension (call .contiguous() first)", value)


def check_fp32(op: str, argument: str, value: Any, like: torch.Tensor) -> None:
    """`value` must be an fp32 tensor on the device of `like`, of whatever shape and strides."""
    check_tensor(op, argument, value)
    if value.dtype != torch.float32:
        raise refuse(op, argument, "dtype float32", value)
    if value.device != like.device:
        raise refuse(op, argument, f"device {like.device}", value)


def _shaped_so(value: torch.Tensor, shape: Sequence[int]) -> str:
    """How to give `value` that shape, where its elements are as many."""
    found, wanted = tuple(value.shape), tuple(shape)
    if len(found) == 2 and found == wanted[::-1]:
        return " (it is transposed: .T.contiguous() has that shape)"
    if len(wanted) == 1 and math.prod(found) == wanted[0]:
        return " (.reshape(-1) has it)"
    return ""


def check_written(
    op: str, argument: str, value: Any, shape: Sequence[int], like: torch.Tensor,
    dtypes: Sequence[torch.dtype] = (),
) -> None:  # fmt: skip
    """As `check_like`, and no element twice; None is a tensor that the op makes."""
    if value is not None:
        check_like(op, argument, value, shape, like, dtypes=dtypes)
        check_output(op, argument, value)


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


def in_own_dtypes(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, of CPU tensors, whose products torch.autocast would round to bf16: kernels do not."""

    @functools.wraps(run)
    def run_as_written(*arguments: Any, **options: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return run(*arguments, **options)

    return run_as_written


def is_debugging() -> bool:
    """Whether KERNEL_HUB_DEBUG asks for checks of values on the device, which wait for it."""
    return _environ.get(_DEBUG, _ZERO) not in (_ZERO, _EMPTY)


def is_aligned(elems: int, *strides: int) -> bool:
    """Whether all strides are multiples of a vector of `elems` elements."""
    return all(stride % elems == 0 for stride in strides)


def is_plain(*tensors: torch.Tensor | None) -> bool:
    """Whether all are real torch tensors with memory, not fake, meta or another library's."""
    return not torch.compiler.is_dynamo_compiling() and all(
        tensor is None or (type(tensor) in PLAIN_TYPES and not tensor.is_meta) for tensor in tensors
    )


def row_stride(op: str, argument: str, x: Any) -> int:
    """Of (batch, rows, ...) whose rows all lie evenly; 0 where there are not two."""
    if x is None or x.numel() == 0:
        return 0
    (batch_stride, row_stride), (batch, rows) = x.stride()[:2], x.shape[:2]
    if batch > 1 and rows > 1 and batch_stride != rows * row_stride:
        raise refuse(op, argument, "evenly spaced rows (call .contiguous() first)", x)
    return int(row_stride if rows > 1 else batch_stride if batch > 1 else 0)
