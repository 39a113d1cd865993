"""TMA descriptors: a CUtensorMap from a tensor and a box, every rule checked before the driver.

Rules: CUDA driver API, cuTensorMapEncodeTiled. Python order is outermost dimension first; the
driver's is innermost first, and the reversal happens here.
"""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Sequence
from typing import Any

from .. import driver as _driver
from ..errors import LaunchConfigError, TensorError
from . import dtypes, interop

_SIZE_BYTES, _ALIGNMENT = 128, 64
_TENSOR_MAP_ACCESS, _SHARED_PER_MULTIPROCESSOR = 127, 81  # CUdevice_attribute
# Dtype token -> CUtensorMapDataType. Types that the TMA does not know travel as their bits.
_DATA_TYPES = {
    "uint8": 0,
    "int8": 0,
    "e4m3": 0,
    "e5m2": 0,
    "uint16": 1,
    "int16": 1,
    "uint32": 2,
    "int32": 3,
    "uint64": 4,
    "int64": 5,
    "fp16": 6,
    "fp32": 7,
    "fp64": 8,
    "bf16": 9,
}
_NAN_DTYPES = ("fp16", "fp32", "fp64", "bf16")
_SWIZZLES: dict[Any, int] = {None: 0, "none": 0, "32B": 1, "64B": 2, "128B": 3}
_SWIZZLE_SPANS = {1: 32, 2: 64, 3: 128}
_L2_PROMOTIONS: dict[Any, int] = {None: 0, "none": 0, "64B": 1, "128B": 2, "256B": 3}
_OOB_FILLS = {"zeros": 0, "nan": 1}
_MAX_RANK, _MAX_BOX, _MAX_ELEMENT_STRIDE = 5, 256, 8
_MAX_DIM, _MAX_STRIDE_BYTES = 1 << 32, 1 << 40
_ADDRESS_ALIGNMENT = 16
_RULE = "(rule of cuTensorMapEncodeTiled)"


class TensorMap:
    """A `const __grid_constant__ CUtensorMap` parameter; made by `TensorMap.tiled`.

    Attributes say what was encoded, in Python order; `raw` is the descriptor's 128 bytes. Keeps
    the tensor alive. Two maps are equal when their bytes are.
    """

    tensor: Any
    address: int
    dtype: str
    device: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: str
    l2_promotion: str
    oob_fill: str
    raw: bytes
    _keep: object
    _storage: Any
    data_address: int

    def __init__(self) -> None:
        raise TypeError("make a TensorMap with TensorMap.tiled(tensor, box, …)")

    @classmethod
    def tiled(
        cls,
        tensor: Any,
        box: Sequence[int],
        *,
        swizzle: str | None = "none",
        l2_promotion: str | None = "128B",
        oob_fill: str = "zeros",
        element_strides: Sequence[int] | None = None,
        shape: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> TensorMap:
        """Describe tiles of `box` elements of `tensor`.

        tensor: a CUDA tensor of rank 1 to 5 (torch, DeviceArray, `__cuda_array_interface__` or
            DLPack), 16-byte aligned, its last dimension contiguous and its other strides multiples
            of 16 bytes. e4m3, e5m2 and int8 travel as uint8, int16 as uint16.
        box: elements in each dimension of one tile, 1 to 256; the innermost times the element size
            is a multiple of 16 bytes and, with a swizzle, at most the swizzle's span.
        swizzle: 'none', '32B', '64B' or '128B'.
        l2_promotion: 'none', '64B', '128B' or '256B'.
        oob_fill: what a tile reads outside the tensor: 'zeros', or 'nan' for float dtypes.
        element_strides: every how many-th element is read in each dimension, 1 to 8.
        shape, strides: elements, in place of the tensor's own (ragged or paged layouts): what they
            reach must be inside the tensor's memory, which is not checked.

        Raises LaunchConfigError for box and options, TensorError for the tensor, CudaDriverError.
        """
        array = interop.describe(tensor)
        if array is None:
            raise TensorError(
                f"TensorMap takes a CUDA tensor or array, not {type(tensor).__name__}"
            )
        if array.dtype not in _DATA_TYPES:
            raise TensorError(
                f"the TMA cannot copy elements of {array.dtype or 'an unknown dtype'}; it takes "
                + ", ".join(_DATA_TYPES)
            )
        item_bytes = dtypes.of(array.dtype).size_bytes
        dims = tuple(array.shape) if shape is None else _integers(shape, "shape")
        if strides is not None:
            steps = _integers(strides, "strides")
        elif shape is None and array.strides is not None:
            steps = _usable(dims, array.strides, item_bytes)
        else:
            steps = interop.contiguous_strides(dims)
        _check_tensor(array.address, array.dtype, item_bytes, dims, steps)
        rank = len(dims)
        box_dims = _integers(box, "box")
        element_steps = (
            (1,) * rank
            if element_strides is None
            else _integers(element_strides, "element_strides")
        )
        options = (
            _choice("swizzle", swizzle, _SWIZZLES),
            _choice("l2_promotion", l2_promotion, _L2_PROMOTIONS),
            _choice("oob_fill", oob_fill, _OOB_FILLS),
        )
        _check_box(dims, box_dims, element_steps, item_bytes, swizzle, options[0])
        if options[2] and array.dtype not in _NAN_DTYPES:
            raise LaunchConfigError(
                f"oob_fill='nan' needs one of {', '.join(_NAN_DTYPES)}, not {array.dtype} {_RULE}"
            )
        made = object.__new__(cls)
        made.tensor = tensor
        made._keep = array.keep
        made.address, made.dtype = array.address, array.dtype
        made.device = interop.current_device() if array.device is None else array.device
        made.shape, made.strides = dims, steps
        made.box, made.element_strides = box_dims, element_steps
        made.swizzle, made.l2_promotion = swizzle or "none", l2_promotion or "none"
        made.oob_fill = oob_fill
        made._encode(item_bytes, options)
        return made

    def _encode(self, item_bytes: int, options: tuple[int, int, int]) -> None:
        rank = len(self.shape)
        # The driver wants 64-byte alignment, and so may whoever reads `data_address`.
        self._storage = ctypes.create_string_buffer(_SIZE_BYTES + _ALIGNMENT)
        start = ctypes.addressof(self._storage)
        self.data_address = start + -start % _ALIGNMENT
        swizzle, l2_promotion, oob_fill = options
        u32, u64 = ctypes.c_uint32, ctypes.c_uint64
        byte_strides = [step * item_bytes for step in reversed(self.strides[:-1])]
        arguments = (
            self.data_address,
            _DATA_TYPES[self.dtype],
            rank,
            self.address,
            (u64 * rank)(*reversed(self.shape)),
            (u64 * max(rank - 1, 1))(*byte_strides),
            (u32 * rank)(*reversed(self.box)),
            (u32 * rank)(*reversed(self.element_strides)),
            0,  # CU_TENSOR_MAP_INTERLEAVE_NONE
            swizzle,
            l2_promotion,
            oob_fill,
        )
        driver = _driver.get()
        if not driver.attribute(self.device, _TENSOR_MAP_ACCESS):
            major, minor = driver.compute_capability(self.device)
            raise LaunchConfigError(
                f"device {self.device} ({driver.device_name(self.device)}, compute capability "
                f"{major}.{minor}) has no TMA, which came with 9.0: use plain pointers"
            )
        box_bytes = math.prod(self.box) * item_bytes
        limit = driver.attribute(self.device, _SHARED_PER_MULTIPROCESSOR)
        if box_bytes > limit:
            raise LaunchConfigError(
                f"box {self.box} is {box_bytes:,} bytes: more than the {limit:,} bytes of shared "
                f"memory that device {self.device} ({driver.device_name(self.device)}) has"
            )
        call = "cuTensorMapEncodeTiled", *arguments
        driver.run(self.device, call, asked=f"encoding {self!r}", relaxed=False)
        self.raw = ctypes.string_at(self.data_address, _SIZE_BYTES)

    def _as_bytes(self) -> bytes:
        """The 128 bytes that a kernel takes as its parameter."""
        if getattr(self.tensor, "is_freed", False):
            raise TensorError(f"the tensor of this {self!r} was freed")
        return self.raw

    def _record_use(self, stream: int) -> None:
        """The runtime's note that `stream` works on the tensor's memory."""
        record = getattr(self.tensor, "_record_use", None)
        if record is not None:
            record(stream)

    def __eq__(self, other: object) -> bool:
        return self.raw == other.raw if isinstance(other, TensorMap) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.raw)

    def __repr__(self) -> str:
        return (
            f"TensorMap(address={self.address:#x}, dtype={self.dtype!r}, device={self.device}, "
            f"shape={self.shape}, strides={self.strides}, box={self.box}, "
            f"element_strides={self.element_strides}, swizzle={self.swizzle!r}, "
            f"l2_promotion={self.l2_promotion!r}, oob_fill={self.oob_fill!r})"
        )

    def __reduce__(self) -> Any:
        raise TypeError(
            "a TensorMap holds an address of this process and cannot be sent to another"
        )


def _integers(values: Any, name: str) -> tuple[int, ...]:
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError:
        raise LaunchConfigError(f"{name}={values!r}: expected a sequence of ints") from None


def _choice(name: str, value: Any, choices: dict[Any, int]) -> int:
    known = isinstance(value, (str, type(None))) and value in choices
    if not known:
        names = ", ".join(repr(choice) for choice in choices)
        raise LaunchConfigError(f"{name}={value!r}: expected one of {names}")
    return choices[value]


def _usable(dims: tuple[int, ...], strides: Sequence[int], item_bytes: int) -> tuple[int, ...]:
    """The tensor's strides; where a length of 1 makes one meaningless, one that the TMA takes."""
    steps = list(strides)
    for axis in range(len(dims) - 1, -1, -1):
        if dims[axis] != 1:
            continue
        if axis == len(dims) - 1:
            steps[axis] = 1
            continue
        unit = max(1, 16 // item_bytes)
        steps[axis] = -(-dims[axis + 1] * steps[axis + 1] // unit) * unit
    return tuple(steps)


def _check_tensor(
    address: int, dtype: str, item_bytes: int, dims: tuple[int, ...], steps: tuple[int, ...]
) -> None:
    if not 1 <= len(dims) <= _MAX_RANK:
        raise TensorError(f"rank {len(dims)}: the TMA takes rank 1 to {_MAX_RANK} {_RULE}")
    if len(steps) != len(dims):
        raise TensorError(f"strides {steps} do not match the rank of shape {dims}")
    for axis, length in enumerate(dims):
        if not 1 <= length <= _MAX_DIM:
            raise TensorError(
                f"dimension {axis} of shape {dims} is {length}: each is 1 to 2**32 {_RULE}"
            )
    if address % _ADDRESS_ALIGNMENT or not address:
        raise TensorError(
            f"address {address:#x} is not aligned to {_ADDRESS_ALIGNMENT} bytes {_RULE}; a slice "
            "may begin in the middle: copy it"
        )
    if steps[-1] != 1:
        raise TensorError(
            f"the last dimension has stride {steps[-1]} (strides {steps}): it must be contiguous; "
            "transpose or copy the tensor"
        )
    for axis, step in enumerate(steps[:-1]):
        step_bytes = step * item_bytes
        if step_bytes % 16 or not 0 <= step_bytes < _MAX_STRIDE_BYTES:
            raise TensorError(
                f"stride {axis} is {step} elements of {dtype} = {step_bytes} bytes: strides are "
                f"multiples of 16 bytes, below 2**40 {_RULE}; pad the rows"
            )


def _check_box(
    dims: tuple[int, ...],
    box: tuple[int, ...],
    element_steps: tuple[int, ...],
    item_bytes: int,
    swizzle: str | None,
    swizzle_code: int,
) -> None:
    for name, values in (("box", box), ("element_strides", element_steps)):
        if len(values) != len(dims):
            raise LaunchConfigError(
                f"{name}={values} has {len(values)} entries; the tensor has rank {len(dims)}"
            )
    for axis, length in enumerate(box):
        if not 1 <= length <= _MAX_BOX:
            raise LaunchConfigError(
                f"box[{axis}] is {length} (box {box}): each is 1 to {_MAX_BOX} {_RULE}"
            )
    for axis, step in enumerate(element_steps):
        if not 1 <= step <= _MAX_ELEMENT_STRIDE:
            raise LaunchConfigError(
                f"element_strides[{axis}] is {step}: each is 1 to {_MAX_ELEMENT_STRIDE} {_RULE}"
            )
    if element_steps[-1] != 1:
        raise LaunchConfigError(
            f"element_strides[-1] is {element_steps[-1]}: the TMA ignores a stride in the "
            "innermost dimension, so it must be 1"
        )
    inner_bytes = box[-1] * item_bytes
    if inner_bytes % 16:
        raise LaunchConfigError(
            f"box[-1] is {box[-1]} elements = {inner_bytes} bytes: it must be a multiple of 16 "
            f"bytes {_RULE}"
        )
    span = _SWIZZLE_SPANS.get(swizzle_code)
    if span is not None and inner_bytes > span:
        raise LaunchConfigError(
            f"box[-1] is {box[-1]} elements = {inner_bytes} bytes: with swizzle {swizzle!r} at "
            f"most {span} bytes {_RULE}; take a narrower box or a wider swizzle"
        )
