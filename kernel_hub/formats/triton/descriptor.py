"""Host tensor descriptors as kernel parameters: a CUtensorMap, or a pointer and numbers.

Takes what looks like Triton's TensorDescriptor, or a TensorMap; never imports Triton.
"""

from __future__ import annotations

import operator
from typing import Any

from ...arrays.device_array import DeviceArray
from ...arrays.dtypes import of as dtype_of
from ...arrays.interop import current_device, describe
from ...arrays.tensor_map import TensorMap
from ...errors import CubinCorruptError, LaunchConfigError, ParamsError, TensorError
from ...signature.params import Param
from ...signature.params import _same_dtype as same_dtype
from .metadata import Descriptor
from .signature import Argument, c_type, descriptor_rank, part_names

_SWIZZLES = ("none", "32B", "64B", "128B")
# PTX's number of an element type -> dtype token; the driver numbers the last three otherwise.
_ELEMENTS = {
    0: "uint8", 1: "uint16", 2: "uint32", 3: "int32", 4: "uint64", 5: "int64", 6: "fp16",
    7: "fp32", 9: "fp64", 10: "bf16",
}  # fmt: skip
_MAX_CACHED = 256


class Encoded:
    """An encoded descriptor: what `Param.convert` and `device_of` ask of a value."""

    is_cuda = True

    def __init__(self, raw: bytes, device: int, record: Any) -> None:
        self._raw, self._device, self._record = raw, device, record

    def get_device(self) -> int:
        """The GPU of the tensor."""
        return self._device

    def _as_bytes(self) -> bytes:
        return self._raw

    def _record_use(self, stream: int) -> None:
        if self._record is not None:
            self._record(stream)


class Expander:
    """One descriptor argument of a kernel: `expand` makes its parameters from a value."""

    def __init__(self, argument: Argument, index: int, meta: Descriptor | None, where: str) -> None:
        self._argument, self._index, self._meta, self._where = argument, index, meta, where
        self._names = part_names(argument)
        self._rank = descriptor_rank(argument.parts)
        self._flags = argument.parts.count("i1")
        self._pointer = Param.make(index, argument.name, c_type("*" + argument.element), 8, 0)
        self._cache: dict[Any, tuple[Any, ...]] = {}
        self._dtype = _ELEMENTS.get(meta.elem_type) if meta is not None else None
        if meta is not None:
            self._check_meta(meta)

    def _check_meta(self, meta: Descriptor) -> None:
        found = f"{self._where}: tensordesc_meta of {self._argument.name}"
        if self._dtype is None:
            raise CubinCorruptError(f"{found}: elem_type {meta.elem_type} is not known here")
        if dtype_of(self._dtype).size_bytes != meta.elem_bytes:
            raise CubinCorruptError(
                f"{found}: elem_size is {meta.elem_bytes}, {self._dtype} has another"
            )
        if len(meta.block) != self._rank:
            raise CubinCorruptError(
                f"{found}: block_size {list(meta.block)}, the kernel takes rank {self._rank}"
            )

    def expand(self, value: Any) -> tuple[Any, ...]:
        """The kernel's parameters for `value`. Raises ParamsError, LaunchConfigError."""
        if isinstance(value, TensorMap):
            return self._from_map(value)
        try:
            base, shape, strides = value.base, tuple(value.shape), tuple(value.strides)
            block = tuple(value.block_shape)
        except (AttributeError, TypeError):
            raise self._refuse(
                f"got {type(value).__name__}; pass Triton's TensorDescriptor (base, shape, "
                "strides, block_shape, padding)" + (" or a TensorMap" if self._meta else "")
            ) from None
        padding = getattr(value, "padding", "zero")
        rounds = bool(getattr(value, "round_f32_to_tf32", False))
        try:
            key = (base.data_ptr(), base.dtype, shape, strides, block, padding, rounds)
            found = self._cache.get(key)
        except (AttributeError, TypeError):
            key, found = None, None
        if found is None:
            shape, strides = self._integers(shape, "shape"), self._integers(strides, "strides")
            self._check(block, padding)
            if self._meta is not None:
                found = self._encode(self._meta, base, shape, strides, padding, rounds)
            else:
                return self._decompose(base, shape, strides, padding, rounds)
            # What notes its uses must not be kept alive here.
            if key is not None and not hasattr(base, "_record_use"):
                if len(self._cache) >= _MAX_CACHED:
                    self._cache.clear()
                self._cache[key] = found
        return found

    def _check(self, block: tuple[Any, ...], padding: Any) -> None:
        if self._argument.block and block != self._argument.block:
            raise self._refuse(
                f"its block_shape is {list(block)}; compiled for {list(self._argument.block)}"
            )
        if len(block) != self._rank:
            raise self._refuse(f"its block_shape is {list(block)}; the kernel's rank {self._rank}")
        if padding not in ("zero", "nan"):
            raise self._refuse(f"its padding is {padding!r}; expected 'zero' or 'nan'")

    def _encode(
        self, meta: Descriptor, base: Any, shape: tuple[int, ...], strides: tuple[int, ...],
        padding: str, rounds: bool,
    ) -> tuple[Any, ...]:  # fmt: skip
        if rounds:
            raise self._refuse("round_f32_to_tf32 cannot be encoded here")
        address, device = self._place(base)
        # The element type is the kernel's, not the tensor's: both have the same size and meaning.
        same = DeviceArray.from_address(address, (1,), self._dtype, device, base)
        try:
            made = TensorMap.tiled(
                same,
                meta.block,
                swizzle=_SWIZZLES[meta.swizzle],
                oob_fill="nan" if padding == "nan" else "zeros",
                shape=shape,
                strides=strides,
            )
        except (LaunchConfigError, TensorError) as error:
            raise type(error)(f"{self._where}: {self._argument.name}: {error}") from error
        numbers = (*shape, *strides)
        self._check_divisors((address, *numbers))
        return Encoded(made.raw, device, getattr(base, "_record_use", None)), *numbers

    def _decompose(
        self, base: Any, shape: tuple[int, ...], strides: tuple[int, ...], padding: str,
        rounds: bool,
    ) -> tuple[Any, ...]:  # fmt: skip
        flags = {"padding": padding == "nan", "round_f32_to_tf32": rounds}
        for name in list(flags)[self._flags :]:
            if flags[name]:
                raise self._refuse(f"{name} is not known to the Triton that compiled the kernel")
        numbers = (*shape, *strides)
        again = (*numbers, *list(flags.values())[: self._flags], *numbers)
        self._check_divisors((self._place(base)[0], *again))
        return base, *again

    def _place(self, base: Any) -> tuple[int, int]:
        """(address, device) of a descriptor's tensor of the right dtype."""
        try:
            view = describe(base)
        except TensorError as error:
            raise self._refuse(f"its base: {error}") from error
        if view is None:
            raise self._refuse(f"its base is a {type(base).__name__}; expected a tensor on the GPU")
        # Not `convert`, which notes a use on a stream that is not known here.
        address = self._pointer._address(view, base, None)
        return address, current_device() if view.device is None else view.device

    def _from_map(self, value: TensorMap) -> tuple[Any, ...]:
        meta = self._meta
        if meta is None:
            raise self._refuse(
                "got a TensorMap; this kernel is compiled without TMA: pass Triton's "
                "TensorDescriptor (base, shape, strides, block_shape, padding)"
            )
        declared = self._pointer.info
        if declared and declared.dtype and not same_dtype(declared.dtype, value.dtype):
            raise self._refuse(f"the TensorMap is of {value.dtype}; compiled for {declared.dtype}")
        for name, found, expected in (
            ("box", value.box, meta.block),
            ("swizzle", value.swizzle, _SWIZZLES[meta.swizzle]),
            ("element size", dtype_of(value.dtype).size_bytes, meta.elem_bytes),
            ("element_strides", value.element_strides, (1,) * self._rank),
        ):
            if found != expected:
                raise self._refuse(f"the TensorMap has {name} {found}; compiled for {expected}")
        numbers = (*value.shape, *value.strides)
        self._check_divisors((value.address, *numbers))
        return value, *numbers

    def _integers(self, values: tuple[Any, ...], what: str) -> tuple[int, ...]:
        try:
            numbers = tuple(operator.index(value) for value in values)
        except TypeError:
            raise self._refuse(f"its {what} is {values!r:.80}; expected ints") from None
        if len(numbers) != self._rank:
            raise self._refuse(f"its {what} is {list(numbers)}; the kernel's rank {self._rank}")
        return numbers

    def _check_divisors(self, values: tuple[int, ...]) -> None:
        for name, value, divisor in zip(self._names, values, self._argument.divisors, strict=True):
            if value % divisor:
                raise ParamsError(not_divisible(self._where, self._index, name, value, divisor))

    def _refuse(self, found: str) -> ParamsError:
        return ParamsError(f"{self._where}: params[{self._index}] ({self._argument.name}): {found}")


def not_divisible(
    where: str, index: int, name: str, value: int, divisor: int, *, address: bool = False
) -> str:
    """The message for a value that the kernel was not compiled for."""
    shown = f"the address {value:#x}" if address else str(value)
    return (
        f"{where}: params[{index}] ({name}) is {shown}, which is not "
        + (f"aligned to {divisor} bytes" if address else f"divisible by {divisor}")
        + f": the kernel was compiled for that (tt.divisibility = {divisor}). Pass "
        + ("aligned memory (a copy of the slice)" if address else "such a value")
        + f", or compile the kernel without that hint for {name}"
    )
