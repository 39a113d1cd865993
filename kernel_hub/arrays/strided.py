"""Arithmetic of strided views: shapes, indices, reinterpretation. Pure; strides in elements."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from ..errors import TensorError

Dims = tuple[int, ...]


def as_shape(shape: Any, *, wildcard: bool = False) -> Dims:
    """`shape` (an int or a sequence of ints, all 0 or more) as a tuple; -1 once with `wildcard`."""
    try:
        given = shape if isinstance(shape, Sequence) else [operator.index(shape)]
        dims = tuple(operator.index(length) for length in given)
    except TypeError:
        raise TensorError(f"shape {shape!r}: expected an int or a sequence of ints") from None
    if any(length < (-1 if wildcard else 0) for length in dims) or dims.count(-1) > 1:
        raise TensorError(f"shape {dims}: lengths are 0 or more")
    return dims


def is_contiguous(shape: Dims, strides: Dims) -> bool:
    """Whether the elements lie in row-major order without gaps."""
    expected = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return 0 in shape
        expected *= length
    return True


def reshaped(shape: Dims, new: Any) -> Dims:
    """The shape `new`, its -1 filled in, checked to hold as many elements as `shape`."""
    dims = as_shape(new, wildcard=True)
    size = math.prod(shape)
    if -1 in dims:
        known = -math.prod(dims)
        if known and size % known == 0:
            dims = tuple(size // known if length == -1 else length for length in dims)
    if -1 in dims or math.prod(dims) != size:
        raise TensorError(f"cannot reshape {shape} ({size} elements) to {dims}")
    return dims


def reinterpreted(
    shape: Dims, strides: Dims, address: int, old_bytes: int, new_bytes: int
) -> tuple[Dims, Dims]:
    """Shape and strides of the same memory with elements of another size."""
    where = f"shape {shape}, strides {strides}, address {address:#x}"
    if old_bytes == new_bytes:
        return shape, strides
    if not shape or strides[-1] != 1:
        raise TensorError(f"a view with another element size needs adjacent elements: {where}")
    parts = (shape[-1], *strides[:-1])
    if any(part * old_bytes % new_bytes for part in parts) or address % new_bytes:
        raise TensorError(
            f"{old_bytes}-byte elements cannot be viewed as {new_bytes}-byte ones: {where} must "
            f"be multiples of {new_bytes} bytes"
        )
    length, *outer = (part * old_bytes // new_bytes for part in parts)
    return (*shape[:-1], length), (*outer, 1)


def indexed(shape: Dims, strides: Dims, key: Any) -> tuple[int, Dims, Dims]:
    """(offset in elements, shape, strides) of `array[key]`: integers, slices and `...`."""
    keys = list(key) if isinstance(key, tuple) else [key]
    dots = [index for index, part in enumerate(keys) if part is Ellipsis]
    missing = len(shape) - (len(keys) - len(dots))
    if len(dots) > 1 or missing < 0:
        raise IndexError(f"{key!r} has too many indices for shape {shape}")
    at = dots[0] if dots else len(keys)
    keys[at : at + len(dots)] = [slice(None)] * missing
    offset = 0
    new_shape, new_strides = [], []
    for axis, (part, length, stride) in enumerate(zip(keys, shape, strides, strict=True)):
        if isinstance(part, slice):
            start, stop, step = part.indices(length)
            if step < 0:
                raise IndexError(f"step {step}: a DeviceArray is sliced forwards only")
            count = max(0, -(-(stop - start) // step))
            offset += start * stride if count else 0
            new_shape.append(count)
            new_strides.append(stride * step)
            continue
        if isinstance(part, bool) or not hasattr(part, "__index__"):
            raise IndexError(
                f"a DeviceArray takes integers, slices and '...', not {type(part).__name__}"
            )
        try:
            index = operator.index(part)
        except TypeError:
            raise IndexError(f"a DeviceArray takes integers, not {part!r:.80}") from None
        if not -length <= index < length:
            raise IndexError(f"index {index} is outside axis {axis} of length {length}")
        offset += index % length * stride
    return offset, tuple(new_shape), tuple(new_strides)
